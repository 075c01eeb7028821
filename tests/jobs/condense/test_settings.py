"""Settings that cannot work are refused in one line, before any file is opened."""

from __future__ import annotations

import pytest

from sparing.errors import UserError
from sparing.jobs.condense import Condense


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"per_class": 0}, "per_class"),
        ({"unroll": 0}, "unroll"),
        ({"steps": 0}, "steps"),
        ({"directions": 0}, "directions"),
        ({"save_every": -1}, "save_every"),
        ({"inner_lr": 0.0}, "inner_lr"),
        ({"outer_lr": float("inf")}, "outer_lr"),
        ({"neumann_step": -0.1}, "neumann_step"),
        ({"penalty": -1e-4}, "penalty"),
        ({"chunk": 33}, "chunk"),
        ({"chunk": 0}, "chunk"),
        ({"seconds": 0.0}, "seconds"),
        ({"method": "truncated", "truncate": 101}, "truncate"),
        ({"first_phase": 1.5}, "first_phase"),
        ({"judge": "held-out", "held_out": 0}, "judge"),
        ({"resume": True, "overwrite": True}, "resume"),
    ],
)
def test_one_line_names_the_setting(wrong: dict, what: str) -> None:
    with pytest.raises(UserError, match=f"^{what}: got ") as refused:
        Condense(**wrong)
    assert "\n" not in str(refused.value)


def test_the_defaults_are_the_papers() -> None:
    paper = Condense()
    assert (paper.width, paper.unroll, paper.batch, paper.directions) == (128, 100, 512, 32)
    assert (paper.inner_lr, paper.penalty, paper.outer_lr, paper.steps, paper.eval_steps) == (
        0.01, 1e-4, 0.01, 10_000, 1000,
    )  # fmt: skip
