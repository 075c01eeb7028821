"""The record of a result: defaults that claim nothing, values that cannot be changed."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from oracles.problems import bottleneck
from oracles.quadratic import N, Quadratic
from sparing import hypergrad as hg
from sparing.hypergrad.estimate import Report, finite


def test_a_report_claims_nothing_that_its_method_did_not() -> None:
    report = Report(method="m", steps=3, seconds=0.1)
    silent = {"bytes", "directions", "weights", "norm_squared", "norm_squared_interval", "cosine", "exponent",
              "curvature", "residual"}  # fmt: skip
    assert {field.name for field in dataclasses.fields(report) if getattr(report, field.name) is None} >= silent
    assert (report.masked, report.growth, dict(report.audit), report.warnings) == (0, (), {}, ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.steps = 4


@pytest.mark.parametrize("directions", [8, 32])
def test_the_expected_cosine_is_near_that_of_the_estimates(directions: int) -> None:
    """√(b/(N + b − 1)) with an exact part beside: 20 seeds, a standard error of about 0.02."""
    case = Quadratic(steps=1)
    cosines, reported = [], []
    for seed in range(20):
        found = hg.hypergradient(case.problem(), case.x, hg.ForwardGradient(directions=directions), seed=seed)
        cosines.append(torch.cosine_similarity(found.grad, case.hypergradient(), dim=0).item())
        reported.append(found.report.cosine)
    assert sum(reported) / 20 == pytest.approx(sum(cosines) / 20, abs=0.06)


def test_without_an_exact_part_the_expected_cosine_is_the_formula() -> None:
    case = Quadratic(steps=1, gamma=0.0)
    report = hg.hypergradient(case.problem(), case.x, hg.ForwardGradient(directions=5)).report
    assert report.cosine == pytest.approx(math.sqrt(5 / (N + 5 - 1)), rel=1e-12)


def test_everything_exact_has_cosine_one() -> None:
    case = bottleneck()
    report = hg.hypergradient(*case, hg.ForwardGradient(directions=6, law=hg.Orthonormal())).report
    assert report.cosine == pytest.approx(1.0, abs=1e-12)


def test_finite_sees_every_element() -> None:
    assert finite([torch.ones(2), torch.zeros(0)])
    assert not finite([torch.ones(2), torch.tensor([1.0, math.inf])])
    assert not finite([torch.tensor(math.nan)])
