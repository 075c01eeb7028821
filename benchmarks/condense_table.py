"""The paper's Table 1 in miniature: MNIST condensed in equal CPU time; ``python -m benchmarks.condense_table``.

Every method gets the same CPU seconds a run, the same few outer learning rates tried on held-out training images with
the same smaller budget, the same nets, batches and judges. Rows are written one by one; run it again to go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.writers import this_run, writers
from sparing.errors import RunError, UserError
from sparing.jobs.condense.inputs import Inputs, gather
from sparing.jobs.condense.loop import accuracies, bytes_of_a_step, fix_length_, train
from sparing.jobs.condense.methods import PAPER, SOURCE, TITLES, build_method
from sparing.jobs.condense.settings import Condense, ConjugateGradient, Evaluation, Forward, Method, Neumann, Truncated
from sparing.jobs.condense.state import start as start_state
from sparing.report import Record
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "condense_table.json"

BASE = Condense(
    learn=("images",), start="noise", outer_schedule="linear", average=0.0, shift=0,
    data="mnist", width=16, unroll=10, inner_lr=0.05, batch=128, forward=Forward(directions=4),
    truncated=Truncated(steps=3, ends="last"), neumann=Neumann(terms=5, step=0.01),
    conjugate_gradient=ConjugateGradient(iterations=5, damping=0.1), evaluation=Evaluation(steps=100, lr=0.02, nets=5),
    measurements=0, held_out_images=5000,
)  # fmt: skip
"""The paper's settings without the recipe of the defaults, shrunk to two cores.

Width 128 -> 16, T 100 -> 10, batch 512 -> 128, 32 directions -> 4.
"""

ALL: tuple[Method, ...] = (
    "checkpointed", "forward-gradient", "truncated", "hessian-free", "neumann", "conjugate-gradient", "two-phase",
    "reverse",
)  # fmt: skip
MAIN: tuple[Method, ...] = ("checkpointed", "forward-gradient", "truncated", "hessian-free")
RATES = (0.01, 0.03, 0.1, 0.3)
"""Outer learning rates tried for each method."""
SWEEP_SEED = 100
"""Seed of the runs that choose a rate; no run of the table has it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One block of the table."""

    per_class: int
    """Condensed images per class (count)."""
    methods: tuple[Method, ...]
    """Rows of the block."""
    seeds: int
    """Runs of each (count)."""
    seconds: float
    """CPU seconds of the outer loop of a run."""
    trial: float
    """CPU seconds of a run that tries a rate."""

    def settings(self, method: Method, **changes: Any) -> Condense:
        """Settings of one run."""
        return dataclasses.replace(BASE, per_class=self.per_class, method=method, **changes)


CASES = (
    Case(per_class=1, methods=ALL, seeds=5, seconds=20.0, trial=6.0),
    Case(per_class=10, methods=MAIN, seeds=2, seconds=60.0, trial=15.0),
)


class Table:
    """The result file: rows by key, written after each."""

    def __init__(self, inputs: Inputs) -> None:
        """Read what is there."""
        self.inputs = inputs
        self.rows: dict[str, Any] = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}

    def row(self, key: str, make: Any) -> dict[str, Any]:
        """A row, made and written if it is not there yet."""
        if key not in self.rows:
            begin = time.process_time()
            self.rows[key] = make() | {"cpu_seconds_in_all": round(time.process_time() - begin, 1)}
            self.write()
            print(f"{time.strftime('%H:%M:%S')} {key}: {json.dumps(self.rows[key])}", flush=True)
        return self.rows[key]

    def write(self) -> None:
        """Write the file whole."""
        budget = "CPU seconds of the process (time.process_time) in the outer loop, one thread; judging is apart"
        base = json.loads(json.dumps(dataclasses.asdict(BASE), default=str))
        about = this_run()
        head = {
            "command": shlex.join(["python", "-m", "benchmarks.condense_table", *sys.argv[1:]]),
            "budget": budget, "environment": dict(about), "writers": writers(RESULT, about), "base": base,
            "cases": [dataclasses.asdict(case) for case in CASES], "rates": RATES,
            "units": {"accuracy": "%", "seconds": "s", "peak": "B"}, "paper": {"source": SOURCE, **paper_numbers()},
        }  # fmt: skip
        write_whole(RESULT, json.dumps(head | {"rows": self.rows}, indent=1, ensure_ascii=False) + "\n")


def paper_numbers() -> dict[str, Any]:
    """The paper's accuracies on MNIST by images per class."""
    return {f"{data} {count}": numbers for (data, count), numbers in PAPER.items() if data == "mnist"}


def walk(table: Table, settings: Condense, *, steps: int, turn: int) -> dict[str, Any]:
    """One run of a given length, or why it stopped."""
    state = start_state(settings, table.inputs)
    state.steps, state.turn = steps, turn
    record = Record(question="", settings=settings, seed=settings.seed, environment={})
    try:
        train(state, record)
    except (RunError, UserError) as error:
        return {"failed": str(error), "steps": state.step, "seconds": state.seconds}
    row = record.table("methods")[0]
    warned = sum(bool(step["warning"]) for step in record.table("train"))
    keep = ("accuracy", "accuracy_low", "accuracy_high", "n", "steps", "seconds", "outer_lr")
    return {name: row[name] for name in keep} | {"steps_with_a_warning": warned}


def length(table: Table, case: Case, method: Method) -> dict[str, Any]:
    """Steps that fill the seconds of a run, timed once and used for every seed; and bytes of a step."""
    settings = case.settings(method, seconds=case.seconds)
    state, record = start_state(settings, table.inputs), Record(question="", settings={}, seed=0, environment={})
    fix_length_(state, record)
    return {"steps": state.steps, "turn": state.turn, "peak": bytes_of_a_step(state, build_method(settings))}


def trial(table: Table, case: Case, method: Method, rate: float, size: dict[str, Any]) -> dict[str, Any]:
    """A shorter run with one rate, judged on held-out images."""
    share = case.trial / case.seconds
    steps, turn = max(2, round(share * size["steps"])), round(share * size["turn"])
    settings = case.settings(
        method, outer_lr=rate, seed=SWEEP_SEED, judge="held-out", evaluation=Evaluation(steps=100, lr=0.02, nets=2)
    )
    return {"method": TITLES[method], "outer_lr": rate} | walk(table, settings, steps=steps, turn=turn)


def best_rate(table: Table, case: Case, method: Method, size: dict[str, Any]) -> float:
    """The rate of highest held-out accuracy."""
    tried = {
        rate: table.row(f"trial {case.per_class} {method} {rate}", lambda: trial(table, case, method, rate, size))  # noqa: B023
        for rate in RATES
    }
    return max(tried, key=lambda rate: tried[rate].get("accuracy", -1.0))


def fill(table: Table, case: Case) -> None:
    """Every row of a block, seed by seed, so that an unfinished table is balanced."""
    sizes = {m: table.row(f"length {case.per_class} {m}", lambda: length(table, case, m)) for m in case.methods}  # noqa: B023
    rates = {m: best_rate(table, case, m, sizes[m]) for m in case.methods}
    table.row(f"start {case.per_class}", lambda: start(table, case))
    for seed in range(case.seeds):
        for method in case.methods:
            settings = case.settings(method, outer_lr=rates[method], seed=seed)
            size = {name: sizes[method][name] for name in ("steps", "turn")}
            named = {"method": TITLES[method], "per_class": case.per_class, "seed": seed}
            table.row(f"run {case.per_class} {method} {seed}", lambda: named | walk(table, settings, **size))  # noqa: B023


def start(table: Table, case: Case) -> dict[str, Any]:
    """What the noise at the beginning teaches a net, and what as many real images do."""
    state = start_state(case.settings("reverse"), table.inputs)
    images, labels = table.inputs.train
    chosen = [torch.nonzero(labels == kind)[: case.per_class, 0] for kind in range(10)]
    real = {"images": images[torch.cat(chosen)].float() / 255}
    return {name: accuracies(state, some, nets=5) for name, some in (("noise", state.phi), ("real images", real))}


def main() -> None:
    """Fill the result file row by row."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    table = Table(gather(BASE.data, held_out=BASE.held_out_images))
    for case in CASES:
        fill(table, case)


if __name__ == "__main__":
    main()
