"""Settings mean values of the hypergradient room; the paper's numbers are kept apart from ours."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from sparing import hypergrad as hg
from sparing.jobs.condense import Condense
from sparing.jobs.condense.methods import PAPER, ROLES, TITLES, build_method, schedule
from sparing.jobs.condense.settings import ConjugateGradient, Forward, Method, Neumann, Truncated


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("forward-gradient", hg.ForwardGradient(directions=7, chunk=2)),
        ("two-phase", hg.ForwardGradient(directions=7, chunk=2)),
        ("truncated", hg.Truncated(steps=3)),
        ("hessian-free", hg.HessianFree()),
        ("neumann", hg.Neumann(step=0.2, terms=5)),
        ("conjugate-gradient", hg.ConjugateGradient(terms=5, damping=0.01)),
        ("reverse", hg.Reverse()),
        ("checkpointed", hg.Checkpointed(states="sqrt")),
    ],
)
def test_every_setting_is_a_value(method: Method, expected: object) -> None:
    settings = Condense(
        method=method, learn=("images", "labels"), forward=Forward(directions=7, chunk=2),
        truncated=Truncated(steps=3), neumann=Neumann(step=0.2, terms=5),
        conjugate_gradient=ConjugateGradient(iterations=5, damping=0.01)
    )  # fmt: skip
    assert build_method(settings) == expected


def test_every_method_has_a_name_and_a_look_of_its_own() -> None:
    assert set(TITLES) == set(get_args(Method))
    assert set(ROLES) == set(TITLES.values())
    assert len(set(ROLES.values())) == len(ROLES)
    assert all(name in ROLES for numbers in PAPER.values() for name in numbers)


def test_two_phases_change_at_their_turn() -> None:
    settings = Condense(method="two-phase", forward=Forward(directions=4))
    kinds = [type(schedule(settings, 2)(step)) for step in range(4)]
    assert kinds == [hg.HessianFree, hg.HessianFree, hg.ForwardGradient, hg.ForwardGradient]
    assert isinstance(schedule(settings, 0)(0), hg.ForwardGradient)
    assert isinstance(schedule(dataclasses.replace(settings, method="reverse"), 2)(0), hg.Reverse)
