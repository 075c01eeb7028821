"""Gauss–Newton with Levenberg–Marquardt damping: a few Jacobians where gradient methods take thousands of runs."""

from __future__ import annotations

import math
import time
import warnings as python_warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparing.errors import RunError, UserError, require
from sparing.hypergrad.fitting.columns import Columns, columns_of
from sparing.hypergrad.fitting.linear import Linear, student
from sparing.hypergrad.fitting.residuals import Residuals
from sparing.hypergrad.settings import require_count
from sparing.hypergrad.spread import Spread
from sparing.hypergrad.trees import Tree, ravel, unravel

# Second differences above which a result warns, as a share of the first; above 1 they are refused.
_WARN_ABOVE = 0.5
# Of the fall that the linear problem predicts, the least share that a step must reach to be taken.
_LEAST_GAIN = 1e-4
# Damping in units of the largest squared column above which no step is left.
_LARGEST = 1e12
# The Jacobian is not finite, nothing, or made of rounding.
_USELESS = "the residuals cannot be differentiated"
# Ends that are no failure.
_PROMISES = "the linear problem promises no further fall"
_VANISHED = "the residuals are as small as the accuracy they are computed to"


@dataclass(frozen=True, kw_only=True)
class GaussNewton:
    """Each step solves the linearized problem; damping keeps it where the linearization holds (Levenberg–Marquardt).

    A step costs one solve, and if it is taken a Jacobian: 2N solves by central differences, or a run with N exact
    tangents where u is the end of a ``Bilevel``. Damping follows the gain, the fall reached over the fall predicted.

    Source: Marquardt 1963; Madsen, Nielsen & Tingleff 2004, Algorithm 3.16.
    """

    iterations: int = 30
    """Steps at most, taken or not (count)."""
    tolerance: float = 1e-6
    """Stop when the linear problem predicts a smaller fall than this, relative to the sum of squares."""
    step: float = 1e-3
    """µ of the central differences, in units of φ."""
    exact: bool = True
    """Whether columns through an inner run are exact tangents; else differences, which need no forward mode."""
    damping: float = 1e-3
    """First damping, in units of the largest squared column of the Jacobian; smaller for a better first guess."""
    chunk: int | None = None
    """Columns of du/dφ held together, and tangents carried through an inner run together (count); None: 32."""
    spread: Spread | None = None
    """Processes to share the columns with. By differences the result has the same bits on any number of them."""

    def __post_init__(self) -> None:
        require_count("iterations", self.iterations, "steps are counted")
        for name in ("tolerance", "step", "damping"):
            value = getattr(self, name)
            require(0 < value < math.inf, name, value, "it is a positive size", "pass a number above 0")
        if self.chunk is not None:
            require_count("chunk", self.chunk, "columns are counted")

    def __str__(self) -> str:
        return "Gauss–Newton"


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One step, taken or not."""

    value: float  # sum of squares after it, under the weight that chose it
    misfit: float  # ‖r‖² after it
    penalty: float  # weight w of the prior that chose it
    damping: float  # under which it was computed
    gain: float  # fall reached over fall predicted; below zero the sum of squares rose
    taken: bool
    solves: int  # runs of the solver so far (count)


@dataclass(frozen=True, kw_only=True, eq=False)
class Iterate:
    """A fit under way: all that the next step reads, so that it can be saved and gone on with to the same bits."""

    phi: Tensor  # float64, (N,)
    residuals: Tensor  # r, (m,)
    jacobian: Tensor  # J, (m, N)
    prior: Tensor  # s, (k,)
    slopes: Tensor  # S, (k, N)
    penalty: float  # w
    damping: float  # of the next step
    factor: float = 2.0  # by which damping grows if the next step fails
    jacobians: int = 1  # computed so far (count)
    solves: int = 0  # runs of the solver so far (count)
    bend: float = 0.0  # second over first differences of the last Jacobian
    start: float = math.inf  # ‖r‖² at the first guess
    ended: str = ""  # why it is over; empty while it is not
    path: tuple[Iteration, ...] = field(default=())

    def tree(self) -> dict[str, Any]:
        """All of it as a nest of tensors and plain values."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "path"}
        return {**plain, "path": [asdict(one) for one in self.path]}

    @staticmethod
    def of(tree: Mapping[str, Any]) -> Iterate:
        """The inverse of ``tree``."""
        # what a file gives back lies anywhere in memory, and the bits of a product depend on where
        kept: dict[str, Any] = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in tree.items()
        }
        return Iterate(**{**kept, "path": tuple(Iteration(**one) for one in tree["path"])})

    def linear(self, noise: float | None) -> Linear:
        """The problem linearized here."""
        return Linear(
            residuals=self.residuals, jacobian=self.jacobian, prior=self.prior, slopes=self.slopes, noise=noise
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Where least squares ended, and how far the residuals determine it there."""

    phi: Tree
    """The minimizer."""
    value: float
    """‖r‖² + w ‖s‖²."""
    residuals: Tensor
    """r, float64, shape (m,)."""
    jacobian: Tensor
    """dr/dφ at the end, float64, shape (m, N); columns in the order of φ's leaves."""
    penalty: float
    """w, given or chosen."""
    noise: float
    """σ of one residual: given, or the root of ‖r‖²/(m − freedom); NaN, and intervals with it, where none are left."""
    freedom: float
    """Effective degrees of freedom, tr J(JᵀJ + wSᵀS)⁻¹Jᵀ: unknowns that the residuals decide, the prior the rest."""
    covariance: Tensor
    """σ² (JᵀJ + wSᵀS)⁻¹, float64, shape (N, N): of the estimate without a prior, of the posterior with one."""
    path: tuple[Iteration, ...]
    """The steps."""
    converged: bool
    """Whether the linear problem promised no further fall, rather than the steps ran out."""
    ended: str
    """Why it ended."""
    solves: int
    """Runs of the solver, or inner runs (count); an inner run with tangents counts once a chunk."""
    seconds: float
    """Wall-clock time (s)."""
    warnings: tuple[str, ...] = ()
    """What the reader should worry about."""
    quantile_freedom: float = math.inf
    """Degrees of freedom of Student's law: m − freedom where the noise was estimated."""

    def interval(self, level: float = 0.9) -> tuple[Tree, Tree]:
        """Ends of an interval for each element of φ, of the linear problem at the end.

        Without a prior a confidence interval. With one a credible interval, which covers the truth with the stated
        frequency in the mean over the elements, not at each one: it is too short where the truth is rougher than the
        prior, and too long elsewhere (Wahba 1983; Nychka 1988).

        Args:
            level: Share of intervals that hold the truth.

        Returns:
            Lower and upper ends, trees like φ.
        """
        require(0 < level < 1, "level", level, "it is a share of intervals", "pass 0 < level < 1")
        half = student((1 + level) / 2, self.quantile_freedom) * self.covariance.diagonal().clamp(min=0).sqrt()
        at = ravel(self.phi).double()
        return unravel(at - half, self.phi), unravel(at + half, self.phi)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Least squares step by step: ``begin``, ``advance`` until ``ended``, ``finish``."""

    problem: Residuals
    method: GaussNewton
    columns: Columns

    def begin(self) -> Iterate:
        """The first guess, with its Jacobian."""
        phi = self.columns.like
        u = self.columns.solve(phi)
        self.columns.check_repeats(phi, u)
        residuals = self.columns.residuals(u, phi)
        if not (torch.isfinite(residuals).all() and torch.isfinite(self.columns.prior(phi)).all()):
            raise RunError("least squares: residuals or prior are not finite at the first guess; start elsewhere")
        self.columns.check_slopes(phi, u)
        first = self._linearized(ravel(phi).double(), u, residuals, solves=2, jacobians=0, start=None)
        self.columns.refuse_useless(first.jacobian, first.bend)
        return replace(first, damping=self.method.damping * self._unit(first))

    def advance(self, at: Iterate) -> Iterate:
        """One trial step: taken where the sum of squares falls, else damped more."""
        move, predicted = at.linear(self.problem.noise).step(at.penalty, at.damping)
        if predicted <= 0 or at.damping > _LARGEST * self._unit(at):
            return replace(at, ended="no step lowers the sum of squares")
        phi = self.columns_tree(at.phi + move)
        u = self.columns.solve(phi, anywhere=True)
        residuals, prior = self.columns.residuals(u, phi), self.columns.prior(phi)
        for name, found, kept in (("residuals", residuals, at.residuals), ("prior", prior, at.prior)):
            same = found.shape == kept.shape
            require(same, name, f"{len(found)} of them, then {len(kept)}", "they are subtracted", "return as many")
        before = at.linear(None).value(at.penalty)
        misfit = float(residuals.square().sum())
        value = misfit + at.penalty * float(prior.square().sum())
        # a solver that fails there gives values that are not finite: more damping brings the step nearer
        gain = (before - value) / predicted if math.isfinite(value) else -math.inf
        solves, made = at.solves + 1, None
        if gain > _LEAST_GAIN:
            made = self._linearized(
                ravel(phi).double(), u, residuals, solves=solves, jacobians=at.jacobians, start=at.start
            )
            # φ got to where the solver works but cannot be differenced
            if made.ended == _USELESS:
                made = replace(at, solves=made.solves, jacobians=made.jacobians)
            solves = made.solves
        taken = made is not None and made.jacobian is not at.jacobian
        row = Iteration(
            value=value, misfit=misfit, penalty=at.penalty, damping=at.damping, gain=gain, taken=taken, solves=solves
        )
        path = (*at.path, row)
        if not taken or made is None:
            small = predicted <= self.method.tolerance * before
            ended = "no step lowers the sum of squares" if small else self._out_of_steps(path)
            return replace(
                made or at, damping=at.damping * at.factor, factor=2 * at.factor, solves=solves, path=path, ended=ended
            )
        # Nielsen's rule: a cubic in the gain, smooth from a third (gain 1) to two (gain 0)
        damping = at.damping * max(1 / 3, 1 - (2 * gain - 1) ** 3)
        return replace(made, damping=damping, path=path, ended=made.ended or self._out_of_steps(path))

    def finish(self, at: Iterate, seconds: float) -> Fit:
        """What is known at the end."""
        linear, count = at.linear(self.problem.noise), len(at.residuals)
        converged, determined = at.ended in {_PROMISES, _VANISHED}, linear.determined(at.penalty)
        freedom = linear.freedom(at.penalty) if determined else float(torch.linalg.matrix_rank(at.jacobian))
        noise, left, warnings = self.problem.noise, math.inf, []
        if noise is None:
            left = count - freedom
            noise = math.sqrt(float(at.residuals.square().sum()) / left) if left > 1e-9 else math.nan
        if not converged:
            warnings.append(f"least squares has not converged: {at.ended}")
        if not determined:
            warnings.append("some direction of φ moves neither residuals nor prior: φ has no covariance; give a prior")
        if at.bend > _WARN_ABOVE:
            warnings.append(f"second differences are {at.bend:.2g} of the first: rounding or a bend; try another step")
        covariance = (
            linear.covariance(at.penalty, noise) if determined else at.jacobian.new_full((len(at.phi),) * 2, math.nan)
        )
        return Fit(
            phi=self.columns_tree(at.phi), value=linear.value(at.penalty), residuals=at.residuals,
            jacobian=at.jacobian, penalty=at.penalty, noise=noise, freedom=freedom,
            covariance=covariance, path=at.path, converged=converged, ended=at.ended, solves=at.solves, seconds=seconds,
            warnings=tuple(warnings), quantile_freedom=left,
        )  # fmt: skip

    def columns_tree(self, flat: Tensor) -> Tree:
        """φ as a tree, in the dtypes it came in."""
        return unravel(flat, self.columns.like)

    def _linearized(
        self, flat: Tensor, u: Tree, residuals: Tensor, *, solves: int, jacobians: int, start: float | None
    ) -> Iterate:
        """The iterate at φ, with its weight chosen, and ended where the linear problem promises nothing more."""
        phi = self.columns_tree(flat)
        jacobian, bend = self.columns.jacobian(phi, u, residuals, jacobians)
        prior, slopes = self.columns.prior(phi), self.columns.slopes(phi)
        linear = Linear(residuals=residuals, jacobian=jacobian, prior=prior, slopes=slopes, noise=self.problem.noise)
        misfit = float(residuals.square().sum())
        start = misfit if start is None else start
        cost = self.columns.cost(len(flat))
        made = Iterate(
            phi=flat, residuals=residuals, jacobian=jacobian, prior=prior, slopes=slopes, penalty=0.0, damping=0.0,
            jacobians=jacobians + 1, solves=solves + cost, bend=bend, start=start,
        )  # fmt: skip
        if not torch.isfinite(jacobian).all() or not jacobian.any() or bend > 1:
            return replace(made, ended=_USELESS)
        rule = self.problem.penalty
        weight = 0.0 if not len(prior) else linear.choose(rule) if isinstance(rule, str) else float(rule)
        # a damping lost in rounding, so that directions that move nothing do not matter
        _, promised = linear.step(weight, 1e-15 * max(float(jacobian.square().sum()), 1e-300))
        ended = _PROMISES if promised <= self.method.tolerance * linear.value(weight) else ""
        # what fits to rounding, or to the error of a solver, keeps promising a fall to less
        least = (100 * torch.finfo(ravel(u).dtype).eps) ** 2 * start
        least = max(least, self.problem.accuracy**2 * len(residuals))
        ended = ended or (_VANISHED if misfit <= least else "")
        return replace(made, penalty=weight, ended=ended)

    def _unit(self, at: Iterate) -> float:
        """The largest squared column of the Jacobian: the unit of damping."""
        return max(float(at.jacobian.square().sum(0).max()), torch.finfo(torch.float64).tiny)

    def _out_of_steps(self, path: tuple[Iteration, ...]) -> str:
        return f"{len(path)} steps were taken or tried" if len(path) >= self.method.iterations else ""


def prepared(problem: Residuals, phi: Tree, method: GaussNewton, *, seed: int = 0) -> Search:
    """A search bound to its first guess."""
    if not isinstance(method, GaussNewton):
        got = method.__name__ if isinstance(method, type) else type(method).__name__
        raise UserError("method", got=got, why="least squares has one method", do="pass GaussNewton(...), or nothing")
    bound, _ = columns_of(
        problem, phi, seed=seed, step=method.step, exact=method.exact, chunk=method.chunk, spread=method.spread
    )
    return Search(problem=problem, method=method, columns=bound)


def least_squares(problem: Residuals, phi: Tree, method: GaussNewton | None = None, *, seed: int = 0) -> Fit:
    """The φ that minimizes ‖r(u(φ), φ)‖² + w ‖s(φ)‖², with intervals from the Jacobian at the end.

    Where the unknowns are fields or a few dozen numbers and the loss is a sum of squares this needs some ten
    Jacobians, where a gradient method with sampled directions needs thousands of solves. Memory: J is held whole.

    Args:
        problem: Solver or inner run, residuals, prior.
        phi: First guess, a tree of floating tensors; float64 is best.
        method: ``GaussNewton()``, with settings.
        seed: Seed of an inner run.

    Returns:
        Minimizer, Jacobian, covariance, intervals, path.

    Raises:
        UserError: If problem, φ and method do not fit, solver, residuals or prior do not repeat their answers, or
            forward mode has a wrong slope of the last two.
        RunError: If residuals are not finite at the first guess, or some direction of φ moves nothing.

    Example:
        >>> import torch
        >>> from sparing import hypergrad as hg
        >>> x = torch.arange(5.0, dtype=torch.float64)
        >>> line = hg.Residuals(solve=lambda phi: phi[0] + phi[1] * x, residuals=lambda u, phi: u - (1 + 2 * x))
        >>> fit = hg.least_squares(line, torch.zeros(2, dtype=torch.float64))
        >>> fit.phi
        tensor([1.0000, 2.0000], dtype=torch.float64)
    """
    begin = time.perf_counter()
    search = prepared(problem, phi, GaussNewton() if method is None else method, seed=seed)
    at = search.begin()
    while not at.ended:
        at = search.advance(at)
    fit = search.finish(at, time.perf_counter() - begin)
    for warning in fit.warnings:
        python_warnings.warn(warning, RuntimeWarning, stacklevel=2)
    return fit
