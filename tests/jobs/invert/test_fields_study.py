"""The study of fields: means and spreads, who was caught, solves of both methods, and errors against dense algebra."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import pde_fields as study

from sparing.report import Record


def test_a_summary_has_mean_worst_and_standard_error_of_its_runs_alone() -> None:
    record = Record(question="", settings={}, seed=0, environment={})
    for number, error in enumerate((0.01, 0.02, 0.06)):
        record.add("runs", name="field", run=number, coefficient_error=error, seconds=10.0, covered=0.9)
    record.add("runs", name="number", run=0, coefficient_error=1e-6, seconds=3.0, caught=1)
    study.summarised(record)
    study.summarised(record)  # anew after each run, not once more
    field, number = record.table("summary")
    assert field["n"] == 3
    assert field["coefficient_error"] == pytest.approx(0.03)
    assert field["coefficient_error_most"] == 0.06
    assert field["coefficient_error_se"] == pytest.approx(np.std([0.01, 0.02, 0.06], ddof=1) / math.sqrt(3))
    assert "caught" not in field
    assert number["caught"] == 1
    assert number["seconds_se"] is None


def test_runs_of_a_row_differ_in_their_noise_and_no_two_rows_have_one_name() -> None:
    names = [row.name for row in study.ROWS]
    assert len(names) == len(set(names))
    for settings in (study._field("burgers"), study._field("burgers", noise=0.01)):
        draws = [study.observe(replace(settings, draw=draw)).values for draw in (0, 1)]
        assert torch.equal(*draws) == (settings.noise == 0)


@pytest.mark.parametrize("method", ["numerical", "least-squares"])
def test_solves_are_counted_for_either_method(method) -> None:
    settings = replace(study._field("burgers"), field=8, grid=32, method=method, steps=2)
    found = study.measured(study.Row(name="tiny", settings=settings), 3)
    assert (found["name"], found["run"]) == ("tiny", 3)
    assert found["guess_error"] > found["coefficient_error"] > 0
    # Adam: the value, and two for each direction; least squares: the guess, then each step's value and two a column
    asked = 2 * (2 * settings.drawn + 1) if method == "numerical" else 1 + found["steps"] * (1 + 2 * settings.field)
    assert found["solves"] == asked


def test_errors_in_the_linearized_problem_are_those_of_dense_algebra(monkeypatch) -> None:
    small = replace(study._field("burgers", noise=0.01), field=8, grid=32)
    monkeypatch.setattr(study, "_field", lambda equation, **changes: small)
    monkeypatch.setattr(study, "DRAWS", 3)
    chosen: list[tuple[Any, ...]] = []
    step = study.Linear.step

    def noted(self, weight, damping):
        off, more = step(self, weight, damping)
        if damping == 1e-14:  # one more, with another, is of the method itself before the draws
            chosen.append((self.jacobian, -self.residuals, self.slopes, self.prior, weight, off))
        return off, more

    monkeypatch.setattr(study.Linear, "step", noted)
    rows = list(study.linearized("burgers"))
    assert [(row["order"], row["rule"], row["n"]) for row in rows[:2]] == [(1, "evidence", 3), (1, "discrepancy", 3)]
    assert all(0 <= row["covered"] <= 1 for row in rows)
    true = torch.from_numpy(study.true_field(small.model, study.points(small.field)))
    errors = []
    assert len(chosen) == 3 * len(rows)
    for jacobian, noise, slopes, prior, weight, off in chosen:
        stacked = torch.cat([jacobian, math.sqrt(weight) * slopes])
        exact = torch.linalg.lstsq(stacked, torch.cat([noise, -math.sqrt(weight) * prior])[:, None]).solution[:, 0]
        # a condition below 1e4 squares to 1e8, so rounding leaves eight digits; the damping of 1e-14 is far below that
        assert torch.linalg.cond(stacked) < 1e4
        torch.testing.assert_close(off, exact, rtol=1e-8, atol=1e-11)
        errors.append(float((true * exact.exp() - true).norm() / true.norm()))
    for at, row in enumerate(rows):
        drawn = errors[3 * at : 3 * at + 3]
        assert row["coefficient_error"] == pytest.approx(sum(drawn) / 3, rel=1e-7)
        assert row["coefficient_error_most"] == pytest.approx(max(drawn), rel=1e-7)
