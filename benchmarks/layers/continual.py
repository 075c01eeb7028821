"""Continual pre-training, then fine-tuning: the paper's Table 4 in small, on ladder 1.

The model of the books reads 1,200 rows of Edgeworth's stories, once, by full fine-tuning, by layer sampling of two and
of eight of its sixteen blocks, or by LoRA, each at its own best rate on development rows. Then all are fine-tuned
alike, on Bryant's stories with all parameters at the rate that the study found for it, and judged there; so is a model
that read nothing in between. Four seeds, paired.

``python -m benchmarks.layers.continual`` goes on where it stopped, once ladder 1 has a rate for full fine-tuning;
``--list`` says what is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.layers.arms import ARMS, Arm, lisa, lora, rate_of
from benchmarks.layers.store import Row, Rows
from benchmarks.layers.study import CORPUS, LADDER_1, PACE, SEEDS, Study, command, loss_on, tuned
from benchmarks.layers.texts import Rows as Parts
from benchmarks.layers.texts import rows_of
from sparing.errors import UserError
from sparing.jobs.finetune.settings import Training
from sparing.layersample.price.predict import Full

CONTINUED: tuple[Arm, ...] = (
    Arm(name="no training", method=None, family="other", centre=0),
    Arm(name="full", method=Full(), family="full", centre=-21),
    Arm(name="LISA", method=lisa(), family="lisa", centre=-20),
    Arm(name="LISA, 8 blocks", method=lisa(active=8), family="lisa", centre=-21),
    Arm(name="LoRA, rank 64", method=lora(64), family="lora", centre=-18),
)


@dataclass(frozen=True, kw_only=True)
class Continual(Study):
    """A study whose models are fine-tuned on another text, all alike, before they are judged."""

    half: int
    """Rate of that fine-tuning, in half octaves."""
    then: str = CORPUS
    pace: dict[str, Any] = field(default_factory=lambda: {**PACE, "steps": 300, "warmup": 15})

    def varies(self, arm: Arm) -> bool:
        """All are fine-tuned in the end."""
        return True

    def judge(self, model: nn.Module, rows: Parts, seed: int) -> Row:
        """Losses before fine-tuning, and on the text that is judged after it."""
        before, next_rows = super().judge(model, rows, seed), rows_of(self.then, self.tokenizer())
        for p in model.parameters():
            p.requires_grad_(True)
        training = Training(method=Full(), lr=rate_of(self.half), seed=seed, **PACE)
        tuned(model, training, next_rows.train, ARMS[1])
        return before | {"read": before["test"], "test": loss_on(model, next_rows.test)}


def study(rows: Rows) -> Continual:
    """The study, at the rate that ladder 1 found for full fine-tuning."""
    (full,) = (arm for arm in ARMS if arm.name == "full")
    half = LADDER_1.chosen(rows, full)
    if half is None:
        got, do = "no rate for full fine-tuning", "run python -m benchmarks.layers.study first"
        raise UserError("continual", got=got, why="its sweep is not done", do=do)
    return Continual(
        name="continual", of=LADDER_1.of, load=LADDER_1.load, tokenizer=LADDER_1.tokenizer, arms=CONTINUED,
        corpus="edgeworth-parents", seeds=SEEDS[:4], half=half,
    )  # fmt: skip


def main() -> None:
    """Do what is missing, or say what it is."""
    command(__doc__, study)


if __name__ == "__main__":
    main()
