"""Least squares for one run: Gauss–Newton from each first guess, the best of them kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import RunError, UserError
from sparing.hypergrad.fitting.gauss_newton import Iterate, Search, prepared
from sparing.hypergrad.fitting.linear import student
from sparing.jobs.invert.arms import residuals, simulation
from sparing.jobs.invert.coefficient import Coefficient, coefficient_of
from sparing.jobs.invert.observations import Inputs, relative, true_field
from sparing.jobs.invert.settings import Settings
from sparing.jobs.invert.spectral import points

LEVEL: Final = 0.9  # of the intervals


@dataclass(kw_only=True, slots=True, eq=False)
class Descent:
    """A fit from one first guess under way; its tree is what a checkpoint holds."""

    search: Search
    strict: Callable[[Any], Tensor]  # the solver, which says why it fails
    alone: bool = True  # whether there is no other first guess
    at: Iterate | None = None  # None before the first Jacobian
    step: int = 0  # steps done, the first Jacobian among them (count)
    seconds: float = 0.0  # CPU time of the steps (s)
    failed: str = ""  # why nothing could be done from this first guess

    def tree(self) -> dict[str, Any]:
        """All of it as a nest of tensors and numbers."""
        return {"at": None if self.at is None else self.at.tree(), "step": self.step, "seconds": self.seconds,
                "failed": self.failed}  # fmt: skip

    @property
    def ended(self) -> bool:
        """Whether the fit is over."""
        return self.failed != "" or (self.at is not None and self.at.ended != "")

    def advance_(self) -> None:
        """Take the first Jacobian, or one step."""
        begin = time.process_time()
        if self.at is None:
            self._begin_()
        else:
            self.at = self.search.advance(self.at)
        self.step += 1
        self.seconds += time.process_time() - begin

    def _begin_(self) -> None:
        try:
            # whose failure at the first guess is the user's to know
            self.strict(self.search.columns.like)
            self.at = self.search.begin()
        except (UserError, RunError) as error:
            if self.alone:
                raise
            self.failed = str(error)


def prepare(settings: Settings, inputs: Inputs, seed: int, start: int, tree: Mapping[str, Any] | None) -> Descent:
    """A fit at its first guess, or where a checkpoint's tree left it."""
    coefficient = coefficient_of(settings)
    p = coefficient.guess(settings.model, seed, start, settings.guesses)
    # a fall of 1e-4 of the sum of squares is less than half a standard error, of all unknowns together
    method = hg.GaussNewton(step=settings.numerical.probe, iterations=settings.steps, tolerance=1e-4)
    search = prepared(residuals(settings, inputs), {"p": p}, method)
    descent = Descent(search=search, strict=simulation(settings, inputs), alone=settings.guesses == 1)
    if tree is not None:
        descent.at = None if tree["at"] is None else Iterate.of(tree["at"])
        descent.step, descent.seconds, descent.failed = tree["step"], tree["seconds"], tree["failed"]
    return descent


def row(descent: Descent, coefficient: Coefficient, truth: np.ndarray) -> dict[str, Any]:
    """Where a fit stands, for the table "path"."""
    if descent.at is None:
        return {"step": descent.step, "seconds": descent.seconds}
    at, last = descent.at, descent.at.path[-1] if descent.at.path else None
    nu = coefficient.value(at.phi)
    return {
        "step": descent.step, "loss": float(at.residuals.square().mean()), "nu": float(nu.log().mean().exp()),
        "error": relative(nu.numpy(), truth), "penalty": at.penalty / len(at.residuals),
        "taken": last is None or last.taken, "solves": at.solves, "seconds": descent.seconds,
    }  # fmt: skip


def found(descent: Descent) -> dict[str, Any]:
    """What a finished fit leaves: numbers and tensors."""
    if descent.at is None:
        return {"p": descent.search.columns.like["p"], "misfit": math.inf, "ended": descent.failed, "converged": False,
                "steps": descent.step, "solves": 0, "seconds": descent.seconds, "warnings": descent.failed}  # fmt: skip
    fit = descent.search.finish(descent.at, descent.seconds)
    low, high = fit.interval(LEVEL)
    kept = {name: getattr(fit, name) for name in ("penalty", "noise", "freedom", "covariance", "converged", "solves")}
    return {
        **kept, "p": fit.phi["p"], "low": low["p"], "high": high["p"], "ended": fit.ended, "steps": descent.step,
        "quantile": student((1 + LEVEL) / 2, fit.quantile_freedom), "seconds": descent.seconds,
        "misfit": float(fit.residuals.square().mean()), "warnings": "; ".join(fit.warnings),
    }  # fmt: skip


def covered(settings: Settings, best: Mapping[str, Any]) -> float:
    """Share of the unknowns whose interval holds the truth."""
    equation = settings.model
    truth = true_field(equation, points(settings.field)) if settings.field else np.asarray([equation.truth])
    low, high = coefficient_of(settings).ends(best["low"], best["high"])
    aim = torch.from_numpy(truth)
    return float(((low <= aim) & (aim <= high)).double().mean())
