"""Whether a field can be found at all: ranks by finite differences along single unknowns, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparing.errors import UserError
from sparing.jobs.invert import Settings, run
from sparing.jobs.invert.arms import black_box, identified, waves
from sparing.jobs.invert.coefficient import coefficient_of
from sparing.jobs.invert.observations import observe

SMALL = Settings(equation="burgers", method="numerical", field=12, grid=16, observe=(4, 8), tolerance=1e-9)


def dense(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Jacobians of observations and slopes at the first guess, by central differences along single unknowns."""
    problem = black_box(settings, observe(settings))
    coefficient = coefficient_of(settings)
    p = coefficient.guess(settings.model, settings.seeds[0])
    seen, held = [], []
    for unit in 1e-3 * torch.eye(settings.field, dtype=torch.float64):
        for found, way in (
            (seen, lambda p: problem.solve({"p": p}).reshape(-1)),
            (held, lambda p: coefficient.bends(p)),
        ):
            found.append(((way(p + unit) - way(p - unit)) / 2e-3).numpy())
    return np.stack(seen, 1) / np.sqrt(len(seen[0])), np.sqrt(settings.weight / settings.field) * np.stack(held, 1)


def test_waves_are_an_orthonormal_basis_and_the_last_is_the_sawtooth() -> None:
    basis = waves(12)
    np.testing.assert_allclose(basis.T @ basis, np.eye(12), atol=1e-14)
    np.testing.assert_allclose(basis[:, -1] * np.sqrt(12), -np.cos(np.pi * np.arange(1, 13)), atol=1e-13)


@pytest.mark.parametrize("parameter", ["log", "square"])
def test_what_is_determined_equals_dense_finite_differences(parameter: str) -> None:
    settings = replace(SMALL, parameter=parameter)
    found, (seen, held) = identified(settings, observe(settings)), dense(settings)
    weakest = np.linalg.svd(np.concatenate([seen, held]), compute_uv=False)[-1]
    share = np.trace(seen.T @ seen @ np.linalg.inv(seen.T @ seen + held.T @ held))
    # one-sided differences of µ = 1e-3 along waves against central ones along unknowns
    assert found.weakest == pytest.approx(weakest, rel=2e-2)
    assert found.decided == pytest.approx(share, rel=1e-3)


def test_as_many_unknowns_as_points_have_a_direction_that_nothing_sees() -> None:
    """The sawtooth is the null vector of the dense Jacobian, which no parameter changes; a penalty holds it."""
    settings = replace(SMALL, field=16, penalty=0.0)
    seen, held = dense(settings)
    sawtooth = np.resize([0.25, -0.25], 16)
    # one curvature of each unknown is left in a central difference: µ² = 1e-6; its solver's error is 1e-9 / 1e-3
    assert np.linalg.norm(np.concatenate([seen, held]) @ sawtooth) < 5e-6
    for changed in (settings, replace(settings, parameter="square"), replace(settings, method="least-squares")):
        with pytest.raises(UserError, match=r"field: got 16 unknowns on a grid of 16 points; .* waves 8 times over x"):
            identified(changed, observe(changed))
    held = replace(settings, penalty=1.0)
    assert identified(held, observe(held)).weakest > 1e-3


def test_a_count_that_fits_is_refused_where_the_observations_are_too_few_and_no_prior_helps() -> None:
    few = replace(SMALL, observe=(1, 8), penalty=0.0)
    with pytest.raises(UserError, match="the solver's own error is 1e-06"):
        identified(few, observe(few))
    helped = replace(few, penalty=1e-6)
    assert identified(helped, observe(helped)).decided < 8.01


def test_the_job_refuses_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="half a cell beside the points, where the highest wave of the grid is zero"):
        run(replace(SMALL, method="least-squares", field=16, penalty=0.0, steps=1, out=tmp_path / "run"))
    assert not (tmp_path / "run" / "report.html").exists()
