"""Settings of a transfer study, checked before anything is read or written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparing.errors import require
from sparing.jobs.folder import check_intent
from sparing.jobs.limits import at_least
from sparing.scaling.rules import Decay

RuleName = Literal["sp", "mup", "supar", "init-only", "rate-only"]
Axis = Literal["lr", "std"]
MasksName = Literal["constant-fan-in", "balanced", "bernoulli", "exact-count"]
Dynamic = Literal["none", "rigl", "set", "gmp"]
Scale = Literal["none", "density", "energy", "spectral"]

HEAD = 32  # dimensions of an attention head (count)

_PAIR = re.compile(r"(\d+):([0-9.eE+-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Find the best learning rate at every width and density, and what re-using the dense one costs.

    A grid of small training runs: rate (or initial scale) × width × density × rule × seed. The runs are trials of an
    optuna study; the same command with --resume in several shells shares them out, and goes on after an interruption.
    With --resume the grid may also grow. OUT gets study.db, report.html and record.jsonl.
    """

    out: Path = Path("runs/transfer")
    """Directory for everything this run writes."""

    model: Literal["mlp", "gpt2", "llama"] = "mlp"
    """What is trained: a ReLU net on scikit-learn's digits, or a language model of Hugging Face on characters."""

    text: str = "alice"
    """Text of the language models: bundled "alice" or "blake", or a text that `sparing fetch` lists."""

    axis: Axis = "lr"
    """What is swept: the learning rate, or the standard deviation of initial hidden weights."""

    rates: tuple[float, ...] = (-11, -10, -9, -8, -7, -6, -5, -4)
    """log2 of the base's learning rate η; one value where `axis` is std (the first is taken)."""

    stds: tuple[float, ...] = (-4, -3, -2, -1, 0, 1, 2, 3)
    """log2 of the factor on the initial standard deviation σ of hidden weights, where `axis` is std."""

    widths: tuple[int, ...] = (256,)
    """Widths d (count); multiples of 32 for language models."""

    densities: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """Densities ρ, shares of live hidden weights."""

    pairs: tuple[str, ...] = ()
    """Width and density given together, such as 128:1 256:0.25, in place of the grid of both: lines of equal parameters
    or equal fan-in; the first is what the others are compared with."""

    rules: tuple[RuleName, ...] = ("sp", "mup", "supar")
    """Parameterizations: standard, μP, SμPar, and μP with the density's correction of init or of the rate alone."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights, masks and batches; the same ones in every cell, masks nested over densities."""

    least_live: int = 8
    """Cells with fewer live inputs per neuron are omitted (count)."""

    base_width: int = 128
    """Width at which the rules change nothing (count)."""

    layers: int = 3
    """Hidden square layers of the net, or blocks of the language model (count)."""

    steps: int = 200
    """Optimizer steps of a run (count)."""

    batch: int = 128
    """Images, or sequences, in a step (count)."""

    length: int = 64
    """Characters in a sequence (count)."""

    warmup: float = 0.1
    """Share of the run in which the rate rises (0 to 1)."""

    final: float = 0.1
    """Share of the peak rate at the end of the linear fall (0 to 1)."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """AdamW (β 0.9, 0.95) or SGD with momentum 0.9."""

    weight_decay: float = 0.0
    """Decay λ of the base; torch shrinks weights by η · λ a step."""

    decay: Decay = "independent"
    """What stays fixed of weight decay as width and density change."""

    masks: MasksName = "constant-fan-in"
    """Law of the random masks."""

    dynamic: Dynamic = "none"
    """How masks change in training: not at all, RigL, SET or gradual magnitude pruning (towards the density)."""

    every: int = 20
    """Steps between mask updates (count)."""

    scale: Scale = "none"
    """What SμPar follows when masks change: nothing after the start, the density, the energy of the live weights, or
    the spectral norm of the masked update (also with fixed masks)."""

    coordinates: bool = True
    """Whether the page has a coordinate check of each rule, for the net (yes or no)."""

    storage: str | None = None
    """URL of the study's database, such as mysql://…; none: OUT/study.db. SQLite on one machine needs nothing more."""

    requeue: bool = False
    """Whether runs that are marked as under way on another machine are started over (yes or no)."""

    resume: bool = False
    """Whether to go on with the study in `out`, or to join it (yes or no)."""

    overwrite: bool = False
    """Whether a study that `out` already holds may be deleted (yes or no)."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before any file is opened."""
        at_least(1, self, "least_live", "base_width", "layers", "batch", "every", why="it counts things")
        at_least(10, self, "steps", why="the loss is the mean of the last tenth")
        at_least(2, self, "length", why="a character is told from those before it")
        at_least(0, self, "weight_decay", why="it is a finite size")
        for name in ("warmup", "final"):
            value = getattr(self, name)
            require(0 <= value <= 1, name, value, "it is a share", "pass 0 to 1")
        for name in ("rates", "widths", "densities", "rules", "seeds", "stds"):
            values = getattr(self, name)
            require(len(values) > 0, name, "none", "the grid would be empty", "pass one or more")
            shown, why = " ".join(map(str, values)), "a value stands there twice"
            require(len(set(values)) == len(values), name, shown, why, "pass each once")
        check_intent(resume=self.resume, overwrite=self.overwrite)
        self._check_sizes()
        self._check_dynamic()

    def _check_sizes(self) -> None:
        """Refuse densities, widths and pairs that no model can have."""
        parsed = self.places
        for width, density in parsed:
            require(width >= 2, "widths", width, "a layer needs neurons", "pass 2 or more")
            require(0 < density <= 1, "densities", density, "they are live shares", "pass numbers in (0, 1]")
            fits = self.model == "mlp" or width % HEAD == 0
            require(fits, "widths", width, f"attention heads have {HEAD} dimensions", f"pass multiples of {HEAD}")
            alive = not self.pairs or width * density >= self.least_live
            why = f"{width * density:g} live inputs are fewer than {self.least_live}"
            require(alive, "pairs", f"{width}:{density:g}", why, "pass a denser or wider one, or a lower --least-live")
        fits = self.model == "mlp" or self.base_width % HEAD == 0
        do = f"pass a multiple of {HEAD}"
        require(fits, "base_width", self.base_width, f"attention heads have {HEAD} dimensions", do)
        alive = any(width * density >= self.least_live for width, density in parsed)
        do = "pass denser or wider ones"
        require(alive, "densities", self.densities, f"no cell has {self.least_live} live inputs per neuron", do)
        reach = all(abs(value) <= 40 for value in (*self.rates, *self.stds))
        require(reach, "rates", self.rates, "they are logarithms to base 2", "pass such as -8 for 1/256")

    def _check_dynamic(self) -> None:
        """Refuse mask updates that never come."""
        late = self.dynamic == "none" or self.every < self.steps
        require(late, "every", self.every, f"the run has {self.steps} steps", "pass fewer")
        follows = self.scale in {"none", "spectral"} or self.dynamic != "none"
        why = "with fixed masks both are what they were at the start"
        require(follows, "scale", self.scale, why, "pass --dynamic rigl, set or gmp, or omit it")

    @property
    def places(self) -> tuple[tuple[int, float], ...]:
        """Widths and densities of the study: the pairs, or the grid of both."""
        if not self.pairs:
            return tuple((width, density) for width in self.widths for density in self.densities)
        found = []
        for text in self.pairs:
            match = _PAIR.fullmatch(text)
            require(match is not None, "pairs", text, "it is width:density", "pass such as 256:0.25")
            assert match is not None
            found.append((int(match[1]), _number(text, match[2])))
        return tuple(found)

    @property
    def swept(self) -> tuple[float, ...]:
        """Values of the swept axis (log2)."""
        return self.rates if self.axis == "lr" else self.stds


def _number(text: str, digits: str) -> float:
    try:
        return float(digits)
    except ValueError:
        require(False, "pairs", text, f"{digits} is no number", "pass such as 256:0.25")
        raise AssertionError from None
