"""Settings of an attribution, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sparing.errors import require
from sparing.jobs.limits import AtLeast, Count, CountOrZero, Length, Rate, Several, ShareAboveZero, Size
from sparing.jobs.settings import Resumable, Seeded

IMAGES = ("mnist", "fashion-mnist", "cifar10", "digits")


@dataclass(frozen=True, kw_only=True)
class Settings(Resumable, Seeded):
    """Train a small model, and say which training rows made its predictions: which helped, and which harmed.

    The influence of every row is the exact derivative of a prediction's loss with respect to that row's weight, through
    the whole training run and its optimizer. The page shows the rows; random sets of rows are dropped and the model is
    retrained without them, to hold what was predicted against what happens. OUT gets report.html, record.jsonl and
    influence.safetensors: the influences (predictions × rows), and the numbers of the rows and of the test rows.
    """

    out: Path = Path("runs/attribute")

    data: str = "mnist"
    """What is learnt from: mnist, fashion-mnist, cifar10 or digits, for a perceptron; or a text, for a small language
    model of bytes: a .txt file (a paragraph is a row), a .jsonl file (a record is a row), or one that `sparing fetch`
    lists. The number of a row is its place there, from 0: records and paragraphs as in the file, those of fewer
    than four bytes too, which are left out; images in the order of the training part as packaged; digits in that of
    scikit-learn."""

    test: Path | None = None
    """Text whose rows are predicted, as `data`; none: rows of `data` that are set aside, a tenth or more, or the test
    images."""

    predictions: Annotated[tuple[Annotated[int, AtLeast(0, "rows are numbered from 0")], ...], Several()] = (0, 1, 2, 3)
    """Numbers of the test rows whose losses are attributed, from 0: places in `test`, in the test images as packaged,
    or among the rows set aside, whose own numbers the page shows; each adds one pass back through the run."""

    train_rows: Count = 1000
    """Training rows to use, drawn at random (count); at most those there are."""

    epochs: Size = 5.0
    """Passes over the training rows (count, may be a fraction)."""

    batch: Count | None = None
    """Rows per step (count); none: 50 images, or 20 rows of a text."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer: gradient descent with momentum 0.9, or AdamW with weight decay 0.01."""

    lr: Rate | None = None
    """Peak learning rate; it decays to 0 along half a cosine; none: 0.01, of a text 0.05, and 0.001 for AdamW. At
    higher ones nets learn more, and influences predict less."""

    width: Annotated[int, AtLeast(4, "four heads attend")] = 64
    """Width of the net (count): hidden units of the perceptron, or features of the language model."""

    activation: Literal["gelu", "relu"] = "gelu"
    """Nonlinearity: smooth, or with a kink, which makes influences predict less."""

    length: Length = 64
    """Tokens per row (count): bytes of a text; longer rows are cut there."""

    shown: Count = 8
    """Rows that the page shows on each side (count): helpful, and harmful."""

    retrain: CountOrZero = 10
    """Random sets of rows that are dropped and retrained without (count), to check predictions; 0: none."""

    share: ShareAboveZero = 0.01
    """Share of the training rows in such a set, and in the check of smoothness (0 to 1)."""

    @property
    def is_text(self) -> bool:
        """Whether a language model learns."""
        return self.data not in IMAGES

    @property
    def rows_per_step(self) -> int:
        """Rows per step, from the kind of data if none are given."""
        return self.batch or (20 if self.is_text else 50)

    @property
    def peak(self) -> float:
        """Peak learning rate, from the optimizer and the kind of data if none is given."""
        return self.lr or (0.001 if self.optimizer == "adamw" else 0.05 if self.is_text else 0.01)

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        super().__post_init__()
        text = self.is_text
        require(text or self.test is None, "test", self.test, "images have their own test part", "omit --test")
        fits, why = self.rows_per_step <= self.train_rows, f"there are {self.train_rows} rows to train on"
        require(fits, "batch", self.rows_per_step, why, "pass at most that many")
        require(self.width % 4 == 0 or not text, "width", self.width, "four heads share it", "pass a multiple of 4")
        fits = self.shown <= self.train_rows // 2
        require(fits, "shown", self.shown, f"there are {self.train_rows} rows", "pass at most half of that")
