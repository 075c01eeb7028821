"""Coefficients of three equations by Adam on (FG)²U's estimates, beside Figure 2 of the paper.

Run ``python -m benchmarks.pde_table`` (about fifteen CPU minutes on one quiet core); rows that the result already holds
are kept, so an interrupted run goes on where it stopped. ``--only NAME`` runs the rows whose name holds NAME.
Time is CPU time of the process. Observations are free of noise and come from a closed form (Burgers) or from
finite differences; those of the committed rows came from a finer and tighter solve, as they then did.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sparing.jobs.invert import Settings, run
from sparing.jobs.invert.equations import EQUATIONS
from sparing.jobs.invert.settings import Numerical, Pinn
from sparing.report import Record, environment
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "pde_table.json"
SOURCE = "Shen et al. 2024, Figure 2 right"
STEPS = 80


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    """Its label."""
    settings: Settings
    """Of one run, but for its seed."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of its runs."""


SMALL = Pinn(depth=4, width=20, steps=20, batch=64)
"""The network of this table: the paper's is depth 9, 1000 steps, batch 5000."""


def _field(law: Literal["rademacher", "orthonormal", "hadamard"]) -> Row:
    """Burgers with half as many unknowns as points; every law solves 33 times a step for as many steps."""
    settings = Settings(
        equation="burgers",
        method="numerical",
        smoothness=1,
        field=32,
        grid=64,
        tolerance=1e-7,
        numerical=Numerical(law=law, directions=16),
        steps=STEPS,
        outer_lr=0.2,
    )
    return Row(name=f"burgers, field of 32, {law} b=16", settings=settings, seeds=(0, 1))


def _adam(equation: Any, grid: int, **changes: Any) -> Settings:
    return Settings(equation=equation, method="numerical", grid=grid, steps=STEPS, **changes)


ROWS = (
    Row(name="allen-cahn, solver 256", settings=_adam("allen-cahn", 256)),
    *(
        Row(
            name=f"{name}, network",
            settings=Settings(equation=name, method="pinn", pinn=SMALL, steps=12, outer_lr=1.0, grid=256),
            seeds=(0, 1, 2),
        )
        for name in EQUATIONS
    ),
    Row(name="burgers, solver 512", settings=_adam("burgers", 512, tolerance=1e-7)),
    Row(name="kdv, solver 96", settings=_adam("kdv", 96, tolerance=1e-7)),
    Row(name="burgers, solver 256", settings=_adam("burgers", 256, tolerance=1e-7)),
    _field("rademacher"),
    _field("orthonormal"),
    _field("hadamard"),
)


def measured(row: Row, seed: int) -> dict[str, Any]:
    """One run.

    Args:
        row: Its settings.
        seed: Its seed.

    Returns:
        Cells of the table "runs".
    """
    with tempfile.TemporaryDirectory() as folder:
        record = run(replace(row.settings, seeds=(seed,), out=Path(folder) / "run"))
    start = record.table("path")[0]
    (found,) = record.table("runs")
    solves = None if row.settings.method == "pinn" else found["steps"] * (2 * row.settings.drawn + 1)
    return {
        "name": row.name, "equation": row.settings.equation, "method": row.settings.method, "start": start["nu"],
        "start_error": start["error"], **found, "solves": solves,
    }  # fmt: skip


def summarised(record: Record) -> None:
    """Replace the table "summary" by means, standard deviations and medians over the runs there are."""
    record.rows[:] = [row for row in record.rows if row["table"] == "runs"]
    for name in dict.fromkeys(row["name"] for row in record.table("runs")):
        rows = [row for row in record.table("runs") if row["name"] == name]
        cells: dict[str, Any] = {"name": name, "n": len(rows)}
        for column in ("coefficient_error", "solution_error", "seconds"):
            values = [row[column] for row in rows]
            cells[column] = statistics.fmean(values)
            cells[f"{column}_sd"] = statistics.stdev(values) if len(values) > 1 else None
            cells[f"{column}_median"] = statistics.median(values)
        record.add("summary", **cells)
    for equation in EQUATIONS.values():
        for method, known in (("numerical", equation.paper), ("pinn", equation.paper_pinn)):
            (nu, nu_sd), (u, u_sd) = known
            record.add(
                "paper", equation=equation.name, method=method, source=SOURCE,
                coefficient_error=nu, coefficient_error_sd=nu_sd, solution_error=u, solution_error_sd=u_sd,
            )  # fmt: skip


def main() -> None:
    """Measure what is missing and write the record after each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    settings = {row.name: {"seeds": row.seeds, "settings": row.settings} for row in ROWS}
    record = Record(
        question="How exactly is ν found, through a solver and through a small network?", settings=settings,
        seed=sorted({seed for row in ROWS for seed in row.seeds}), environment=environment(), units={"seconds": "s"},
    )  # fmt: skip
    if RESULT.exists():
        for row in json.loads(RESULT.read_text())["tables"]["runs"]:
            record.add("runs", **row)
    wanted = [row for row in ROWS if only in row.name]
    if not wanted:
        parser.error(f"--only: no row's name holds {only!r}; there are {', '.join(row.name for row in ROWS)}")
    for turn in range(max(len(row.seeds) for row in wanted)):
        for row in wanted:
            had = {(known["name"], known["seed"]) for known in record.table("runs")}
            if turn >= len(row.seeds) or (row.name, row.seeds[turn]) in had:
                continue
            record.add("runs", **measured(row, row.seeds[turn]))
            summarised(record)
            write_whole(RESULT, json.dumps(record.document(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
