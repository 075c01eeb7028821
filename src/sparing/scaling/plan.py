"""The plan: for every parameter its role, density and factors with the reasons, before anything is touched.

chosen = plan(model, base=256, density=1 / 16)
chosen.report()
masks = apply_(model, chosen, seed=0)
optimizer = torch.optim.AdamW(chosen.groups(model, lr=2**-6, weight_decay=0.1))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import median
from typing import Any, TextIO, get_args

import torch
from torch import nn

from sparing.blocks import named_parameters, submodule
from sparing.errors import UserError
from sparing.report import print_table
from sparing.scaling import ratios, written
from sparing.scaling.density import Density, densities
from sparing.scaling.entries import Entry, alike, entry, factors_of, unknown_init
from sparing.scaling.initial import Init, depth_factor, initial, spread
from sparing.scaling.narrow import Base, narrower
from sparing.scaling.own import logits_factor, require_no_others, table_factors
from sparing.scaling.roles import Facts, as_given, facts_in, roles_of
from sparing.scaling.rules import Optimizer, Role, Rule, SuPar
from sparing.scaling.structure import Frame, frame

APPLIED = "_sparing_scaling_plan"
"""Attribute of a model under which ``apply_`` leaves the plan at realised densities; it is no part of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be done to a model, parameter by parameter; a value without tensors."""

    entries: Mapping[str, Entry]
    """Canonical name -> line, in order of registration."""
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
    """Times the base's width that go into the readout."""

    @property
    def inputs(self) -> dict[str, float]:
        """Module path -> factor on its input at every forward pass; factors of 1 are left out."""
        lines = [line for line in self.entries.values() if line.role != "embedding" and line.factors.forward != 1.0]
        tied = {self.readout: self._readout_factor()} if self.readout else {}
        found = {line.module: line.factors.forward for line in lines} | tied
        return {path: factor for path, factor in found.items() if factor != 1.0}

    @property
    def outputs(self) -> dict[str, float]:
        """Module path -> factor on its output, bias included; factors of 1 are left out."""
        found: dict[str, float] = {}
        for line in self.entries.values():
            factor = line.factors.branch * (line.factors.forward if line.role == "embedding" else 1.0)
            if factor != 1.0:
                found[_called(line)] = factor
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
                ``eps`` is 1e-8 unless given, and left out where the optimizer has none.

        Returns:
            Groups with ``params``, ``param_names``, the options, and ``lr_scale``: lr over the base's.

        Raises:
            UserError: If the model has other parameters than it had when planned.
        """
        latest = getattr(submodule(model, ""), APPLIED, None)
        plan_ = latest if isinstance(latest, Plan) else self
        return ratios.groups(plan_.entries, plan_.optimizer, model, lr=lr, names=names, **options)

    def check_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Refuse an optimizer whose learning rates are not those of the plan, up to one common factor.

        Call it after a scheduler was built and now and then between steps; it costs nothing.

        Args:
            optimizers: Built from ``groups``; where two share the model (Muon and AdamW), both.

        Raises:
            UserError: If groups are unscaled, parameters are missing or new, a scheduler or a hand has broken the
                ratios, or Adam would rescale an L2 penalty.
        """
        ratios.check(self.entries, self.optimizer, optimizers, touches=self.rule.rescales)

    def with_densities(self, densities: Mapping[str, float]) -> Plan:
        """Return the same plan at other densities, such as those that masks have in truth.

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
        lines = {name: replace(e, density=densities.get(name, e.density)) for name, e in self.entries.items()}
        return replace(self, entries=self._refactored(lines))

    def table(self) -> list[dict[str, Any]]:
        """Return one row per parameter."""
        return [
            {
                "parameter": e.name,
                "role": e.role,
                "why": e.why,
                "fan_in": e.fan_in,
                "m_in": e.m_in,
                "m_out": e.m_out,
                "density": e.density,
                "std": "" if e.std is None else e.std,
                "rescale": e.rescale if e.init != "unknown" else "",
                "lr": e.factors.lr,
                "decay": e.factors.weight_decay,
                "eps": e.factors.eps,
                "forward": e.factors.forward * e.factors.branch,
            }
            for e in self.entries.values()
        ]

    def report(self, *, every: bool = False, file: TextIO | None = None) -> None:
        """Print the table.

        Args:
            every: Whether each parameter has a row; otherwise those that differ in the number of their layer share one.
            file: Where to; standard output by default.
        """
        title = f"{type(self.rule).__name__}, {self.optimizer}: width {self.width} on a base of {self.base_width}"
        deep = f", {self.depth:g} × the depth" if self.depth != 1 else ""
        logits = f", attention logits × {self.attention:g}" if self.attention != 1 else ""
        read = f", input of {self.readout} × {self._readout_factor():g}" if self.readout_ratio != 1 else ""
        print_table(self.table() if every else alike(self.table()), title=title + deep + logits + read, file=file)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return written.to_json(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Plan:
        """Read what ``to_json`` wrote.

        Args:
            plain: JSON values.

        Returns:
            An equal plan.
        """
        return cls(**written.from_json(plain))

    def _refactored(self, lines: Mapping[str, Entry]) -> dict[str, Entry]:
        return {name: replace(e, factors=factors_of(e, self.rule, self.optimizer)) for name, e in lines.items()}

    def _readout_factor(self) -> float:
        ratio = self.readout_ratio
        return self.rule.factors(
            "output", fan_in=ratio, fan_out=1.0, density=1.0, depth=1.0, optimizer=self.optimizer
        ).forward


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
        layers: Blocks of the model (count), where the rule for depth shall not take those found.
        sparse: Patterns of the weights to mask, instead of all hidden ones.
        least_fan_in: Live inputs that a unit must keep (count).

    Returns:
        The plan.

    Raises:
        UserError: If ``optimizer`` is no kind of optimizer, or the model was scaled before.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> slim = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> chosen = plan(mlp, base=slim, density=1 / 4)
        >>> chosen.entries["2.weight"].factors.lr, chosen.inputs
        (1.0, {'4': 0.25})
    """
    _check(model, optimizer)
    chosen = SuPar() if rule is None else rule
    base_ = narrower(model, base)
    places = frame(model, base_.shapes)
    known = facts_in(places, model, base_.shapes)
    found = roles_of(known, roles)
    known = {name: as_given(fact, found[name][0]) for name, fact in known.items()}
    names = {name: role for name, (role, _) in found.items()}
    live = densities(known, names, density, sparse=sparse, least_fan_in=least_fan_in)
    depth = _depth(chosen, places, layers)
    drawing = _inits(known, model, base_.model, chosen, init or {}, places)
    scales = _scales(known, model, drawing, places, depth)
    own = table_factors(model, base_.model, known) if chosen.rescales else {}
    if chosen.rescales:
        require_no_others(model, base_.model, known)
    entries = {
        name: entry(
            fact, found[name], chosen, optimizer, density=live.get(name, 1.0), init=drawing[name],
            own=own.get(name, 1.0), **scales[name],
        )
        for name, fact in known.items()
    }  # fmt: skip
    return Plan(
        entries=entries, rule=chosen, optimizer=optimizer, depth=depth,
        attention=logits_factor(model, base_.model, known, chosen), **_overview(known, found, places),
    )  # fmt: skip


def _check(model: nn.Module, optimizer: str) -> None:
    """Refuse an optimizer without rules, and a model whose weights a plan has scaled."""
    if optimizer not in get_args(Optimizer):
        kinds = ", ".join(get_args(Optimizer))
        raise UserError("optimizer", got=repr(optimizer), why="no such kind", do=f"pass one of {kinds}")
    if hasattr(submodule(model, ""), APPLIED):
        do = "plan before apply_, or build the model anew; the plan in force is that of its masks"
        raise UserError("model", got="one that a plan was applied to", why="its weights are scaled already", do=do)


def _scales(
    known: Mapping[str, Facts], model: nn.Module, kinds: Mapping[str, Init], places: Frame, depth: float
) -> dict[str, dict[str, float | None]]:
    """Return what the model has drawn and what of it depth alone explains."""
    undo = _undone(known, kinds, model, places) if depth != 1 else set()
    return {
        name: {
            "depth": depth if known[name].body else 1.0,
            "undo": depth**0.5 if name in undo else 1.0,
            "drawn": None if weight.is_meta else spread(weight),
        }
        for name, weight in named_parameters(model).items()
    }


def _overview(known: Mapping[str, Facts], found: Mapping[str, tuple[Role, str]], places: Frame) -> dict[str, Any]:
    """Return widths and readout."""
    hidden = [fact for name, fact in known.items() if found[name][0] == "hidden"]
    heads = [
        f for n, f in known.items() if f.readout and (f.lookup or f.matrix) and found[n][0] in {"output", "embedding"}
    ]
    return {
        "width": int(median(fact.fan_in for fact in hidden)) if hidden else 0,
        "base_width": int(median(fact.base_fan_in for fact in hidden)) if hidden else 0,
        "readout": places.readout or "" if heads else "",
        "readout_ratio": (heads[0].m_out if heads[0].lookup else heads[0].m_in) if heads else 1.0,
    }


def _depth(rule: Rule, places: Frame, layers: int | None) -> float:
    """Return m_L, 1 where the rule does not care."""
    if rule.depth is None:
        return 1.0
    count = places.layers if layers is None else layers
    if count < 1 or not places.body or not places.residual:
        raise UserError(
            "model",
            got=_fault_of_depth(count, places),
            why="the rule for depth scales the residual branches of repeated blocks",
            do="give a model of alike residual blocks, or leave depth=None",
        )
    return count / rule.depth.base_layers


def _fault_of_depth(count: int, places: Frame) -> str:
    if count < 1:
        return f"{count} blocks"
    return "no residual branches" if places.body else "blocks of several kinds"


def _inits(
    known: Mapping[str, Facts],
    model: nn.Module,
    base: nn.Module | None,
    rule: Rule,
    overrides: Mapping[str, Init],
    places: Frame,
) -> dict[str, Init]:
    """Tell how initial scales depend on width, and refuse to guess."""
    if not rule.rescales:
        return dict.fromkeys(known, "given")
    sigma = getattr(getattr(submodule(model, ""), "config", None), "initializer_range", None)
    scales = [sigma, sigma * (2 * max(places.layers, 1)) ** -0.5] if sigma else []
    found = initial(known, model, base, scales=scales) | _given(overrides, known)
    params = named_parameters(model)
    if unsure := [name for name, kind in found.items() if kind == "unknown" and not params[name].is_meta]:
        raise unknown_init(unsure)
    return found


def _given(overrides: Mapping[str, Init], known: Mapping[str, Facts]) -> dict[str, Init]:
    """Return the kinds that patterns give; the first that fits decides."""
    kinds = [kind for kind in get_args(Init) if kind != "unknown"]
    for pattern, kind in overrides.items():
        if kind not in kinds or not any(fnmatchcase(name, pattern) for name in known):
            raise UserError(
                "init",
                got=f"{pattern!r}: {kind!r}",
                why="no such kind, or no parameter fits the pattern",
                do=f"map names to {', '.join(kinds)}",
            )
    first = {name: next((p for p in overrides if fnmatchcase(name, p)), None) for name in known}
    return {name: overrides[pattern] for name, pattern in first.items() if pattern is not None}


def _undone(known: Mapping[str, Facts], kinds: Mapping[str, Init], model: nn.Module, places: Frame) -> set[str]:
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
        if known[name].residual and depth_factor(value, median(others), places.layers) != 1
    }


def _called(line: Entry) -> str:
    """Return the module whose call a hook can see: attention multiplies by its output weights itself."""
    return line.module.rpartition(".")[0] if line.kind == "NonDynamicallyQuantizableLinear" else line.module
