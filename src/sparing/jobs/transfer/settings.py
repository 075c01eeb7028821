"""Settings of a transfer study, checked before anything is read or written, and the grid of runs that they mean."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from sparing.errors import UserError, require
from sparing.jobs.limits import AtLeast, Count, CountOrZero, Group, Length, LiveShare, Several, Share, SizeOrZero
from sparing.jobs.settings import MaskUpdates, Repeated, Resumable, RuleName, Scaled

Axis = Literal["lr", "std"]
MasksName = Literal["fan-in", "balanced", "bernoulli", "exact"]
Follow = Literal["none", "density", "energy", "spectral"]

HEAD = 32  # dimensions of an attention head (count)

_PAIR = re.compile(r"(\d+):([0-9.eE+-]+)")

Exponents = Annotated[tuple[float, ...], Several("the grid would be empty")]


@dataclass(frozen=True, kw_only=True)
class Updates(MaskUpdates):
    """When masks change, used by `--dynamic rigl`, `set` and `gmp`."""

    every: Count = 20


Ends = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Tuning(Group, name="tune"):
    """Random search on the dense base, before anything is swept: each number is drawn uniformly between two logs."""

    tries: CountOrZero = 0
    """Draws of rate, initial scale and both multipliers (count), the best of which all runs go by; 0: no search."""

    steps: Annotated[int, AtLeast(10, "the loss is the mean of the last tenth")] = 500
    """Optimizer steps (count): of each draw."""

    log2_rate: Ends = (-10.0, -4.0)
    """Ends of log2 of the base's learning rate η."""

    log2_std: Ends = (-1.0, 3.0)
    """Ends of log2 of the factor on the initial standard deviation σ of every matrix, over the model's own."""

    log2_input: Ends = (0.0, 6.0)
    """Ends of log2 of the multiplier of the embedding's output α_in."""

    log2_output: Ends = (-2.0, 3.0)
    """Ends of log2 of the multiplier of the logits α_out."""

    def __post_init__(self) -> None:
        """Refuse boxes without an inside."""
        super().__post_init__()
        for name in DRAWN:
            low, high = getattr(self, name)
            why = "the first end lies below the second, both within 40 octaves"
            require(-40 <= low <= high <= 40, f"tune.{name}", (low, high), why, "pass such as -10 -4")


DRAWN = ("log2_rate", "log2_std", "log2_input", "log2_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What is tuned on the base: log2 of η, of the factor on σ, of α_in and of α_out."""

    log2_rate: float = 0.0  # what is swept is added, where rates are
    log2_std: float = 0.0
    log2_input: float = 0.0
    log2_output: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Transfer(Resumable, Repeated, Scaled):
    """Find the best learning rate at every width and density, and what re-using the dense one costs.

    A grid of small training runs: rate (or initial scale) × width × density × rule × seed. The runs are trials of an
    optuna study; the same command with --resume in several shells shares them out, and goes on after an interruption.
    With --resume the grid may also grow. OUT gets study.db, report.html and record.jsonl.
    """

    out: Path = Path("runs/transfer")

    family: Literal["mlp", "gpt2", "llama"] = "mlp"
    """Architecture: a ReLU net on scikit-learn's digits (mlp), or a language model on characters: GPT-2 or Llama."""

    data: str = "alice"
    """Text to learn, for language models: bundled "alice" or "blake", a text that `sparing fetch` lists, or a file."""

    first: Count | None = None
    """Leading bytes of each text to use (count); none: all of it, of enwik8 the first 8,000,000."""

    tokenizer: Literal["char", "bpe"] = "char"
    """What a language model reads: characters, or byte pairs learnt from the training part."""

    vocabulary: Annotated[int, AtLeast(257, "256 bytes and an end of text come first")] = 1024
    """Tokens of `bpe` (count); at least 257."""

    tune: Tuning = field(default_factory=Tuning)

    axis: Axis = "lr"
    """What is swept: the learning rate, or the standard deviation of initial hidden weights."""

    log2_rates: Exponents = (-11, -10, -9, -8, -7, -6, -5, -4)
    """log2 of the base's learning rate η; one value where `axis` is std (the first is taken)."""

    log2_around: Exponents = (-2, -1, 0, 1, 2)
    """log2 of the learning rate over the best draw's, swept in place of `log2_rates` where `tune` draws."""

    log2_stds: Exponents = (-4, -3, -2, -1, 0, 1, 2, 3)
    """log2 of the factor on the initial standard deviation σ of hidden weights, where `axis` is std."""

    widths: Annotated[tuple[int, ...], Several("the grid would be empty")] = (256,)
    """Widths of the net d (count): multiples of 32 for language models."""

    densities: Annotated[tuple[LiveShare, ...], Several("the grid would be empty")] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """Densities ρ, shares of live hidden weights."""

    pairs: tuple[str, ...] = ()
    """Width and density given together, such as 128:1 256:0.25, in place of the grid of both: lines of equal parameters
    or equal fan-in; the first is what the others are compared with."""

    rules: Annotated[tuple[RuleName, ...], Several("the grid would be empty")] = ("sp", "mup", "supar")
    """Parameterizations: standard, μP, SμPar, and μP with the density's correction of init or of the rate alone."""

    least_live: Count = 8
    """Cells with fewer live inputs per neuron are omitted (count)."""

    layers: Count = 3
    base_width: Count = 128

    steps: Annotated[int, AtLeast(10, "the loss is the mean of the last tenth")] = 200
    """Optimizer steps (count): of each run."""

    batch: Count = 128
    """Rows per step (count): images, or sequences."""

    length: Length = 64
    """Tokens per row (count), for a language model."""

    warmup_share: Share = 0.1
    """Share of the run in which the learning rate rises linearly to its peak (0 to 1)."""

    final_share: Share = 0.1
    """Share of the peak rate at the end of the linear fall (0 to 1)."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer: AdamW (β 0.9, 0.95) or SGD with momentum 0.9."""

    weight_decay: SizeOrZero = 0.0
    """Weight decay λ: of the base, per step and unit of learning rate; decoupled, but of sgd added to the gradient,
    where momentum makes it ten times as strong."""

    masks: MasksName = "fan-in"
    """Which weights live: equally many inputs per neuron (balanced: outputs too), each by its own coin, or an exact
    count."""

    mask_updates: Updates = field(default_factory=Updates)

    follow: Follow = "none"
    """What factors follow when masks change: nothing after the start, the density, the energy of the live weights, or
    the spectral norm of the masked update (also with fixed masks)."""

    backend: Literal["dense", "csr", "auto"] = "dense"
    """How masked layers run: as dense matrices with zeros, as compressed rows (CPU), or whichever was timed faster."""

    control: bool = True
    """Whether the model is also trained without its blocks, by as many steps, to tell what they learn (yes or no)."""

    coordinates: bool = True
    """Whether the page has a coordinate check of each rule, for the net (yes or no)."""

    storage: str | None = None
    """URL of the study's database, such as mysql://…; none: OUT/study.db. SQLite on one machine needs nothing more."""

    requeue: bool = False
    """Whether runs that are marked as under way on another machine are started over (yes or no)."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before any file is opened."""
        super().__post_init__()
        self._check_sizes()
        self._check_dynamic()

    def _check_sizes(self) -> None:
        """Refuse densities, widths and pairs that no model can have."""
        parsed = self.places
        for width, density in parsed:
            require(width >= 2, "widths", width, "a layer needs neurons", "pass 2 or more")
            require(0 < density <= 1, "densities", density, "they are live shares", "pass numbers in (0, 1]")
            fits = self.family == "mlp" or width % HEAD == 0
            require(fits, "widths", width, f"attention heads have {HEAD} dimensions", f"pass multiples of {HEAD}")
            alive = not self.pairs or width * density >= self.least_live
            why = f"{width * density:g} live inputs are fewer than {self.least_live}"
            require(alive, "pairs", f"{width}:{density:g}", why, "pass a denser or wider one, or a lower --least-live")
        fits = self.family == "mlp" or self.base_width % HEAD == 0
        do = f"pass a multiple of {HEAD}"
        require(fits, "base_width", self.base_width, f"attention heads have {HEAD} dimensions", do)
        alive = any(width * density >= self.least_live for width, density in parsed)
        do = "pass denser or wider ones"
        require(alive, "densities", self.densities, f"no cell has {self.least_live} live inputs per neuron", do)
        reach = all(abs(value) <= 40 for value in (*self.log2_rates, *self.log2_stds, *self.log2_around))
        require(reach, "log2_rates", self.log2_rates, "they are logarithms to base 2", "pass such as -8 for 1/256")

    def _check_dynamic(self) -> None:
        """Refuse mask updates that never come."""
        late = self.dynamic == "none" or self.mask_updates.every < self.steps
        require(late, "mask_updates.every", self.mask_updates.every, f"the run has {self.steps} steps", "pass fewer")
        follows = self.follow in {"none", "spectral"} or self.dynamic != "none"
        why = "with fixed masks both are what they were at the start"
        require(follows, "follow", self.follow, why, "pass --dynamic rigl, set or gmp, or omit it")
        fixed = self.backend == "dense" or (self.dynamic, self.follow) == ("none", "none")
        why = "masks that move, and the spectral norm, need dense weights"
        require(fixed, "backend", self.backend, why, "pass --backend dense")

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
            try:
                found.append((int(match[1]), float(match[2])))
            except ValueError:
                why = f"{match[2]} is no number"
                raise UserError("pairs", got=text, why=why, do="pass such as 256:0.25") from None
        return tuple(found)

    @property
    def swept(self) -> tuple[float, ...]:
        """Values of the swept axis (log2); of rates, over the best draw's where there are draws."""
        if self.axis == "std":
            return self.log2_stds
        return self.log2_around if self.tune.tries else self.log2_rates


Along = Literal["density", "width", "pairs"]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One training run."""

    rule: RuleName
    width: int  # d (count)
    density: float  # ρ
    x: float  # log2 of what is swept
    seed: int  # of weights, masks and batches

    @property
    def params(self) -> dict[str, Any]:
        """As the parameters of a trial."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class Line:
    """Places whose best rates are compared with the first one's."""

    rule: RuleName
    along: Along  # what changes on it
    name: str  # what stays, in words
    places: tuple[tuple[int, float], ...]  # (width, density), the reference first


def places(settings: Transfer) -> list[tuple[int, float]]:
    """Widths and densities with enough live inputs, in the order of the settings."""
    return [(width, density) for width, density in settings.places if width * density >= settings.least_live]


def omitted(settings: Transfer) -> list[tuple[int, float]]:
    """Widths and densities that are omitted for too few live inputs."""
    kept = places(settings)
    return [place for place in settings.places if place not in kept]


def cells(settings: Transfer) -> list[Cell]:
    """Every run of a study, seed by seed, so that an unfinished one is balanced."""
    return [
        Cell(rule, width, float(density), float(x), seed)
        for seed in settings.seeds
        for rule in settings.rules
        for width, density in places(settings)
        for x in settings.swept
    ]


def lines(settings: Transfer) -> list[Line]:
    """The comparisons: along density at each width, along width at the highest density, or along the pairs."""
    known = places(settings)
    found: list[Line] = []
    for rule in settings.rules:
        if settings.pairs:
            found.append(Line(rule, "pairs", "the pairs as given", tuple(known)))
            continue
        for width in settings.widths:
            mine = sorted((place for place in known if place[0] == width), key=lambda place: -place[1])
            found.append(Line(rule, "density", f"width {width}", tuple(mine)))
        densest = max(density for _, density in known)
        wide = sorted(place for place in known if place[1] == densest)
        found.append(Line(rule, "width", f"density {densest:g}", tuple(wide)))
    return [line for line in found if len(line.places) >= 2]
