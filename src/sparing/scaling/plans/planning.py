"""The plan: for every parameter its role, density and factors with the reasons, before anything is touched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from statistics import median
from typing import Any, TextIO, get_args

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError, require
from sparing.report import print_table
from sparing.scaling.masks.density import Density, by_pattern, densities
from sparing.scaling.plans import ratios
from sparing.scaling.plans.entries import Entry, entry_factors, few_live, make_entry, merge_layers, unknown_init
from sparing.scaling.plans.overview import overview, readout_factor
from sparing.scaling.roles.branches import branch_fault
from sparing.scaling.roles.find import Facts, facts_in, roles_of, with_linear_fans
from sparing.scaling.roles.initial import Init, depth_factor, measure_inits, spread
from sparing.scaling.roles.model_factors import OwnFactors, logits_factor, own_factors
from sparing.scaling.roles.narrow import Base, BuiltBase, build_base
from sparing.scaling.roles.observe import Inputs, observe
from sparing.scaling.roles.seen import Hook, Seen, look
from sparing.scaling.roles.structure import Structure, find_structure
from sparing.scaling.rules import RULES, CompleteP, Factors, Optimizer, Role, Rule, SuPar

APPLIED = "_sparing_scaling_plan"  # attribute of a scaled model: its plan at realised densities; not in checkpoints


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be done to a model, parameter by parameter; a value without tensors."""

    entries: Mapping[str, Entry]
    """Canonical name -> entry, in order of registration."""
    rule: Rule
    """The parameterization."""
    optimizer: Optimizer
    """Kind of optimizer."""
    depth: float = 1.0
    """Blocks over the base's, m_L; 1 unless the rule knows of depth."""
    attention: float = 1.0
    """Factor on attention logits; 1 leaves them alone."""
    width: int = 0
    """Median fan-in of hidden weights (count)."""
    base_width: int = 0
    """The same in the base (count)."""
    readout: str = ""
    """Path of the module that gives the output, tied or not; empty if none was found."""
    readout_ratio: float = 1.0
    """Inputs of the readout over the base's (ratio)."""
    readout_own: float = 1.0
    """Number by which the model's own code multiplies a tied readout, over the base's; the rule undoes it."""
    readout_norm: str = ""
    """Path of the norm whose output a tied readout takes in and nothing else does; empty if there is none."""

    @property
    def inputs(self) -> dict[str, float]:
        """Module path -> factor on its input at every forward pass; factors of 1 are omitted."""
        # A tied readout has no entry of its own: its weight is the embedding's. Any other has, and a factor there.
        own = any(e.module == self.readout and e.role == "output" for e in self.entries.values())
        factor = readout_factor(self.rule, self.optimizer, self.readout_ratio, self.readout_own)
        tied = {self.readout: factor} if self.readout and not own else {}
        scaled = [e for e in self.entries.values() if e.role != "embedding" and e.factors.forward != 1.0]
        found = {e.module: e.factors.forward for e in scaled} | tied
        return {path: factor for path, factor in found.items() if factor != 1.0}

    @property
    def outputs(self) -> dict[str, float]:
        """Module path -> factor on its output, bias included; factors of 1 are omitted."""
        found: dict[str, float] = {}
        for entry in self.entries.values():
            factor = entry.factors.branch * (entry.factors.forward if entry.role == "embedding" else 1.0)
            # Attention reads this layer's weight as a tensor: the call that a hook can see is its parent's.
            parent = entry.kind == "NonDynamicallyQuantizableLinear"
            if factor != 1.0:
                found[entry.module.rpartition(".")[0] if parent else entry.module] = factor
        return found

    def groups(
        self, model: nn.Module, *, lr: float, names: Collection[str] | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer of torch, each option scaled as the rule says.

        After ``apply_`` the densities are those of the masks, not those that were asked for.

        Args:
            model: The model of this plan, wrapped or not.
            lr: Learning rate of the base model.
            names: Only these parameters, where two optimizers share a model (Muon and AdamW).
            options: ``weight_decay`` and ``eps`` of the base model, ``betas`` and whatever else the optimizer takes.
                ``eps`` is 1e-8 unless given, and omitted where the optimizer has none.

        Returns:
            Groups with ``params``, ``param_names``, the options, and ``lr_scale``: lr over the base's.

        Raises:
            UserError: If the model's parameters have changed since it was planned.
        """
        # Masks miss the asked density by rounding, or by chance: the factors go with what was drawn.
        latest = getattr(submodule(model, ""), APPLIED, None)
        plan_ = latest if isinstance(latest, Plan) else self
        scaled = plan_.rule.rescales
        return ratios.groups(plan_.entries, plan_.optimizer, model, lr=lr, names=names, rescales=scaled, **options)

    def check_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose learning rates are not those of the plan, up to one common factor.

        Call it after a scheduler was built and now and then between steps; it costs nothing.

        Args:
            optimizers: Built from ``groups``; where two share the model (Muon and AdamW), both.

        Raises:
            UserError: If groups are unscaled, parameters are missing or new, a scheduler or the loop has broken the
                ratios, one of Adam's kind would rescale an L2 penalty, or Muon's own factor on rates is not the base's.
        """
        ratios.check(self.entries, self.optimizer, optimizers, rescales=self.rule.rescales)

    def with_densities(self, densities: Mapping[str, float]) -> Plan:
        """Return the same plan at other densities, such as the realized ones of masks.

        Args:
            densities: Canonical name -> density; others keep theirs.

        Returns:
            A new plan with new factors.

        Raises:
            UserError: If a name is not in the plan, or a density not in (0, 1].
        """
        for name, value in densities.items():
            if name not in self.entries or not 0 < value <= 1:
                raise UserError(
                    "densities", got=f"{value} for {name!r}", why="no such weight or no share", do="pass 0 < share <= 1"
                )
        updated = {name: replace(e, density=densities.get(name, e.density)) for name, e in self.entries.items()}
        entries = {name: replace(e, factors=entry_factors(e, self.rule, self.optimizer)) for name, e in updated.items()}
        return replace(self, entries=entries)

    def table(self) -> list[dict[str, Any]]:
        """Return one row per parameter."""
        return [
            {
                "parameter": e.name, "role": e.role, "why": e.why, "fan_in": e.fan_in, "m_in": e.m_in, "m_out": e.m_out,
                "density": e.density, "std": "" if e.std is None else e.std,
                "rescale": e.rescale if e.init != "unknown" else "", "lr": e.factors.lr,
                "decay": e.factors.weight_decay, "eps": e.factors.eps, "forward": e.factors.forward * e.factors.branch,
            }
            for e in self.entries.values()
        ]  # fmt: skip

    def report(self, *, every: bool = False, file: TextIO | None = None) -> None:
        """Print the table.

        Args:
            every: Whether each parameter has a row; otherwise those that differ in the number of their layer share one.
            file: Where it goes; standard output by default.
        """
        title = f"{type(self.rule).__name__}, {self.optimizer}: width {self.width} on a base of {self.base_width}"
        deep = f", {self.depth:g} × the depth" if self.depth != 1 else ""
        logits = f", attention logits × {self.attention:g}" if self.attention != 1 else ""
        inputs = self.inputs
        read = f", input of {self.readout} × {inputs[self.readout]:g}" if self.readout in inputs else ""
        rows = self.table() if every else merge_layers(self.table())
        print_table(rows, title=title + deep + logits + read + few_live(self.entries.values()), file=file)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        settings: dict[str, Any] = asdict(self.rule) if is_dataclass(self.rule) else {}
        plain["rule"] = {"name": type(self.rule).__name__, **settings}
        return plain | {"entries": [asdict(e) | {"shape": list(e.shape)} for e in self.entries.values()]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Plan:
        """Read what ``to_json`` wrote.

        Args:
            plain: JSON values.

        Returns:
            An equal plan.

        Raises:
            UserError: If its rule is unknown.
        """
        name, settings = plain["rule"]["name"], {k: v for k, v in plain["rule"].items() if k != "name"}
        known = {rule.__name__: rule for rule in RULES}
        if name not in known:
            raise UserError("rule", got=name, why="no such rule", do=f"one of {', '.join(known)}")
        if settings.get("depth") is not None:
            settings["depth"] = CompleteP(**settings["depth"])
        read = [_read_entry(entry) for entry in plain["entries"]]
        return cls(**{**plain, "entries": {entry.name: entry for entry in read}, "rule": known[name](**settings)})


def _read_entry(plain: Mapping[str, Any]) -> Entry:
    shape, factors, hook = tuple(plain["shape"]), Factors(**plain["factors"]), plain["hook"]
    why = "before 0.3 the factor of such an attention was on its queries, without their bias"
    require(hook["place"] != "query_input", "plan", "query_input", why, "make the plan again")
    read = Hook(**{**hook, "rows": tuple(hook["rows"])})
    return Entry(**{**plain, "shape": shape, "factors": factors, "hook": read})


def plan(
    model: nn.Module,
    *,
    base: Base = None,
    density: Density = 1.0,
    rule: Rule | None = None,
    optimizer: Optimizer = "adam",
    roles: Mapping[str, Role] | None = None,
    init: Mapping[str, Init] | None = None,
    layers: int | None = None,
    sparse: Sequence[str] | None = None,
    least_fan_in: int = 4,
    inputs: Inputs | None = None,
) -> Plan:
    """Decide what every parameter gets; the model stays as it is.

    Args:
        model: Freshly initialised, as its author draws it.
        base: The model at which hyperparameters were tuned: a narrower model of the same depth, a Hugging Face
            configuration, a width at which the model's own configuration is taken, or a function that builds one.
            None: the model itself, so only density matters.
        density: Share of live hidden weights: one number, numbers by pattern of names, ``ERK(total=0.1)`` (in words
            ``"erk:0.1"``: a tenth of them all, more where layers are small) or ``ER()`` (``"er:20"``).
        rule: The parameterization; ``SuPar()`` by default.
        optimizer: Kind of optimizer.
        roles: Pattern of names (``fnmatch``) -> role, for what is classified wrongly or not at all.
        init: Pattern of names -> how initial weights depend on width, where that cannot be measured.
        layers: Blocks of the model (count), to override those found, for the rule for depth.
        sparse: Patterns of the weights to mask, instead of all hidden ones.
        least_fan_in: Live inputs that a unit must keep (count).
        inputs: What the model is called with: a tensor, positional arguments, or keywords; only shapes and dtypes
            count. By default they are made from the configuration of a transformers model, or from the layer that takes
            data in. Model and base are each run on them once, on tensors without data.

    Returns:
        The plan.

    Raises:
        UserError: If ``optimizer`` is unknown, the model was scaled before, or no forward pass can be watched and
            ``roles`` does not say what every matrix is.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> slim = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> chosen = plan(mlp, base=slim, density=1 / 4)
        >>> chosen.entries["2.weight"].factors.lr, chosen.inputs
        (1.0, {'4': 0.25})
    """
    _require_unscaled(model, optimizer)
    _require_numbers(model)
    chosen = SuPar() if rule is None else rule
    base_ = build_base(model, base)
    seen = _look(model, base_, chosen, roles, inputs)
    structure = find_structure(model, base_.shapes, seen)
    known = facts_in(structure, model, base_.shapes)
    found = roles_of(known, roles)
    known = {name: with_linear_fans(fact, found[name][0]) for name, fact in known.items()}
    names = {name: role for name, (role, _) in found.items()}
    live = densities(known, names, density, sparse=sparse, least_fan_in=least_fan_in)
    depth = _depth(model, chosen, structure, layers)
    drawing = _inits(known, model, base_.model, chosen, init or {}, structure)
    scales = _scales(known, model, drawing, structure, depth)
    own = own_factors(model, seen, names) if chosen.rescales and seen else OwnFactors({}, {})
    entries = {
        name: make_entry(
            fact, found[name], chosen, optimizer, density=live.get(name, 1.0), init=drawing[name],
            own=own.weights.get(name, 1.0), **scales[name],
        )
        for name, fact in known.items()
    }  # fmt: skip
    return Plan(
        entries=entries, rule=chosen, optimizer=optimizer, attention=logits_factor(seen, chosen) if seen else 1.0,
        depth=depth, **overview(model, known, found, structure, own, chosen, optimizer),
    )  # fmt: skip


def _look(
    model: nn.Module, base: BuiltBase, rule: Rule, roles: Mapping[str, Role] | None, inputs: Inputs | None
) -> Seen | None:
    """Watch a forward pass; None where none can be and nothing hangs on it, for every matrix has a role."""
    try:
        return look(model, *observe(model, base.model, inputs))
    except UserError:
        params = named_parameters(model)
        told = all(p.ndim < 2 or any(fnmatchcase(name, one) for one in roles or {}) for name, p in params.items())
        if not told or (base.model is not None and rule.logits(4.0) != 1.0):
            raise
        return None


def _require_unscaled(model: nn.Module, optimizer: str) -> None:
    """Refuse an optimizer without rules, and a model that was scaled already."""
    if optimizer not in get_args(Optimizer):
        kinds = ", ".join(get_args(Optimizer))
        raise UserError("optimizer", got=repr(optimizer), why="no such kind", do=f"pass one of {kinds}")
    if hasattr(submodule(model, ""), APPLIED):
        do = "plan before apply_, or build the model anew; the plan in force is that of its masks"
        raise UserError("model", got="one that a plan was applied to", why="its weights are scaled already", do=do)


def _require_numbers(model: nn.Module) -> None:
    """Refuse a model whose weights cannot be scaled: without any, not drawn yet, or quantized."""
    params, early = named_parameters(model), "plan and apply_ before the model is quantized"
    why = "there is nothing to scale"
    require(bool(params), "model", f"{type(submodule(model, '')).__name__} without parameters", why, early)
    for name, parameter in params.items():
        lazy = isinstance(parameter, UninitializedParameter)
        require(not lazy, name, "a lazy layer", "it has no shape before the first call", "call model and base once")
        # Sharded weights, which such subclasses hold too, can be planned; apply_ refuses them.
        packed = is_traceable_wrapper_subclass(parameter) and not hasattr(parameter, "device_mesh")
        got, why = f"{type(parameter).__name__} of {parameter.dtype}", "quantized weights cannot be scaled or masked"
        require(not packed and parameter.is_floating_point(), name, got, why, early)


def _scales(
    known: Mapping[str, Facts], model: nn.Module, kinds: Mapping[str, Init], structure: Structure, depth: float
) -> dict[str, dict[str, float | None]]:
    """Return, by name, the depth ratio, the factor that undoes a depth-dependent draw, and the drawn deviation."""
    undo = _shrunk_with_depth(known, kinds, model, structure) if depth != 1 else set()
    return {
        name: {
            "depth": depth if known[name].body else 1.0,
            "undo": depth**0.5 if name in undo else 1.0,
            "drawn": None if weight.is_meta else spread(weight),
        }
        for name, weight in named_parameters(model).items()
    }


def _depth(model: nn.Module, rule: Rule, structure: Structure, layers: int | None) -> float:
    """Return m_L; 1 under a rule without depth, which needs blocks of which each branch can be multiplied once."""
    if rule.depth is None:
        return 1.0
    count = structure.layers if layers is None else layers
    fault = "no pass to watch" if structure.seen is None else branch_fault(model, structure.seen.flow, structure.blocks)
    fault = fault if structure.body else "blocks of several kinds"
    if count < 1 or fault:
        why = "the rule for depth scales the residual branches of repeated blocks"
        what = "inputs=" if fault == "no pass to watch" else "a model of equal residual blocks"
        do = f"give {what}, or leave depth=None"
        raise UserError("model", got=f"{count} blocks" if count < 1 else fault, why=why, do=do)
    return count / rule.depth.base_layers


def _inits(
    known: Mapping[str, Facts],
    model: nn.Module,
    base: nn.Module | None,
    rule: Rule,
    overrides: Mapping[str, Init],
    structure: Structure,
) -> dict[str, Init]:
    """Return how initial scales depend on width; what cannot be measured is refused, not guessed."""
    if not rule.rescales:
        return dict.fromkeys(known, "given")
    sigma = getattr(getattr(submodule(model, ""), "config", None), "initializer_range", None)
    # The second is GPT-2's, of branches.
    scales = [sigma, sigma * (2 * max(structure.layers, 1)) ** -0.5] if sigma else []
    kinds = [kind for kind in get_args(Init) if kind != "unknown"]
    for pattern, kind in overrides.items():
        if kind not in kinds or not any(fnmatchcase(name, pattern) for name in known):
            why = "no such kind, or no parameter fits the pattern"
            raise UserError("init", got=f"{pattern!r}: {kind!r}", why=why, do=f"map names to {', '.join(kinds)}")
    found = measure_inits(known, model, base, scales=scales) | by_pattern(overrides, known)
    params = named_parameters(model)
    if unsure := [name for name, kind in found.items() if kind == "unknown" and not params[name].is_meta]:
        raise unknown_init(unsure)
    return found


def _shrunk_with_depth(
    known: Mapping[str, Facts], kinds: Mapping[str, Init], model: nn.Module, structure: Structure
) -> set[str]:
    """Return the ends of branches that the model draws smaller the deeper it is."""
    params = named_parameters(model)
    std = {
        name: spread(params[name])
        for name, fact in known.items()
        if fact.body and fact.matrix and kinds[name] == "constant" and not params[name].is_meta
    }
    others = [value for name, value in std.items() if not known[name].residual]
    if not others:
        return set()
    return {
        name
        for name, value in std.items()
        if known[name].residual and depth_factor(value, median(others), structure.layers) != 1
    }
