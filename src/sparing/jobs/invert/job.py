"""The whole job: observe, invert from each seed's guess, judge, report."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sparing.jobs.disk import save_tensors
from sparing.jobs.folder import tell_page
from sparing.jobs.invert.arms import Arm, network, numerical
from sparing.jobs.invert.identify import identified
from sparing.jobs.invert.observations import Inputs, observe, relative
from sparing.jobs.invert.page import write_page
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.spectral import points
from sparing.jobs.invert.state import TrainState, advance_, ended, start
from sparing.jobs.run import Run
from sparing.report import Progress, Record, print_table

FOUND: Final = "coefficients.safetensors"

UNITS: Final = {"seconds": "s"}
SHOWN: Final = (0.25, 0.5, 1.0)  # times at which the page compares solutions


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


def _invert(run: Run, settings: Settings, arm: Arm, inputs: Inputs, seed: int, bar: Progress) -> Tensor:
    """Take one seed to its end, a row of the table "path" each step; returns p."""
    state = start(settings, arm, seed, run.interrupted)

    def take_step() -> dict[str, Any]:
        row = advance_(state, settings, arm, inputs)
        run.record.add("path", **row)
        return {"ν": row["nu"], "loss": row["loss"]}

    run.steps(
        state, take_step, total=settings.steps, label=f"seed {seed}", every=settings.save_every, bar=bar,
        until=lambda: ended(state, settings),
    )  # fmt: skip
    judge(state, settings, arm, inputs, run.record)
    return state.p.detach().clone()


def run(settings: Settings) -> Record:
    """Invert as the command line does; beside the record lie the page, and ν by seed in coefficients.safetensors."""
    with Run(settings, writes=(FOUND,)) as run:
        inputs = observe(settings)
        known = identified(settings, inputs) if settings.field else None
        equation, seeds, steps = settings.model, settings.seeds, settings.steps
        question = f"Which ν makes {equation.formula} fit {inputs.values.numel()} observations?"
        record = Record(question=question, settings=settings, seed=list(seeds), units=dict(UNITS))
        run.resume(record)
        run.claim()
        arm = numerical(settings, inputs) if settings.method == "numerical" else network(settings, inputs)
        done = run.finished * steps + run.interrupted_at
        with Progress("invert", total=steps * len(seeds), resume_at=done, units=UNITS) as bar:
            work = partial(_invert, run, settings, arm, inputs, bar=bar)
            found = {f"seed{seed}": run.once(f"seed {seed}", partial(work, seed=seed)) for seed in seeds}
        record.add("summary", equation=equation.name, method=settings.method, **summary(record))
        if known is not None:
            record.add("identified", **asdict(known))
        save_tensors(run.folder.at(FOUND), {**found, "truth": torch.from_numpy(np.array(inputs.coefficient))})
        return run.finish(write_page)


def show(record: Record) -> None:
    """Print the results; the last line says where the page is."""
    print_table(record.table("runs"), title=record.question, units=record.units)
    tell_page(record)
