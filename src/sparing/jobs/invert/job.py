"""The whole job: observe, invert from each seed's guess, judge, report."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sparing.jobs.disk import save_tensors
from sparing.jobs.folder import Folder, identity, tell_page
from sparing.jobs.interrupts import patient, save_when_due
from sparing.jobs.invert.arms import Arm, network, numerical
from sparing.jobs.invert.identify import identified
from sparing.jobs.invert.observations import Inputs, observe, relative
from sparing.jobs.invert.page import write_page
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.spectral import points
from sparing.jobs.invert.state import TrainState, finish_, start
from sparing.report import Progress, Record, print_table

FOUND: Final = "coefficients.safetensors"

UNITS: Final = {"seconds": "s"}
SHOWN: Final = (0.25, 0.5, 1.0)  # times at which the page compares solutions


def folder_of(settings: Settings) -> Folder:
    """The directory of a run."""
    return Folder(settings.out, resume=settings.resume, overwrite=settings.overwrite, names=(FOUND,))


def judge(state: TrainState, settings: Settings, arm: Arm, inputs: Inputs, record: Record) -> None:
    """Measure what a finished run has found: rows of "runs", and of "profiles" and "fields" for the page."""
    nu = arm.coefficient.value(state.p).numpy()
    u = arm.solution(state.p, state.carried)
    record.add(
        "runs", seed=state.seed, nu=float(np.exp(np.log(nu).mean())),
        coefficient_error=relative(nu, inputs.coefficient), solution_error=relative(u, inputs.solution),
        steps=state.step, seconds=state.seconds,
    )  # fmt: skip
    x, stride = points(settings.points), max(1, settings.points // 128)
    if nu.shape:
        for at in range(0, settings.points, stride):
            record.add("fields", seed=state.seed, x=x[at], true=inputs.coefficient[at], found=nu[at])
    if state.seed != settings.seeds[0]:
        return
    for t in SHOWN:
        row = int(np.abs(inputs.grid_times - t).argmin())
        for at in range(0, settings.points, stride):
            record.add("profiles", t=t, x=x[at], true=inputs.solution[row, at], found=u[row, at])


def summary(record: Record) -> dict[str, Any]:
    """Means over the seeds, and standard deviations (n − 1), which one seed does not have."""
    rows = record.table("runs")
    found: dict[str, float | None] = {}
    for name in ("coefficient_error", "solution_error", "seconds"):
        values = np.array([row[name] for row in rows])
        found[name] = float(values.mean())
        found[f"{name}_sd"] = float(values.std(ddof=1)) if len(values) > 1 else None
    return {**found, "n": len(rows)}


def _save(settings: Settings, index: int, state: TrainState, record: Record, found: dict[str, Tensor]) -> Path:
    number = index * (settings.steps + 1) + state.step
    tree = {"index": index, "run": state.tree(), "rows": record.rows, "found": found}
    return folder_of(settings).save(number, tree)


def _all_seeds(settings: Settings, inputs: Inputs, record: Record, tree: dict[str, Any] | None) -> dict[str, Tensor]:
    """Every seed in turn; returns p by seed."""
    arm = numerical(settings, inputs) if settings.method == "numerical" else network(settings, inputs)
    first, found = 0, {}
    if tree is not None:
        first, found = tree["index"], dict(tree["found"])
        record.rows[:] = tree["rows"]
    done = first * settings.steps + (tree["run"]["step"] if tree else 0)
    total = settings.steps * len(settings.seeds)
    with Progress("invert", total=total, resume_at=done, units=UNITS) as bar, patient() as signals:
        for index in range(first, len(settings.seeds)):
            state = start(settings, arm, settings.seeds[index], tree["run"] if tree and index == first else None)

            def after(state: TrainState, index: int = index) -> None:
                save, done = (
                    partial(_save, settings, index, state, record, found),
                    f"seed {state.seed}, step {state.step}",
                )
                save_when_due(save, signals, step=state.step, every=settings.save_every, done=done)

            finish_(state, settings, arm, inputs, record, bar, after)
            if f"seed{state.seed}" not in found:
                judge(state, settings, arm, inputs, record)
                found[f"seed{state.seed}"] = state.p.detach().clone()
                _save(settings, index, state, record, found)
    return found


def run(settings: Settings) -> Record:
    """Invert as the command line does; beside the record lie the page, and ν by seed in coefficients.safetensors."""
    folder, mark = folder_of(settings), identity(settings)
    folder.check()
    inputs = observe(settings)
    known = identified(settings, inputs) if settings.field else None
    tree = folder.latest(mark)
    folder.claim_(mark)
    equation = settings.model
    question = f"Which ν makes {equation.formula} fit {inputs.values.numel()} observations?"
    record = Record(question=question, settings=settings, seed=list(settings.seeds), units=dict(UNITS))
    found = _all_seeds(settings, inputs, record, tree)
    record.add("summary", equation=equation.name, method=settings.method, **summary(record))
    if known is not None:
        record.add("identified", **asdict(known))
    save_tensors(folder.at(FOUND), {**found, "truth": torch.from_numpy(np.array(inputs.coefficient))})
    folder.finish_(record, write_page)
    return record


def show(record: Record) -> None:
    """Print the results; the last line says where the page is."""
    print_table(record.table("runs"), title=record.question, units=record.units)
    tell_page(record)
