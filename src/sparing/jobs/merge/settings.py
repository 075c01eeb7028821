"""What a person may choose about a merge, checked before anything is opened."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.limits import AtLeast, Count, Group, Length, ShareAboveZero, ShareBelowOne, Size
from sparing.jobs.settings import Evaluated, Resumable, Seeded

How = Literal["auto", "soup", "greedy", "linear", "task", "ties", "dare", "sign-aware"]

# Ways that merge what each model changed of a common ancestor.
FROM_BASE: Final = ("task", "ties", "dare", "sign-aware")


@dataclass(frozen=True, kw_only=True)
class Linear(Group, name="linear", flag="method", choices=("linear",)):
    """Settings of the weighted mean, used by `--method linear`."""

    weights: tuple[float, ...] | None = None
    """Share of each model, in order; they need not sum to one; none: another method."""


@dataclass(frozen=True, kw_only=True)
class Ties(Group, name="ties", flag="method", choices=("auto", "ties", "sign-aware")):
    """Settings of ties, used by `--method ties`, `sign-aware` and `auto`."""

    keep: ShareAboveZero = 0.2
    """Share of the largest changes that it keeps of each model, k."""


@dataclass(frozen=True, kw_only=True)
class Dare(Group, name="dare", flag="method", choices=("auto", "dare")):
    """Settings of dare, used by `--method dare` and `auto`."""

    drop: ShareBelowOne = 0.9
    """Share of the changes that it drops at random, p."""


@dataclass(frozen=True, kw_only=True)
class Settings(Resumable, Evaluated, Seeded):
    """Predict whether models can be merged, merge them, and measure what the merge loses.

    First comes the prediction, from the weights alone. Then the merge, read and written tensor by tensor, so that
    models larger than the memory can be merged. Then, with `--data`, the loss and error of every parent and of the
    merge, one model in memory at a time. With `--method auto` a merge that is predicted to fail, or that loses on the
    validation rows, is not made: the page says why and what to do, and the exit status is 0. OUT gets model/ (or
    model.safetensors), report.html and record.jsonl.
    """

    models: Annotated[Positional[tuple[Path, ...]], arg(metavar="MODEL")]
    """Two or more checkpoints of one architecture: folders of save_pretrained, or .safetensors files of weights. Or one
    recipe of mergekit's, a .yml file, which is carried out as it is."""

    base: Path | None = None
    """The model that all of them were fine-tuned from: task, ties, dare and sign-aware need it, and the prediction is
    better with it; none: unknown."""

    method: How = "auto"
    """auto chooses by the prediction and, with `--data`, by the validation rows. soup: the mean. greedy: the mean of
    those models that help on validation rows. linear: a weighted mean. task: base + factor · sum of the changes. ties,
    dare, sign-aware: the same after resolving conflicts between changes."""

    data: str | None = None
    """Rows to measure on: a .txt or .jsonl file, or a text that `sparing fetch` lists, for language models; mnist,
    fashion-mnist, cifar10 or digits for image classifiers; none: nothing is measured."""

    align: Literal["weights", "activations"] | None = None
    """Bring the units of all models into the order of the first before merging, for models that were trained from
    different starts: by their weights, or by what the units answer to the validation rows, which mostly fits better;
    none: as they are. Holds two models in memory, and needs `--data`."""

    entry: str | None = None
    """Entry point `module:function` that builds the model of a .safetensors file, to measure it; none: folders."""

    linear: Linear = field(default_factory=Linear)
    ties: Ties = field(default_factory=Ties)
    dare: Dare = field(default_factory=Dare)

    factor: Size | None = None
    """Factor on the merged change, λ; none: the best of a few on the validation rows, without data 0.4 for task and
    dare and 1 for ties and sign-aware, as Yadav et al. 2023 take without validation rows."""

    rows: Count = 256

    points: Annotated[int, AtLeast(3, "both ends and the middle are measured")] = 11
    """Points of a curve (count, odd): places on the way from the first model to the second that are measured."""

    length: Length | None = None
    """Tokens per row (count), for a language model; none: 128, or fewer if the model has fewer positions."""

    out: Path = Path("runs/merge")

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict."""
        super().__post_init__()
        if self.recipe is not None:
            self._check_recipe()
            return
        several = len(self.models) >= 2
        require(several, "models", len(self.models), "a merge takes two or more", "name another checkpoint")
        require(self.points % 2 == 1, "points", self.points, "the middle must be one of them", "pass an odd number")
        self._check_method()
        self._check_weights()
        self._check_alignment()

    @property
    def recipe(self) -> Path | None:
        """The recipe where one is named in place of models."""
        recipes = [path for path in self.models if path.suffix in {".yml", ".yaml"}]
        alone = not recipes or len(self.models) == 1
        why = "a recipe names its models itself"
        require(alone, "models", f"{recipes[:1]} beside others", why, "pass it alone")
        return recipes[0] if recipes else None

    def _check_recipe(self) -> None:
        """What would be ignored beside a recipe."""
        given = {"base": self.base, "data": self.data, "entry": self.entry, "factor": self.factor}
        given["method"] = None if self.method == "auto" else self.method
        for name, value in given.items():
            why = "a recipe says it itself, and nothing is measured"
            require(value is None, name, f"{value} beside a recipe", why, f"omit --{name}")

    def _check_method(self) -> None:
        """What a way of merging needs beside the models."""
        based = self.method not in FROM_BASE or self.base is not None
        why = f"{self.method} merges what the models changed of a common ancestor"
        require(based, "base", "none", why, "pass --base, or --method soup")
        measured = self.method != "greedy" or self.data is not None
        require(measured, "data", "none", "greedy adds models while validation rows like it", "pass --data")
        scaled = self.factor is None or self.method in FROM_BASE
        why = "only task, ties, dare and sign-aware have one"
        require(scaled, "factor", f"{self.factor} with --method {self.method}", why, "omit it, or name one of them")
        files = all(path.suffix == ".safetensors" for path in self.models)
        fits = self.entry is None or files
        require(fits, "entry", self.entry, "a folder says itself what its model is", "omit --entry")
        known = self.data is None or not files or self.entry is not None
        do = "pass --entry module:function, which builds the model"
        require(known, "data", self.data, "weights alone are no model that could be measured", do)

    def _check_alignment(self) -> None:
        """What reordering needs, and what it would break."""
        if self.align is None:
            return
        do = "pass --data, and for .safetensors files --entry"
        require(self.data is not None, "data", "none", "units are reordered by a forward pass on rows", do)
        why = "models of one ancestor have their units in one order already"
        require(self.base is None, "align", f"{self.align} with --base", why, "omit --align, or the base")

    def _check_weights(self) -> None:
        """Shares, for linear alone."""
        linear, weights = self.method == "linear", self.linear.weights
        both = linear == (weights is not None)
        got = "none" if weights is None else f"some with --method {self.method}"
        do = "pass --method linear --linear.weights W1 W2 …"
        require(both, "linear.weights", got, "linear and its shares go together", do)
        if weights is None:
            return
        fits = len(weights) == len(self.models)
        do = "pass one for each"
        require(fits, "linear.weights", len(weights), f"there are {len(self.models)} models", do)
        sound = all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0
        shown = " ".join(map(str, weights))
        require(
            sound, "linear.weights", shown, "a mean has shares", "pass numbers of 0 or more, of which one is above 0"
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """What the models are called on terminal and page: A, B, C … with their names."""
        return tuple(f"{letter(at)} ({named(path)})" for at, path in enumerate(self.models))


def letter(at: int) -> str:
    """The letter of a model by its index: A to Z, then A2, B2 and so on.

    Example:
        >>> letter(1), letter(26)
        ('B', 'A2')
    """
    return chr(ord("A") + at % 26) + (str(at // 26 + 1) if at >= 26 else "")


def named(path: Path) -> str:
    """The name of a checkpoint: of the run, where it is the folder ``model`` of one."""
    return path.resolve().parent.name if path.name == "model" else path.resolve().name
