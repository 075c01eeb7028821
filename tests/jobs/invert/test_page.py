"""What the page says of records made by hand."""

from __future__ import annotations

import pytest

from snapshots import check_page
from sparing.jobs.invert.page import PAGE, answer, caveats
from sparing.report import Record


def a_record(*, field: bool = False, method: str = "numerical", penalty: float = 0.1, seeds: int = 2) -> Record:
    pinn = {"depth": 2, "width": 4, "steps": 2, "batch": 4}
    settings = {"equation": "burgers" if field else "allen-cahn", "method": method, "noise": 0, "penalty": penalty}
    settings |= {"smoothness": 3, "field": 8 if field else 0}
    record = Record(question="Which ν?", settings={**settings, "pinn": pinn}, seed=[0, 1], units={"seconds": "s"},
                    environment={})  # fmt: skip
    for seed in range(seeds):
        for step in (1, 2):
            nu = 1e-4 * (4 + seed - step)
            record.add("path", seed=seed, step=step, nu=nu, error=nu * 1e3, seconds=60.0 * step, loss=nu)
        record.add("runs", seed=seed, nu=nu, coefficient_error=0.01 + seed / 100, solution_error=0.002, steps=2,
                   seconds=120.0)  # fmt: skip
        for x in (-1.0, 0.0) if field else ():
            record.add("fields", seed=seed, x=x, true=0.1, found=0.1 + seed / 50)
    for t in (0.5, 1.0):
        for x in (-1.0, 0.0):
            record.add("profiles", t=t, x=x, true=x, found=x + t / 100)
    record.add("summary", equation="allen-cahn", method=method, coefficient_error=0.015,
               coefficient_error_sd=0.007 if seeds > 1 else None, solution_error=0.002, solution_error_sd=0.0,
               seconds=120.0, seconds_sd=0.0, n=seeds)  # fmt: skip
    if field:
        record.add("identified", decided=3.2, unknowns=8)
    return record


def by_least_squares(*, noise: float = 0.01, penalty: str | float = "evidence", field: bool = True) -> Record:
    """Two runs of two first guesses each, one of them lost."""
    record = a_record(field=field, method="least-squares")
    record.settings |= {"noise": noise, "penalty": penalty}
    record.rows[:] = [row for row in record.rows if row["table"] != "identified"]
    ends = {} if field else {"low": 1e-4, "high": 4e-4}
    for row in (row for row in record.rows if row["table"] == "runs"):
        row |= {"covered": 0.875 if field else 1.0, "noise": 0.011, "freedom": 3.2, "penalty": 1e-9, **ends}
    for row in (row for row in record.rows if row["table"] == "fields"):
        row |= {"low": row["found"] - 0.01, "high": row["found"] + 0.02}
    for row in (row for row in record.rows if row["table"] == "path"):
        row["start"] = row["step"] - 1
    for seed in (0, 1):
        for start in (0, 1):
            record.add(
                "starts",
                seed=seed,
                start=start,
                nu=1e-4,
                misfit=1e-4 + start,
                kept=not start,
                steps=3,
                warnings="not converged" if seed else "",
            )
    return record


def test_snapshot_of_least_squares():
    check_page(PAGE.of(by_least_squares()), __file__, "page_of_least_squares")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"noise": 0}, "Without noise the residuals"),
        ({"field": False}, "Intervals are for noise of unknown size"),
        ({}, "Intervals are of the posterior"),
        ({}, "Seed 1: not converged."),
        ({}, "Each run began from 2 first guesses and kept the fit with the least misfit; 2 of 4 ended elsewhere"),
    ],
)
def test_caveats_of_least_squares_fit_the_run(changes, said):
    assert any(note.startswith(said) for note in caveats(by_least_squares(**changes)))


def test_the_interval_of_a_number_is_in_the_answer():
    assert "Its 90 % interval is 0.0001 to 0.0004 in the first run; 2 of 2 hold the truth." in answer(
        by_least_squares(field=False)
    )


def test_snapshot():
    check_page(PAGE.of(a_record()), __file__)


def test_snapshot_of_a_field():
    check_page(PAGE.of(a_record(field=True)), __file__, "page_of_a_field")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Solved as periodic"),
        ({"method": "pinn"}, "A small network: depth 2, width 4"),
        ({"field": True}, "Smoothness is rewarded: 0.1 times"),
        ({"field": True, "penalty": 0}, "No prior is used"),
    ],
)
def test_caveats_fit_the_run(changes, said):
    assert any(note.startswith(said) for note in caveats(a_record(**changes)))
