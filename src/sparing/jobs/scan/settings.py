"""What a person may choose about a scan, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.folder import check_intent
from sparing.jobs.limits import at_least

NoiseName = Literal["gaussian", "uniform", "ternary", "shifted-gaussian", "positive-uniform", "binary", "one"]
GroupName = Literal["all", "classifier", "features", "first", "conv", "norm"]
Part = Literal["noises", "ratio", "groups", "special", "norms"]
Statistics = Literal["exact", "cumulative", "stale", "batch"]
NormName = Literal["scaled", "raw", "filter", "group"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Walk away from a finished model in chosen directions and measure which side of its valley is flatter.

    Every curve moves the weights by λ times a direction, λ from −1 to 1, with batch-norm statistics re-estimated at
    every point; each comes with an asymmetry index, an interval over noise draws and the share of signs in which
    direction and weights agree. An interrupted scan goes on at the curve it was at. OUT gets report.html and
    record.jsonl.
    """

    checkpoint: Annotated[Positional[str], arg(metavar="CHECKPOINT")]
    """Folder of a causal language model or image classifier (save_pretrained), a .safetensors file of weights (with
    `--entry`), or a Python entry point `module:function` that returns (model, evaluate) or (model, evaluate,
    calibrate). Of metrics whose name does not tell, an attribute says which way they get better:
    `evaluate.better = {"margin": "higher"}`."""

    data: str | None = None
    """Rows to measure on, for a folder: mnist, fashion-mnist, cifar10 or digits for images; a .txt or .jsonl file, or
    a text that `sparing fetch` lists, for language. An entry point brings its own."""

    entry: str | None = None
    """Entry point `module:function` that builds the model and its measure, where CHECKPOINT is a .safetensors file."""

    initial: Path | None = None
    """The same model before training, a folder or a .safetensors file: adds its weights as a special direction."""

    parts: tuple[Part, ...] = ("noises", "ratio", "groups", "special", "norms")
    """What to do: the noises, the sign-change ratio, groups of parameters, special directions, and the histogram of
    the scales of norm layers."""

    noises: tuple[NoiseName, ...] = (
        "gaussian", "uniform", "ternary", "shifted-gaussian", "positive-uniform", "binary", "one",
    )  # fmt: skip
    """Noises ε to walk along, each as drawn and with the signs of the weights."""

    ratios: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """Sign-change ratios r: share of elements of Gaussian noise that are given the sign of their weight (0 to 1)."""

    groups: tuple[GroupName, ...] = ("all", "classifier", "features", "first", "conv", "norm")
    """Groups of parameters to move alone; those that the model lacks are left out."""

    points: int = 21
    """Values of λ from −1 to 1 on a curve (count, odd, so that 0 is one of them)."""

    draws: int = 5
    """Noise draws of a curve (count); the interval of the index resamples them."""

    widths: tuple[float, ...] = (1.0,)
    """Lengths of the walk s: λ = 1 moves the weights by s times their own length. The page draws the first."""

    norm: NormName = "scaled"
    """Length of a direction: the weights' own as a whole, none (raw), that of every filter, or of every block."""

    statistics: Statistics = "exact"
    """Batch-norm statistics at each point: of all calibration rows at once, their mean over batches, those of the
    checkpoint (stale), or of each measured batch."""

    rows: int = 1000
    """Images or rows of tokens to measure on (count), for a folder."""

    calibration: int = 1000
    """Training images that batch-norm statistics are taken from (count), for a folder."""

    length: int = 128
    """Tokens in a row, for a language model (count)."""

    seed: int = 0
    """Of the noise."""

    workers: int = 1
    """Processes that share the points of a curve (count); they change nothing but the time."""

    out: Path = Path("runs/scan")
    """Folder of the record, the page and the checkpoint of the scan."""

    resume: bool = False
    """Go on where an interrupted scan stopped, to the same bits."""

    overwrite: bool = False
    """Delete an earlier run in that folder."""

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict."""
        at_least(3, self, "points", why="a side needs a point")
        require(self.points % 2 == 1, "points", self.points, "λ = 0 must be one of them", "pass an odd number")
        at_least(1, self, "draws", "rows", "calibration")
        at_least(1, self, "workers", why="someone must do the work", most=1024)
        at_least(2, self, "length", why="a token is told from those before it")
        check_intent(resume=self.resume, overwrite=self.overwrite)
        for name in ("parts", "noises", "ratios", "groups", "widths"):
            self._check_several(name)
        shares = all(0 <= ratio <= 1 for ratio in self.ratios)
        require(shares, "ratios", " ".join(map(str, self.ratios)), "they are shares", "pass numbers from 0 to 1")
        for width in self.widths:
            require(0 < width < float("inf"), "widths", width, "it is a length", "pass numbers above 0")
        self._check_source()

    def _check_several(self, name: str) -> None:
        values = getattr(self, name)
        require(len(values) > 0, name, "none", "nothing would be done", "pass one or more")
        do = "pass each once"
        require(len(set(values)) == len(values), name, " ".join(map(str, values)), "a value stands there twice", do)

    def _check_source(self) -> None:
        weights = self.checkpoint.endswith(".safetensors")
        needed = not weights or self.entry is not None
        require(needed, "checkpoint", self.checkpoint, "weights alone are no model", "pass --entry module:function")
        fits = weights or self.entry is None
        why = "it builds the model of a .safetensors file"
        require(fits, "entry", self.entry, why, "pass the entry point alone, as CHECKPOINT")
        own = self.data is None or not (weights or ":" in self.checkpoint)
        require(own, "data", self.data, "an entry point brings its own rows", "omit --data")
