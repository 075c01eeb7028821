"""What a person may choose about a merge, checked before anything is opened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.folder import check_intent
from sparing.jobs.limits import at_least, positive

How = Literal["auto", "soup", "greedy", "linear", "task", "ties", "dare", "sign-aware"]

# Ways that merge what each model changed of a common ancestor.
FROM_BASE: Final = ("task", "ties", "dare", "sign-aware")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Predict whether models can be merged, merge them, and measure what the merge loses.

    First comes the prediction, from the weights alone. Then the merge, read and written tensor by tensor, so that
    models larger than the memory can be merged. Then, with `--data`, the loss and error of every parent and of the
    merge, one model in memory at a time. With `--how auto` a merge that is predicted to fail, or that loses on the
    validation rows, is not made: the page says why and what to do, and the exit status is 0. OUT gets model/ (or
    model.safetensors), report.html and record.jsonl.
    """

    models: Annotated[Positional[tuple[Path, ...]], arg(metavar="MODEL")]
    """Two or more checkpoints of one architecture: folders of save_pretrained, or .safetensors files of weights."""

    base: Path | None = None
    """The model that all of them were fine-tuned from: task, ties, dare and sign-aware need it, and the prediction is
    better with it."""

    how: How = "auto"
    """auto chooses by the prediction and, with `--data`, by the validation rows. soup: the mean. greedy: the mean of
    those models that help on validation rows. linear: a weighted mean. task: base + scale · sum of the changes. ties,
    dare, sign-aware: the same after resolving conflicts between changes."""

    data: str | None = None
    """Rows to measure on: a .txt or .jsonl file, or a text that `sparing fetch` lists, for language models; mnist,
    fashion-mnist, cifar10 or digits for image classifiers."""

    net: str | None = None
    """Entry point `module:function` that builds the model of .safetensors files, an image classifier, to measure it."""

    weights: tuple[float, ...] | None = None
    """Share of each model, in order, for linear; they need not sum to one."""

    scale: float | None = None
    """Factor on the merged change, λ; default: the best of a few on the validation rows, without data 0.4 for task and
    dare and 1 for ties and sign-aware, as Yadav et al. 2023 take without validation rows."""

    keep: float = 0.2
    """Share of the largest changes that ties keeps of each model, k."""

    drop: float = 0.9
    """Share of the changes that dare drops at random, p."""

    points: int = 11
    """Places on the way from the first model to the second that are measured (count)."""

    rows: int = 256
    """Images, or rows of tokens, to choose by and as many to report on (count)."""

    calibration: int = 1000
    """Training images that batch-norm statistics are taken from (count)."""

    length: int | None = None
    """Tokens in a row, for a language model (count); default 128, or fewer if the model has fewer positions."""

    seed: int = 0
    """Of what dare drops, and of the intervals."""

    out: Path = Path("runs/merge")
    """Folder of the merged model, the record and the page."""

    resume: bool = False
    """Go on where an interrupted run stopped, to the same bits."""

    overwrite: bool = False
    """Delete an earlier run in that folder."""

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict."""
        several = len(self.models) >= 2
        require(several, "models", len(self.models), "a merge takes two or more", "name another checkpoint")
        at_least(1, self, "rows", "calibration")
        at_least(2, self, "length", why="a token is told from those before it")
        at_least(3, self, "points", why="both ends and the middle are on the way")
        require(self.points % 2 == 1, "points", self.points, "the middle must be one of them", "pass an odd number")
        positive(self, "scale")
        require(0 < self.keep <= 1, "keep", self.keep, "it is a share of the changes", "pass one above 0, up to 1")
        require(0 <= self.drop < 1, "drop", self.drop, "it is a share of the changes", "pass one below 1")
        check_intent(resume=self.resume, overwrite=self.overwrite)
        self._check_how()
        self._check_weights()

    def _check_how(self) -> None:
        """What a way of merging needs beside the models."""
        based = self.how not in FROM_BASE or self.base is not None
        why = f"{self.how} merges what the models changed of a common ancestor"
        require(based, "base", "none", why, "pass --base, or --how soup")
        measured = self.how != "greedy" or self.data is not None
        require(measured, "data", "none", "greedy adds models while validation rows like it", "pass --data")
        scaled = self.scale is None or self.how in FROM_BASE
        why = "only task, ties, dare and sign-aware have a scale"
        require(scaled, "scale", f"{self.scale} with --how {self.how}", why, "omit it, or name one of them")
        files = all(path.suffix == ".safetensors" for path in self.models)
        fits = self.net is None or files
        require(fits, "net", self.net, "a folder says itself what its model is", "omit --net")
        known = self.data is None or not files or self.net is not None
        do = "pass --net module:function, which builds the model"
        require(known, "data", self.data, "weights alone are no model that could be measured", do)

    def _check_weights(self) -> None:
        """Shares, for linear alone."""
        linear = self.how == "linear"
        both = linear == (self.weights is not None)
        got = "none" if self.weights is None else f"some with --how {self.how}"
        require(both, "weights", got, "linear and its shares go together", "pass --how linear --weights W1 W2 …")
        if self.weights is None:
            return
        fits = len(self.weights) == len(self.models)
        do = "pass one for each"
        require(fits, "weights", len(self.weights), f"there are {len(self.models)} models", do)
        sound = all(0 <= weight < math.inf for weight in self.weights) and sum(self.weights) > 0
        shown = " ".join(map(str, self.weights))
        require(sound, "weights", shown, "a mean has shares", "pass numbers of 0 or more, of which one is above 0")

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
