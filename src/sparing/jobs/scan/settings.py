"""Settings of a scan, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.hub import OnHub
from sparing.jobs.limits import AtLeast, Count, Length, Several, Share, Size, Workers
from sparing.jobs.settings import Evaluated, FromHub, Resumable, Seeded

NoiseName = Literal["gaussian", "uniform", "ternary", "shifted-gaussian", "positive-uniform", "binary", "one"]
GroupName = Literal["all", "classifier", "features", "first", "conv", "norm"]
Part = Literal["noises", "ratio", "groups", "special", "norms", "surface", "curvature", "sharpness"]
Statistics = Literal["exact", "cumulative", "stale", "batch"]
NormName = Literal["scaled", "raw", "filter", "group"]


@dataclass(frozen=True, kw_only=True)
class Settings(Resumable, Evaluated, Seeded, FromHub):
    """Walk away from a finished model in chosen directions and measure which side of its valley is flatter.

    Every curve moves the weights by λ times a direction, λ from −1 to 1, with batch-norm statistics re-estimated at
    every point; each comes with an asymmetry index, an interval over noise draws and the share of signs in which
    direction and weights agree. An interrupted scan goes on at the curve it was at. OUT gets report.html and
    record.jsonl.
    """

    out: Path = Path("runs/scan")

    model: Annotated[Positional[str], arg(metavar="MODEL"), OnHub("model")]
    """Folder of a causal language model or image classifier (save_pretrained), its name on the Hugging Face hub,
    OWNER/NAME, a .safetensors file of weights (with
    `--entry`), or a Python entry point `module:function` that returns (model, evaluate) or (model, evaluate,
    calibrate). Of metrics whose name does not tell, an attribute says which way they get better:
    `evaluate.better = {"margin": "higher"}`."""

    data: str | None = None
    """Rows to measure on: a .txt or .jsonl file, or a text that `sparing fetch` lists, for language models; mnist,
    fashion-mnist, cifar10 or digits for image classifiers; none: an entry point brings its own."""

    entry: str | None = None
    """Entry point `module:function` that builds the model of a .safetensors file, and its measure; none: MODEL is a
    folder or an entry point."""

    initial: Annotated[Path | None, OnHub("model")] = None
    """The same model before training, a folder or a .safetensors file: adds its weights as a special direction; none:
    without it."""

    parts: Annotated[tuple[Part, ...], Several()] = ("noises", "ratio", "groups", "special", "norms")
    """What to do: the noises, the sign-change ratio, groups of parameters, special directions, and the histogram of
    the scales of norm layers; also a surface over two noises, the curvature (trace and eigenvalues of the Hessian), and
    the sharpness (how far the loss rises within a ball)."""

    towards: Annotated[tuple[Path, ...], OnHub("model")] = ()
    """One or two other models of the same architecture, folders or .safetensors files: adds the line to each, and with
    two the plane through the three."""

    trajectory: Annotated[tuple[Path, ...], OnHub("model")] = ()
    """Checkpoints of a run in order, folders or .safetensors files, projected onto the plane of two `--towards`."""

    eigenvalues: Count = 5
    """Largest eigenvalues of the Hessian to compute (count); used by `--parts curvature`."""

    radius: Size = 0.05
    """Radius of the ball for sharpness, in the unit of the weights; used by `--parts sharpness`."""

    adaptive_radius: Size = 0.5
    """The same for adaptive sharpness, where every step counts relative to its weight."""

    curvature_rows: Count = 256
    """Rows that curvature and sharpness are computed on (count), the first of the measured ones."""

    noises: Annotated[tuple[NoiseName, ...], Several()] = (
        "gaussian", "uniform", "ternary", "shifted-gaussian", "positive-uniform", "binary", "one",
    )  # fmt: skip
    """Noises ε to walk along, each as drawn and with the signs of the weights; used by `--parts noises`."""

    ratios: Annotated[tuple[Share, ...], Several()] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """Sign-change ratios r: share of elements of Gaussian noise that are given the sign of their weight (0 to 1); used
    by `--parts ratio`."""

    parameter_groups: Annotated[tuple[GroupName, ...], Several()] = (
        "all", "classifier", "features", "first", "conv", "norm",
    )  # fmt: skip
    """Groups of parameters to move alone, without those that the model lacks; used by `--parts groups`."""

    points: Annotated[int, AtLeast(3, "both ends and the middle are measured")] = 21
    """Points of a curve (count, odd): values of λ from −1 to 1, so that 0 is one of them."""

    draws: Count = 5
    """Noise draws of a curve (count), over which intervals are; with `--precision` the least of them."""

    precision: Size | None = None
    """Standard error that the asymmetry indices along noise shall have, over draws and rows, such as 0.05: draws, and
    rows that each has to itself, are added until it is reached; none: every draw is measured on all rows."""

    distances: Annotated[tuple[Size, ...], Several()] = (1.0,)
    """Lengths of the walk s: λ = 1 moves the weights by s times their own length. The page draws the first."""

    norm: NormName = "scaled"
    """Length of a direction: the weights' own as a whole, none (raw), that of every filter, or of every block."""

    statistics: Statistics = "exact"
    """Batch-norm statistics at each point: of all calibration rows at once, their mean over batches, those of the
    checkpoint (stale), or of each measured batch."""

    length: Length = 128
    """Tokens per row (count), for a language model."""

    workers: Workers = 1
    """Processes that share the work (count): points of a curve; they change nothing but the time."""

    def __post_init__(self) -> None:
        """Reject settings in conflict."""
        super().__post_init__()
        require(self.points % 2 == 1, "points", self.points, "λ = 0 must be one of them", "pass an odd number")
        weights = self.model.endswith(".safetensors")
        needed = not weights or self.entry is not None
        require(needed, "model", self.model, "weights alone are no model", "pass --entry module:function")
        fits = weights or self.entry is None
        why = "it builds the model of a .safetensors file"
        require(fits, "entry", self.entry, why, "pass the entry point alone, as MODEL")
        require(
            len(self.towards) <= 2, "towards", f"{len(self.towards)} models", "three span a plane", "pass two at most"
        )
        planar = not self.trajectory or len(self.towards) == 2
        why = "checkpoints are projected onto a plane"
        require(planar, "trajectory", f"{len(self.towards)} --towards", why, "pass two models as --towards")
        own = self.data is None or not (weights or ":" in self.model)
        require(own, "data", self.data, "an entry point brings its own rows", "omit --data")
