"""The search for a sampler that beats LoRA: candidates that fit the bytes of LoRA of rank 8, on ladder 1.

Every candidate has a sweep of its own, as in the study, on development rows: that is one try, and there are as many as
``CANDIDATES`` has. The best three are then trained with five seeds that neither swept nor judge (``AGAIN``), beside the
best LoRA, and development rows choose one of them. It alone sees the test rows, with the seeds of the study.

``python -m benchmarks.layers.search`` goes on where it stopped; ``--list`` says what is left.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks import onednn
from benchmarks.layers.arms import ARMS, PERIOD, Arm, lisa
from benchmarks.layers.store import Rows, Store
from benchmarks.layers.study import CORPUS, LADDER_1, SEEDS, SWEEP_SEED, Job, Study, listing, run
from benchmarks.layers.texts import rows_of, spread
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import MakeStepper, local_stepper
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.packing import Packed
from sparing.jobs.step import LocalStepper
from sparing.layersample import Adaptive, CostAware, Fixed, LayerSampling, Sampler, Uniform
from sparing.layersample.draws import Draw

WITH, WITHOUT = 3, 4
"""Blocks that fit the bytes of LoRA of rank 8, where the embedding trains and where it is frozen."""
AGAIN = tuple(range(200, 205))
"""Seeds of the second round."""
RIVAL = "LoRA, rank 8"
"""What is to be beaten, and whose bytes are the limit."""
BEST = 3
"""Candidates in the second round (count)."""
DECAY = 0.9
"""Weight of what earlier intervals showed of a block."""


# ---- draws


@dataclass(frozen=True, kw_only=True)
class WithLast:
    """The last block always, and the others by another draw."""

    others: Draw = field(default_factory=Uniform)
    needs_scores: ClassVar[bool] = False

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """One fewer of the others, and the last."""
        return (*self.others.draw(count - 1, active - 1, seed=seed, interval=interval), count - 1)

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """1 for the last."""
        return torch.cat([self.others.inclusion(count - 1, active - 1), torch.ones(1, dtype=torch.float64)])


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """Uniform draws of a number of blocks, and for a number of periods, that change along the run."""

    counts: tuple[int, ...]
    """Blocks in each quarter of the run."""
    lasting: tuple[int, ...] = (1, 1, 1, 1)
    """Periods that a set lasts in each quarter."""
    periods: int = 10
    """Periods of the run."""
    needs_scores: ClassVar[bool] = False

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """The blocks of a period."""
        quarter = min(4 * interval // self.periods, 3)
        first = interval - interval % self.lasting[quarter]
        return Uniform().draw(count, self.counts[quarter], seed=seed, interval=first)

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """Of the mean count."""
        return torch.full((count,), fmean(self.counts) / count, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Told:
    """Chances as ``Adaptive`` gives them to scores that somebody else writes."""

    scores: list[float]
    temperature: float = 1.0
    needs_scores: ClassVar[bool] = False

    def draw(
        self, count: int, active: int, *, seed: int, interval: int, scores: Tensor | None = None
    ) -> tuple[int, ...]:
        """By what has been written; blocks that never trained look as good as the best."""
        inner = Adaptive(temperature=self.temperature)
        return inner.draw(count, active, seed=seed, interval=interval, scores=torch.tensor(self.scores))

    def inclusion(self, count: int, active: int, *, scores: Tensor | None = None) -> Tensor:
        """By what has been written."""
        return Adaptive(temperature=self.temperature).inclusion(count, active, scores=torch.tensor(self.scores))


# ---- signals

Signal = Callable[[nn.Module, Sampler, torch.optim.Optimizer], Mapping[int, float]]
"""What a step shows of the blocks that trained in it."""


def each(of: Callable[[Tensor, dict[str, Any]], Tensor]) -> Signal:
    """A signal that is a sum over a block's tensors of what gradient and state of each give, per parameter."""

    def signal(model: nn.Module, sampler: Sampler, optimizer: torch.optim.Optimizer) -> Mapping[int, float]:
        found = {}
        for unit in sampler.active:
            params = list(sampler.units[unit].params.values())
            total = sum(float(of(p.grad, optimizer.state[p])) for p in params if p.grad is not None)
            found[unit] = total / sum(p.numel() for p in params)
        return found

    return signal


def gain(grad: Tensor, state: dict[str, Any]) -> Tensor:
    """What a step takes off the loss to first order, but for the rate: g · m̂/√v̂."""
    return (grad * _direction(state)).sum()


def agreement(grad: Tensor, state: dict[str, Any]) -> Tensor:
    """How far the gradients of an interval agree: m̂²/v̂, one where all are the same."""
    return _direction(state).square().sum()


def curvature(grad: Tensor, state: dict[str, Any]) -> Tensor:
    """Squared gradients in units of the root of their running mean: g²/√v̂."""
    return (grad.square() / _second(state)).sum()


def _second(state: dict[str, Any]) -> Tensor:
    return (state["exp_avg_sq"] / (1 - 0.999 ** state["step"])).sqrt() + 1e-8


def _direction(state: dict[str, Any]) -> Tensor:
    return state["exp_avg"] / (1 - 0.9 ** state["step"]) / _second(state)


class Decrease:
    """By how much the loss of some training rows fell while blocks trained, per period; above 0."""

    def __init__(self, rows: Callable[[], Packed], period: int) -> None:
        """Of rows that are asked for when the first step is done."""
        self.rows, self.period, self.last = rows, period, math.nan

    def __call__(self, model: nn.Module, sampler: Sampler, optimizer: torch.optim.Optimizer) -> Mapping[int, float]:
        """Nothing but at the ends of periods; the first period only tells where the loss is."""
        if (sampler.step + 1) % self.period:
            return {}
        now, _ = held_out_loss(model, self.rows(), batch=PROBED)
        fell, self.last = self.last - now, now
        return {} if math.isnan(fell) else {unit: max(fell, 0.0) for unit in sampler.active}


def told(signal: Callable[[], Signal], *, temperature: float = 1.0) -> MakeStepper:
    """A sampler whose draws follow a signal that is read after every step."""

    def make(model: nn.Module, training: Training) -> tuple[LocalStepper, Sampler | None]:
        method, read = training.method, signal()
        assert isinstance(method, LayerSampling)
        scores, shown = [math.nan] * LAYERS, dict[int, list[float]]()
        changed = replace(method, sampler=Told(scores=scores, temperature=temperature))
        stepper, sampler = local_stepper(model, replace(training, method=changed))
        assert sampler is not None

        def watch(*_: Any) -> None:
            for unit, value in read(model, sampler, stepper.optimizer).items():
                shown.setdefault(unit, []).append(value)
            if (sampler.step + 1) % method.period == 0:
                for unit, values in shown.items():
                    seen = fmean(values)
                    scores[unit] = seen if math.isnan(scores[unit]) else DECAY * scores[unit] + (1 - DECAY) * seen
                shown.clear()

        stepper.optimizer.register_step_post_hook(watch)
        return stepper, sampler

    return make


def some_rows() -> Packed:
    """Training rows on which the fall of the loss is measured."""
    return spread(rows_of(CORPUS, LADDER_1.tokenizer()).train, PROBED)


PROBED = 8
LAYERS = 16
"""Blocks of the model."""


def _frozen(name: str, **others: Any) -> Arm:
    return _arm(name, lisa(active=WITHOUT, embed=False, **others))


def _arm(name: str, method: LayerSampling, **others: Any) -> Arm:
    return Arm(name=f"search: {name}", family="lisa", method=method, centre=-20, **others)


def _told(name: str, signal: Callable[[], Signal], **others: Any) -> Arm:
    return _arm(name, lisa(active=WITHOUT, embed=False), stepper=told(signal, **others))


LAST = Fixed(blocks=tuple(range(LAYERS - WITH, LAYERS)))
CANDIDATES: tuple[Arm, ...] = (
    _frozen("uniform, embedding frozen"),
    _frozen("gradient norm per parameter", sampler=Adaptive()),
    _frozen("gradient norm, greedy", sampler=Adaptive(temperature=0.25)),
    _frozen("gradient norm, quick to learn", sampler=Adaptive(decay=0.5)),
    _frozen("free bound ‖x‖·‖δ‖", sampler=Adaptive(signal="bound")),
    _frozen("gradient norm by cost", sampler=CostAware()),
    _told("gain to first order", lambda: each(gain)),
    _told("agreement of gradients", lambda: each(agreement)),
    _told("curvature-scaled gradients", lambda: each(curvature)),
    _told("fall of the loss", lambda: Decrease(some_rows, PERIOD)),
    _frozen("state offloaded", state="offload"),
    _arm("state offloaded, embedding on", lisa(active=WITH, state="offload")),
    _arm("gradient norm, embedding on", lisa(active=WITH, sampler=Adaptive())),
    _arm("last block always", lisa(active=WITH, sampler=WithLast())),
    _arm("last three blocks", lisa(active=WITH, sampler=LAST)),
    _arm("fewer and fewer blocks", lisa(active=WITH, sampler=Scheduled(counts=(3, 3, 2, 1)))),
    _arm("more and more blocks", lisa(active=WITH, sampler=Scheduled(counts=(1, 2, 3, 3)))),
    _arm("longer and longer periods", lisa(active=WITH, period=5,
         sampler=Scheduled(counts=(3, 3, 3, 3), lasting=(1, 1, 2, 4), periods=20))),
    _arm("21 matrices", lisa(active=7 * WITH, units="module")),
)  # fmt: skip


FIRST = replace(LADDER_1, arms=CANDIDATES, seeds=())
LORA = next(arm for arm in ARMS if arm.name == RIVAL)


@dataclass(frozen=True, kw_only=True)
class Beside(Study):
    """The rival's row beside sweeps that began with other weights than its own."""

    def plan(self, rows: Rows) -> list[Job]:
        """Its best rate, with the seed of the sweeps."""
        half = self.chosen(rows, LORA)
        return [] if half is None else self.missing(rows, [self._run(LORA, "dev", half, SWEEP_SEED)])


@dataclass(frozen=True, kw_only=True)
class Second(Study):
    """The second round: development rows, at rates that are known."""

    def plan(self, rows: Rows) -> list[Job]:
        """Every seed of every arm."""
        return self.missing(rows, self.whole(rows, "dev", AGAIN))


_SAME: dict[str, Any] = {
    "name": LADDER_1.name, "of": LADDER_1.of, "load": LADDER_1.load, "tokenizer": LADDER_1.tokenizer,
}  # fmt: skip
BESIDE = Beside(arms=(LORA,), **_SAME)


def second(rows: Rows) -> Second:
    """The best candidates and the LoRA arms whose bytes they fit."""
    return Second(arms=[*best_of(rows), LORA], **_SAME)


def ahead(rows: Rows, arm: Arm) -> float | None:
    """By how much a candidate's sweep beats the rival (nat, negative); both began with the same weights."""
    weights, half = FIRST.swept_on(rows, arm), BESIDE.chosen(rows, LORA)
    if weights is None or half is None:
        return None
    theirs = BESIDE.sweeps(rows, LORA).get(weights, {}).get(half)
    return None if theirs is None else min(FIRST.sweeps(rows, arm)[weights].values()) - theirs


def best_of(rows: Rows, count: int = BEST) -> list[Arm]:
    """The candidates that the first round puts first."""
    known = {arm.name: gap for arm in CANDIDATES if (gap := ahead(rows, arm)) is not None}
    return sorted((arm for arm in CANDIDATES if arm.name in known), key=lambda arm: known[arm.name])[:count]


def again(rows: Rows, arm: Arm) -> dict[tuple[str, int], float]:
    """Weights and seed -> development loss of an arm in the second round."""
    study = replace(LADDER_1, arms=(arm,))
    half = study.chosen(rows, arm)
    mine = [row for row in study.own(rows) if row["kind"] == "dev" and row["half"] == half]
    return {(row["weights"], row["seed"]): row["dev"] for row in mine if row["seed"] in AGAIN}


def winner(rows: Rows) -> Arm:
    """The candidate that the second round puts first, of seeds that all of them have from the same weights."""
    losses = {arm.name: again(rows, arm) for arm in best_of(rows)}
    shared = set.intersection(*map(set, losses.values()))
    return min(best_of(rows), key=lambda arm: fmean(losses[arm.name][start] for start in sorted(shared)))


def confirmed(rows: Rows) -> Study:
    """The winner, its rival and LISA of as many bytes on the test rows, with the seeds of the study."""
    others = [arm for arm in ARMS if arm.name in {RIVAL, f"LISA, {WITH} blocks"}]
    return replace(LADDER_1, arms=(winner(rows), *others), seeds=SEEDS)


def main() -> None:
    """Do what is missing, or say what it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what is left")
    options = parser.parse_args()
    torch.set_num_threads(1)
    onednn.use()
    store = Store()
    if options.list:
        print(listing(FIRST, store.rows()))
        return
    run(FIRST, store)
    run(BESIDE, store)
    run(second(store.rows()), store)
    run(confirmed(store.rows()), store)


if __name__ == "__main__":
    main()
