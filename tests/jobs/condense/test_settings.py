"""Settings that cannot work are refused in one line, before any file is opened."""

from __future__ import annotations

from typing import Any

import pytest

from sparing.errors import UserError
from sparing.jobs.condense import Condense
from sparing.jobs.condense.settings import Forward, Neumann, Truncated, TwoPhase


def grouped(name: str, value: Any) -> Any:
    """The group of that name, or the value itself."""
    groups = {"forward": Forward, "truncated": Truncated, "neumann": Neumann, "two_phase": TwoPhase}
    return groups[name](**value) if name in groups else value


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"per_class": 0}, "per_class"),
        ({"unroll": 0}, "unroll"),
        ({"steps": 0}, "steps"),
        ({"forward": {"directions": 0}}, "forward.directions"),
        ({"save_every": -1}, "save_every"),
        ({"inner_lr": 0.0}, "inner_lr"),
        ({"outer_lr": float("inf")}, "outer_lr"),
        ({"neumann": {"step": -0.1}}, "neumann.step"),
        ({"penalty": -1e-4}, "penalty"),
        ({"forward": {"chunk": 33}}, "forward.chunk"),
        ({"forward": {"chunk": 0}}, "forward.chunk"),
        ({"seconds": 0.0}, "seconds"),
        ({"method": "truncated", "truncated": {"steps": 101}}, "truncated.steps"),
        ({"two_phase": {"first": 1.5}}, "two_phase.first"),
        ({"judge": "held-out", "held_out_images": 0}, "judge"),
        ({"resume": True, "overwrite": True}, "resume"),
    ],
)
def test_one_line_names_the_setting(wrong: dict, what: str) -> None:
    with pytest.raises(UserError, match=f"^{what}: got ") as refused:
        Condense(**{name: grouped(name, value) for name, value in wrong.items()})
    assert "\n" not in str(refused.value)


def test_the_defaults_are_the_papers() -> None:
    paper = Condense()
    assert (paper.width, paper.unroll, paper.batch, paper.forward.directions) == (128, 100, 512, 32)
    assert (paper.inner_lr, paper.penalty, paper.outer_lr, paper.steps, paper.evaluation.steps) == (
        0.01, 1e-4, 0.01, 10_000, 1000,
    )  # fmt: skip
