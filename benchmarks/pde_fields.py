"""Fields of 64 unknowns by least squares, with the coverage of their intervals, beside Adam; KdV from several guesses.

Run ``python -m benchmarks.pde_fields`` (about fifteen CPU minutes on one quiet core); rows that the result already
holds are kept, so an interrupted run goes on where it stopped. ``--only NAME`` runs the rows whose name holds NAME.
Observations come from finite differences on 256 and 512 points, never from the solver under test; noise of 1 % is a
standard deviation of .01, where u reaches 1. A run differs from the next in its first guess and its draw of noise.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.writers import this_run, writers
from sparing import hypergrad as hg
from sparing.hypergrad.fitting.gauss_newton import prepared
from sparing.hypergrad.fitting.linear import Linear, student
from sparing.jobs.invert import Settings, job, run
from sparing.jobs.invert.arms import residuals
from sparing.jobs.invert.observations import observe, true_field
from sparing.jobs.invert.spectral import points, roughness_rows
from sparing.report import Record
from sparing.report.atomic import write_whole
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "pde_fields.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    """Its label."""
    settings: Settings
    """Of one run, but for its seed and draw."""
    runs: int = 5
    """How many (count)."""


def _field(equation: Any, **changes: Any) -> Settings:
    return Settings(equation=equation, field=64, grid=128, **changes)


def _number(equation: Any, grid: int) -> Settings:
    return Settings(equation=equation, grid=grid)


ROWS = (
    Row(name="kdv, number, 5 guesses", settings=_number("kdv", 96)),
    Row(name="allen-cahn, number", settings=_number("allen-cahn", 256)),
    Row(name="burgers, number", settings=_number("burgers", 512)),
    Row(name="burgers, field, 1 % noise", settings=_field("burgers", noise=0.01), runs=20),
    Row(name="allen-cahn, field, 1 % noise", settings=_field("allen-cahn", noise=0.01), runs=20),
    Row(name="burgers, field, no noise", settings=_field("burgers")),
    Row(name="allen-cahn, field, no noise", settings=_field("allen-cahn")),
    Row(name="allen-cahn, field, no noise, 256 points", settings=replace(_field("allen-cahn"), grid=256), runs=2),
    *(
        Row(name=f"{name}, field, 1 % noise, discrepancy",
            settings=_field(name, noise=0.01, penalty="discrepancy"))
        for name in ("burgers", "allen-cahn")
    ),
    *(
        Row(name=f"{name}, field, 1 % noise, tolerance 1e-8", settings=_field(name, noise=0.01, tolerance=1e-8))
        for name in ("burgers", "allen-cahn")
    ),
    *(
        Row(name=f"{name}, field, Adam", settings=_field(name, method="numerical", smoothness=1), runs=2)
        for name in ("burgers", "allen-cahn")
    ),
)  # fmt: skip
"""The former settings of Adam, without noise: 80 steps of 16 directions, penalty 1e-6 on slopes."""

DRAWS = 100
"""Of noise, in the problem linearized at the truth (count)."""


def linearized(equation: Any) -> Iterator[dict[str, Any]]:
    """Error and coverage over draws of noise in the problem linearized at the true field, which costs one Jacobian.

    Args:
        equation: Its name.

    Yields:
        A row for each order of the penalized derivative and each rule.
    """
    settings = _field(equation, noise=0.01)
    true = torch.from_numpy(true_field(settings.model, points(settings.field))).log()
    inputs = observe(settings)
    at = prepared(residuals(settings, inputs), {"p": true}, hg.GaussNewton()).begin()
    count = len(at.residuals)
    for order in (1, 2, 3, 4):
        slopes = torch.from_numpy(roughness_rows(settings.field, order).copy()) / math.sqrt(settings.field)
        for rule in ("evidence", "discrepancy"):
            errors, covered = [], []
            for draw in range(DRAWS):
                noise = 0.01 * torch.randn(count, generator=stream(draw, "linear"), dtype=torch.float64)
                problem = Linear(residuals=-noise, jacobian=at.jacobian, prior=slopes @ true, slopes=slopes)
                weight = problem.choose(rule)
                off, _ = problem.step(weight, 1e-14)
                sigma = math.sqrt(float((at.jacobian @ off - noise).square().sum()) / (count - problem.freedom(weight)))
                deviation = problem.covariance(weight, sigma).diagonal().sqrt()
                covered.append(float((off.abs() <= student(0.95, count) * deviation).double().mean()))
                errors.append(float(((true + off).exp() - true.exp()).norm() / true.exp().norm()))
            yield {
                "equation": equation, "order": order, "rule": rule, "n": DRAWS,
                "coefficient_error": statistics.fmean(errors), "coefficient_error_most": max(errors),
                "covered": statistics.fmean(covered), "covered_se": statistics.stdev(covered) / math.sqrt(DRAWS),
            }  # fmt: skip


def measured(row: Row, number: int) -> dict[str, Any]:
    """One run.

    Args:
        row: Its settings.
        number: Its seed, and its draw of the noise.

    Returns:
        Cells of the table "runs".
    """
    # a page takes seconds to draw, and is not what is timed
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(job, "write_page", lambda record, path: path):
        record = run(replace(row.settings, seeds=(number,), draw=number, out=Path(folder) / "run"))
    (found,), first = record.table("runs"), record.table("path")[0]
    adam = row.settings.method == "numerical"
    found["solves"] = found["steps"] * (2 * row.settings.drawn + 1) if adam else found["solves"]
    caught = [one for one in record.table("starts") if abs(one["nu"] / row.settings.model.truth - 1) > 0.1]
    others = {} if row.settings.field else {"caught": len(caught)}
    # the first row of a path is of the guess itself, in either method
    return {"name": row.name, "run": number, "guess_error": first["error"], **found, **others}


def summarised(record: Record) -> None:
    """Replace the table "summary" by means and spreads over the runs there are."""
    record.rows[:] = [row for row in record.rows if row["table"] != "summary"]
    for name in dict.fromkeys(row["name"] for row in record.table("runs")):
        rows = [row for row in record.table("runs") if row["name"] == name]
        cells: dict[str, Any] = {"name": name, "n": len(rows)}
        for column in ("coefficient_error", "solution_error", "seconds", "solves", "guess_error", "covered", "freedom"):
            values = [row[column] for row in rows if column in row]
            if values:
                cells |= {column: statistics.fmean(values), f"{column}_most": max(values)}
                cells[f"{column}_se"] = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        if "caught" in rows[0]:
            cells["caught"] = sum(row["caught"] for row in rows)
        record.add("summary", **cells)


def main() -> None:
    """Measure what is missing and write the record after each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    record = Record(
        question="How exactly is a field found by least squares, and do its intervals cover?",
        settings={row.name: {"runs": row.runs, "settings": row.settings} for row in ROWS},
        seed=list(range(max(row.runs for row in ROWS))), environment=this_run(), units={"seconds": "s"},
    )  # fmt: skip
    if RESULT.exists():
        for table in ("runs", "linear"):
            for row in json.loads(RESULT.read_text())["tables"].get(table, []):
                record.add(table, **row)
    for equation in ("burgers", "allen-cahn") if only in "linear" else ():
        if not record.table("linear", equation=equation):
            for cells in linearized(equation):
                record.add("linear", **cells)
            _write(record)
    wanted = [row for row in ROWS if only in row.name]
    for turn in range(max((row.runs for row in wanted), default=0)):
        for row in wanted:
            had = {(known["name"], known["run"]) for known in record.table("runs")}
            if turn >= row.runs or (row.name, turn) in had:
                continue
            record.add("runs", **measured(row, turn))
            summarised(record)
            _write(record)


def _write(record: Record) -> None:
    whole = record.document() | {"writers": writers(RESULT, this_run())}
    write_whole(RESULT, json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
