"""The coordinate check: train a few steps at several widths and densities and see that nothing grows or vanishes.

    check = coordinate_check(lambda width: MLP(width), widths=(64, 128, 256), densities=(1, 1/2, 1/4))
    assert check.passed, check.failures

A parameterization is right when the entries of every layer's output, of the gradient that reaches it, and of the change
of its output since the start, ΔY = X (ΔW ⊙ M), are of one size at every width and density. Gradients are given in units
of 1/width, as the source does: multiplied by width over base width.

Three things move slopes under any rule. Few neurons: the size of a layer scatters by about 1/√(2 · width · samples),
so average seeds. Many samples: the sum of updates is coherent with an input only where there are fewer different
samples than live inputs; a large batch of unrelated rows shows the square root of density instead. Large logits: after
some steps gradients have the size of the residual loss; a readout initialized to zero keeps them comparable.

Source: Dey, Bergsma & Hestness 2024, section 3 and figure 5 (arXiv:2405.15743); Yang et al. 2022, appendix D.1
(arXiv:2203.03466).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.report import Record
from sparing.scaling.apply import apply_
from sparing.scaling.check.batch import Batch, check_batch, default_batch, loss_of
from sparing.scaling.check.logits import LogitsProbe, changes, live
from sparing.scaling.check.probe import Probe, rms
from sparing.scaling.check.slopes import BOUND, Slope, slopes
from sparing.scaling.masks.laws import ConstantFanIn, Law
from sparing.scaling.plans.planning import Plan, plan
from sparing.scaling.roles.structure import attention_path
from sparing.scaling.rules import Rule, SuPar
from sparing.seeds import number

if TYPE_CHECKING:
    from sparing.report import Figure

Make = Callable[[int], nn.Module]
Loss = Callable[[nn.Module, Batch], Tensor]

BETAS, EPS = (0.9, 0.95), 1e-12  # of Adam; a small ε does not damp small gradients
LOOSENESS = 2.0  # gradient and update may slope this many times as much as the forward size


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What a coordinate check found."""

    rule: str
    # columns module, role, width, density, live (fewest live inputs of a neuron in the model), step, seed, loss,
    # forward, gradient, update
    rows: tuple[Mapping[str, Any], ...]
    slopes: tuple[Slope, ...]  # at the last step

    @property
    def failures(self) -> tuple[Slope, ...]:
        """Slopes beyond their limits."""
        return tuple(one for one in self.slopes if not one.passed)

    @property
    def passed(self) -> bool:
        """Whether every judged slope is within its limit; false if none is judged."""
        return any(one.limit is not None for one in self.slopes) and not self.failures

    @property
    def worst(self) -> Slope | None:
        """The slope that is nearest to its limit or furthest beyond it."""
        judged = [one for one in self.slopes if one.limit is not None]
        return max(judged, key=_share_of_limit, default=None)

    def plot(self) -> list[Figure]:
        """One picture a statistic: its size over density, a line a module."""
        from sparing.scaling.check.plot import figures  # plotting is loaded only when a picture is asked for

        return figures(self.rule, self.rows, self.slopes)

    def record(self) -> Record:
        """Rows and slopes, to be written or shown."""
        seeds = sorted({row["seed"] for row in self.rows})
        question = f"Do layers under {self.rule} keep their size over width and density?"
        found = Record(question=question, settings={"rule": self.rule}, seed=seeds)
        for row in self.rows:
            found.add("coordinates", **row)
        for one in self.slopes:
            cells = {name: getattr(one, name) for name in one.__dataclass_fields__}
            found.add("slopes", **cells, passed=one.passed)
        return found


def _share_of_limit(one: Slope) -> float:
    share = abs(one.slope) / (one.limit or 1.0)
    return share if share == share else float("inf")  # a slope that is not a number is the worst


def coordinate_check(
    make_model: Make,
    widths: Sequence[int],
    densities: Sequence[float],
    *,
    rule: Rule | None = None,
    optimizer: str = "adam",
    lr: float = 2**-12,
    steps: int = 6,
    loss: Loss | None = None,
    batch: Batch | list[Batch] | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3),
    base_width: int | None = None,
    masks: Law | None = None,
    limit: float = 0.05,
    loose: float | None = None,
    bound: float = BOUND,
    planned: Mapping[str, Any] | None = None,
) -> Check:
    """Train fresh models for a few steps and fit how the sizes in their layers depend on density and width.

    Dropout is switched off. Points with fewer than 16 live inputs in some neuron are shown and not fitted. Layers that
    attention reads as bare tensors (``nn.MultiheadAttention``) are not seen, but its logits are: the change of each
    attention's logits since the start is judged as an update, from the second step on.

    Args:
        make_model: Width -> freshly initialised model; it may use torch's global generator, which is seeded around it.
        widths: Widths to try; one is enough for slopes along density.
        densities: Densities to try, in (0, 1].
        rule: Parameterization; ``SuPar()`` by default.
        optimizer: "adam" (AdamW) or "sgd".
        lr: The base's learning rate. ΔY is judged separately, so a small one is enough; with a large one a few rows are
            memorized within the check, and gradients have the size of the residual loss.
        steps: Optimizer steps (count); by default as many as it takes until each layer has moved those before it, also
            where readouts begin at zero.
        loss: (model, batch) -> scalar; by default ``model(**batch).loss`` or cross-entropy.
        batch: A mapping of keyword arguments or a pair (inputs, targets), the same at every width, or a list of
            them, of which each step takes the next: your own data. By default random tokens for a language model,
            normal numbers for an image classifier or a chain that begins with a Linear.
        seeds: Seeds of weights and masks; with several, a slope fails if it is further beyond its limit than scatter
            explains, by Student's t at 5 % over all slopes, or if it scatters over more than twice the bound.
        base_width: Width at which the rule changes nothing; the smallest by default.
        masks: Law of the masks; ``ConstantFanIn()`` by default.
        limit: Largest |slope| of forward sizes that passes.
        loose: The same for gradients and updates; twice ``limit`` by default.
        bound: Largest |slope| that passes whatever seeds scatter.
        planned: More arguments for ``plan``, such as ``roles``.

    Returns:
        Rows, slopes and whether they pass.
    """
    _check(widths, densities, steps, optimizer)
    base = min(widths) if base_width is None else base_width
    batches = _batches(batch, make_model, base, own_loss=loss is not None)
    chosen, law = rule or SuPar(), masks or ConstantFanIn()
    extra = {"rule": chosen, "optimizer": optimizer, "least_fan_in": 1, **_inputs(batches[0]), **(planned or {})}
    rows: list[Mapping[str, Any]] = []
    plans: dict[tuple[int, float], Plan] = {}  # the same for all seeds: only shapes and the law of initial scales count
    for seed, width, density in itertools.product(seeds, widths, densities):
        model = _build(make_model, width, seed)
        if (width, density) not in plans:
            plans[width, density] = plan(model, base=_build(make_model, base, seed), density=density, **extra)
        masked = apply_(model, plans[width, density], seed=seed, masks=law)
        place = {"width": width, "density": density, "live": _live_inputs(masked.plan), "seed": seed}
        stepper = _optimizer(optimizer, model, masked.plan, lr)
        for row in _train_steps(model, masked.plan, batches, loss or loss_of, stepper, steps):
            slope = row["gradient"]  # in units of 1/width
            rows.append(place | row | {"gradient": None if slope is None else slope * (width / base)})
    found = slopes(rows, limit=limit, loose=LOOSENESS * limit if loose is None else loose, bound=bound)
    return Check(rule=type(chosen).__name__, rows=tuple(rows), slopes=found)


def _batches(given: Batch | list[Batch] | None, make_model: Make, base: int, *, own_loss: bool) -> list[Batch]:
    """Return what the steps take in turn; refuse what the default loss cannot take."""
    given = default_batch(_build(make_model, base, 0)) if given is None else given
    batches = given if isinstance(given, list) else [given]
    require(len(batches) > 0, "batch", "an empty list", "there is nothing to step on", "pass one batch or more")
    for one in () if own_loss else batches:
        check_batch(one)
    return batches


def _live_inputs(planned: Plan) -> float:
    """Return the fewest live inputs of a hidden weight's neurons (count)."""
    hidden = [entry for entry in planned.entries.values() if entry.role == "hidden"]
    return min((entry.fan_in * entry.density for entry in hidden), default=float("inf"))


def _inputs(batch: Batch) -> dict[str, Any]:
    """Return what a plan is told of a model's inputs; of a mapping nothing, for it may hold targets too."""
    return {"inputs": batch[0]} if isinstance(batch, tuple) and isinstance(batch[0], Tensor) else {}


def _check(widths: Sequence[int], densities: Sequence[float], steps: int, optimizer: str) -> None:
    require(len(widths) > 0, "widths", "none", "there is nothing to check", "pass one or more")
    inside = len(densities) > 0 and all(0 < density <= 1 for density in densities)
    require(inside, "densities", tuple(densities), "they are live fractions", "pass numbers in (0, 1]")
    require(steps >= 1, "steps", steps, "an update needs a step", "pass 1 or more")
    known = optimizer in {"adam", "sgd"}
    require(known, "optimizer", optimizer, "the check steps with these two", "pass 'adam' or 'sgd'")


def _build(make_model: Make, width: int, seed: int) -> nn.Module:
    """Build a model seeded by ``seed`` and width, without dropout; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number(seed, "coordinate", "model", width))
        model = make_model(width)
    # Dropout scatters sizes more in narrow layers, which would show as a slope over width.
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.train()


def _optimizer(name: str, model: nn.Module, planned: Plan, lr: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(planned.groups(model, lr=lr))
    return torch.optim.AdamW(planned.groups(model, lr=lr, eps=EPS), lr=lr, betas=BETAS, weight_decay=0.0)


def _train_steps(
    model: nn.Module, planned: Plan, batches: list[Batch], loss: Loss, optimizer: torch.optim.Optimizer, steps: int
) -> Iterator[dict[str, Any]]:
    """Yield one row per optimizer step and module, and one per attention."""
    # ΔY is the change since the start, as in section 3 of the paper, not since the last step.
    origin = {name: weight.detach().clone() for name, weight in named_parameters(model).items()}
    queries = [e for e in planned.entries.values() if e.part in {"query", "qkv"} and len(e.shape) > 1]
    attentions = list(dict.fromkeys(attention_path(model, entry.module) for entry in queries))
    first: dict[int, dict[str, list[Tensor]]] = {}
    with torch.no_grad():
        for at, batch in enumerate(batches[:steps] if attentions else []):
            with LogitsProbe(model, attentions) as seen:
                loss(model, batch)
            first[at] = seen.found
    for step in range(steps):
        with Probe(model, origin) as probe:
            at = step % len(batches)
            with LogitsProbe(model, attentions) as seen:
                value = loss(model, batches[at])
            if value.ndim:
                raise UserError("loss", got=f"shape {tuple(value.shape)}", why="it is one number", do="return a mean")
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for name, statistics in probe.statistics().items():
                layer = probe.seen[name]
                entry = planned.entries.get(layer.owner)
                role = "" if entry is None else entry.role
                shown = "readout" if layer.readout or role == "output" else role
                # A readout whose input the model's own code divides has its gradient behind that number: T5's.
                own = planned.readout_own if layer.readout else entry.own if entry and role == "output" else 1.0
                slope = statistics["gradient"]
                sizes = statistics | {"gradient": None if slope is None else slope * own}
                yield {"module": name, "role": shown, "loss": value.item()} | sizes | {"step": step}
            for path, logits in seen.found.items():
                moved = rms(changes(logits, first[at][path])) if step else None
                sizes = {"forward": rms(live(logits)), "gradient": None, "update": moved}
                yield {"module": f"{path} logits", "role": "logits", "loss": value.item()} | sizes | {"step": step}
