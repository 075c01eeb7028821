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
        ({"truncated": {"steps": 0}}, "truncated.steps"),
        ({"method": "neumann", "learn": ("images", "rates")}, "learn"),
        ({"method": "two-phase", "learn": ("images", "rates")}, "learn"),
        ({"learn": ()}, "learn"),
        ({"depth": 5}, "depth"),
        ({"average": 1.0}, "average"),
        ({"shift": -1}, "shift"),
        ({"two_phase": {"first": 1.5}}, "two_phase.first"),
        ({"judge": "held-out", "held_out_images": 0}, "judge"),
        ({"resume": True, "overwrite": True}, "resume"),
    ],
)
def test_one_line_names_the_setting(wrong: dict, what: str) -> None:
    with pytest.raises(UserError, match=f"^{what}: got ") as refused:
        Condense(**{name: grouped(name, value) for name, value in wrong.items()})
    assert "\n" not in str(refused.value)


def test_the_defaults_are_the_recipe() -> None:
    found = Condense()
    assert (found.method, found.learn, found.start) == ("truncated", ("images",), "real")
    assert (found.truncated.steps, found.truncated.ends) == (10, "random")
    assert (found.outer_lr, found.outer_schedule, found.average, found.clip_medians) == (0.02, "cosine", 0.98, 2.0)
    assert (found.inner_steps, found.inner_rate, found.batch, found.width, found.shift) == (25, 0.05, 256, 16, 1)
    assert [Condense(per_class=count).inner_steps for count in (1, 9, 10, 50)] == [25, 25, 10, 10]
    assert Condense(per_class=10, unroll=7).inner_steps == 7
    assert [Condense(per_class=count).inner_rate for count in (1, 9, 10, 50)] == [0.05, 0.05, 0.2, 0.2]
    assert Condense(per_class=10, inner_lr=0.1).inner_rate == 0.1
    assert Condense(method="neumann", learn=("images", "labels")).method == "neumann"
    # without a first phase it is (FG)²U, which has the gradient of rates
    assert Condense(method="two-phase", learn=("images", "rates"), two_phase=TwoPhase(first=0.0)).learn[1] == "rates"


def test_the_papers_settings_are_one_command_in_the_help() -> None:
    """What the docstring says is the paper's are settings that there are, at the paper's values."""
    words = (Condense.__doc__ or "").split("the paper's are")[1].split("`")[1].split()
    said = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    numbers = {"width": 128, "unroll": 100, "inner-lr": 0.01, "batch": 512, "steps": 10_000, "outer-lr": 0.01}
    assert {name: float(said[name]) for name in numbers} == numbers
    assert (said["start"], said["outer-schedule"], said["clip-medians"]) == ("noise", "linear", "0")
    assert (said["evaluation.steps"], said["evaluation.lr"], said["average"]) == ("1000", "0.01", "0")
