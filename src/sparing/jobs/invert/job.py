"""The whole job: observe, invert from each seed's guess, judge, report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.jobs.disk import save_tensors
from sparing.jobs.folder import print_page_path
from sparing.jobs.invert import descent as descending
from sparing.jobs.invert.arms import Arm, identified, network, numerical, solution
from sparing.jobs.invert.coefficient import coefficient_of
from sparing.jobs.invert.observations import Inputs, observe, relative
from sparing.jobs.invert.page import PAGE, write_page
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.spectral import Array, points
from sparing.jobs.run import Run
from sparing.jobs.schedule import rate
from sparing.report import Progress, Record
from sparing.seeds import stream

FOUND: Final = "coefficients.safetensors"

UNITS: Final = {"seconds": "s"}
SHOWN: Final = (0.25, 0.5, 1.0)  # times at which the page compares solutions


@dataclass(kw_only=True, slots=True, eq=False)
class TrainState:
    """What an outer step of one seed changes; its tree is what a checkpoint holds."""

    seed: int  # of guess, directions and batches
    p: Tensor  # the unknowns, float64
    adam: torch.optim.Adam
    carried: Any  # what an outer step leaves to the next: weights of a network, or None
    step: int = 0  # outer steps done (count)
    quiet: int = 0  # steps in a row that moved ν by less than ``still`` (count)
    seconds: float = 0.0  # CPU time of the outer steps alone (s)

    def tree(self) -> dict[str, Any]:
        """All of it as a nest of tensors and numbers."""
        plain = {name: getattr(self, name) for name in ("seed", "p", "carried", "step", "quiet", "seconds")}
        return {**plain, "adam": self.adam.state_dict()}


def start(settings: Settings, arm: Arm, seed: int, tree: Mapping[str, Any] | None = None) -> TrainState:
    """A run at its start, or where a checkpoint's tree left it."""
    p = arm.coefficient.guess(settings.model, seed) if tree is None else tree["p"].clone()
    adam = torch.optim.Adam([p], lr=settings.rate, betas=settings.memory)
    if tree is None:
        return TrainState(seed=seed, p=p, adam=adam, carried=arm.start(seed))
    adam.load_state_dict(tree["adam"])
    kept = {name: tree[name] for name in ("carried", "step", "quiet", "seconds")}
    return TrainState(seed=seed, p=p, adam=adam, **kept)


def advance_(state: TrainState, settings: Settings, arm: Arm, inputs: Inputs) -> dict[str, Any]:
    """One outer step; its row holds loss and ν before it, and the CPU seconds up to its end."""
    start = time.process_time()
    before = arm.coefficient.value(state.p)
    seed = stream(state.seed, "outer", state.step).initial_seed()
    result = hg.hypergradient(arm.problem(state.carried), {"p": state.p}, arm.method, seed=seed)
    loss, gradient = float(result.value), result.grad["p"]
    if not (torch.isfinite(gradient).all() and torch.isfinite(result.value)):
        raise RunError(
            f"step {state.step}: loss {loss:g} or its gradient is not finite; a smaller --outer-lr keeps ν in range"
        )
    # weights go on to the next step, tangents do not: each hypergradient is of its own inner run
    if state.carried is not None:
        state.carried = {name: weight.detach() for name, weight in result.theta.items()}
    # the rate is a function of the step, so a checkpoint needs no scheduler
    state.adam.param_groups[0]["lr"] = rate(state.step, peak=settings.rate, steps=settings.steps)
    state.p.grad = gradient.detach()
    state.adam.step()
    moved = (arm.coefficient.value(state.p) / before - 1).abs().max().item()
    state.quiet = state.quiet + 1 if moved < settings.still else 0
    state.step += 1
    state.seconds += time.process_time() - start
    # of before the step, like the loss
    error = relative(before.numpy(), inputs.coefficient)
    nu = float(before.log().mean().exp())
    return {"seed": state.seed, "step": state.step, "loss": loss, "nu": nu, "error": error, "seconds": state.seconds}


def judge(seed: int, nu: Array, u: Array, settings: Settings, inputs: Inputs, record: Record, **cells: Any) -> None:
    """Measure what a finished run has found: rows of "runs", and of "profiles" and "fields" for the page.

    ``cells``: of the row of "runs"; ``low`` and ``high`` of a field, (grid,), go to "fields".
    """
    low, high = (cells.pop(name) if nu.shape and name in cells else None for name in ("low", "high"))
    record.add(
        "runs", seed=seed, nu=float(np.exp(np.log(nu).mean())),
        coefficient_error=relative(nu, inputs.coefficient), solution_error=relative(u, inputs.solution), **cells,
    )  # fmt: skip
    x, stride = points(settings.points), max(1, settings.points // 128)
    if nu.shape:
        for at in range(0, settings.points, stride):
            ends = {} if low is None or high is None else {"low": float(low[at]), "high": float(high[at])}
            record.add("fields", seed=seed, x=x[at], true=inputs.coefficient[at], found=nu[at], **ends)
    if seed != settings.seeds[0]:
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
    """Take one seed to its end by Adam, a row of the table "path" each step; returns p."""
    state = start(settings, arm, seed, run.interrupted)

    def take_step() -> dict[str, Any]:
        row = advance_(state, settings, arm, inputs)
        run.record.add("path", **row)
        return {"ν": row["nu"], "loss": row["loss"]}

    run.steps(
        state, take_step, total=settings.steps, label=f"seed {seed}", every=settings.save_every, bar=bar,
        until=lambda: state.quiet >= settings.patience,
    )  # fmt: skip
    u = arm.solution(state.p, state.carried)
    nu = arm.coefficient.value(state.p).numpy()
    judge(seed, nu, u, settings, inputs, run.record, steps=state.step, seconds=state.seconds)
    return state.p.detach().clone()


def _descend(run: Run, settings: Settings, inputs: Inputs, seed: int, number: int, bar: Progress) -> dict[str, Any]:
    """Least squares from one first guess, a row of the table "path" each step."""
    descent = descending.prepare(settings, inputs, seed, number, run.interrupted)
    coefficient = coefficient_of(settings)

    def take_step() -> dict[str, Any]:
        descent.advance_()
        row = descending.row(descent, coefficient, inputs.coefficient)
        if descent.at is None:
            return {}
        run.record.add("path", seed=seed, start=number, **row)
        return {"ν": row["nu"], "loss": row["loss"]}

    run.steps(
        descent, take_step, total=settings.steps + 1, label=f"seed {seed}", every=settings.save_every, bar=bar,
        until=lambda: descent.ended,
    )  # fmt: skip
    return descending.found(descent)


def _fit(run: Run, settings: Settings, inputs: Inputs, seed: int, bar: Progress) -> Tensor:
    """Take one seed to its end by least squares from each of its first guesses; returns the best p."""
    fits = [
        run.once(f"seed {seed}, start {number}", partial(_descend, run, settings, inputs, seed, number, bar))
        for number in range(settings.guesses)
    ]

    def finish() -> Tensor:
        best = min(fits, key=lambda fit: fit["misfit"])
        if math.isinf(best["misfit"]):
            raise RunError(f"seed {seed}: none of {len(fits)} first guesses leads anywhere; the last: {best['ended']}")
        coefficient = coefficient_of(settings)
        low, high = coefficient.band(best["p"], best["covariance"], best["quantile"])
        u = solution(settings, inputs, best["p"])
        for number, fit in enumerate(fits):
            nu = float(coefficient.value(fit["p"]).log().mean().exp())
            ended = {
                name: fit[name] for name in ("misfit", "converged", "ended", "steps", "solves", "seconds", "warnings")
            }
            run.record.add("starts", seed=seed, start=number, nu=nu, kept=fit is best, **ended)
        band = {"low": low, "high": high} if settings.field else {"low": float(low), "high": float(high)}
        judge(
            seed, coefficient.value(best["p"]).numpy(), u, settings, inputs, run.record, **band,
            steps=sum(fit["steps"] for fit in fits), seconds=sum(fit["seconds"] for fit in fits),
            solves=sum(fit["solves"] for fit in fits), converged=best["converged"], noise=best["noise"],
            penalty=best["penalty"] / inputs.values.numel(), freedom=best["freedom"],
            covered=descending.covered(settings, best),
        )  # fmt: skip
        p: Tensor = best["p"].clone()
        return p

    p: Tensor = run.once(f"seed {seed}", finish)
    return p


def _run_all(run: Run, settings: Settings, inputs: Inputs) -> dict[str, Tensor]:
    """Every seed; p by seed."""
    squares, seeds = settings.method == "least-squares", settings.seeds
    each = settings.steps + 1 if squares else settings.steps
    finished = sum(", start" in name for name in run.results("")) if squares else run.finished
    total = each * len(seeds) * settings.guesses
    with Progress("invert", total=total, resume_at=finished * each + run.interrupted_at, units=UNITS) as bar:
        if squares:
            return {f"seed{seed}": _fit(run, settings, inputs, seed, bar) for seed in seeds}
        arm = numerical(settings, inputs) if settings.method == "numerical" else network(settings, inputs)
        work = partial(_invert, run, settings, arm, inputs, bar=bar)
        return {f"seed{seed}": run.once(f"seed {seed}", partial(work, seed=seed)) for seed in seeds}


def run(settings: Settings) -> Record:
    """Invert as the command line does; beside the record lie the page, and ν by seed in coefficients.safetensors."""
    with Run(settings, writes=(FOUND,)) as run:
        inputs = observe(settings)
        # with a prior whose weight is chosen nothing is lost, and what is decided is known at the end
        asked = settings.field and (settings.method == "numerical" or settings.penalty == 0)
        known = identified(settings, inputs) if asked else None
        equation, seeds = settings.model, settings.seeds
        question = f"Which ν makes {equation.formula} fit {inputs.values.numel()} observations?"
        record = Record(question=question, settings=settings, seed=list(seeds), units=dict(UNITS))
        run.resume(record)
        run.claim()
        found = _run_all(run, settings, inputs)
        record.add("summary", equation=equation.name, method=settings.method, **summary(record))
        if known is not None:
            record.add("identified", **asdict(known))
        save_tensors(run.folder.at(FOUND), {**found, "truth": torch.from_numpy(np.array(inputs.coefficient))})
        return run.finish(write_page)


def show(record: Record) -> None:
    """Print the results; the last line says where the page is."""
    PAGE.print_tables(record)
    print_page_path(record)
