"""Columns of the Jacobian of residuals: by central differences of a solver, or by exact tangents of an inner run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sparing.errors import RunError, UserError
from sparing.hypergrad.estimate import finite
from sparing.hypergrad.fitting.residuals import Residuals
from sparing.hypergrad.fitting.slopes import refuse_wrong_slopes
from sparing.hypergrad.forward_mode.sweep import carry_tangents
from sparing.hypergrad.forward_mode.tangents import batched_jvp
from sparing.hypergrad.inner.checks import (
    check_problem,
    check_solution,
    check_tree,
    refuse_bend,
    refuse_changed_phi,
    refuse_inference_mode,
    refuse_lost_step,
    refuse_other_values,
)
from sparing.hypergrad.inner.unroll import Unroll, reproducible
from sparing.hypergrad.problem import Bilevel
from sparing.hypergrad.spread import Spread
from sparing.hypergrad.trees import Tree, add, leaves, ravel, rebuild, size, unravel
from sparing.seeds import number

# columns of du/dφ held together unless asked otherwise: 32 solutions are rarely more than the solver itself holds
_CHUNK = 32


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How u(φ) is evaluated and differentiated, bound to a problem and a seed."""

    problem: Residuals
    seed: int
    like: Tree  # φ: gives nesting and dtypes
    step: float  # µ
    exact: bool  # tangents through an inner run, rather than differences
    chunk: int | None  # columns of du/dφ held together
    spread: Spread | None

    def solve(self, phi: Tree, like: Tree = None, *, anywhere: bool = False) -> Tree:
        """u(φ), detached, in the shapes of ``like``; with that, or ``anywhere``, values need not be finite."""
        if isinstance(self.problem.solve, Bilevel):
            unroll = self._unroll(phi).unchecked()
            return rebuild(unroll.theta, unroll.run(phi).theta)
        before = [leaf.clone() for leaf in leaves(phi)]
        found = self.problem.solve(phi)
        refuse_changed_phi(before, phi)
        # copied, as ``check_solution`` does: a solver may write every solution into the same memory
        return tree_map(torch.clone, check_tree("solve(phi)", found)) if anywhere else check_solution(found, like)

    def cost(self, count: int) -> int:
        """Runs of one Jacobian, over all ranks (count)."""
        return math.ceil(count / (self.chunk or _CHUNK)) if self.exact else 2 * count

    def residuals(self, u: Tree, phi: Tree) -> Tensor:
        """r(u, φ) in float64, shape (m,)."""
        with torch.no_grad(), self._reproducible():
            return _vector("residuals", self.problem.residuals(u, phi))

    def prior(self, phi: Tree) -> Tensor:
        """s(φ) in float64, shape (k,); k = 0 without a prior."""
        with torch.no_grad(), self._reproducible():
            return ravel(phi).double()[:0] if self.problem.prior is None else _vector("prior", self.problem.prior(phi))

    def slopes(self, phi: Tree) -> Tensor:
        """S = ds/dφ in float64, shape (k, N)."""
        count, prior = size(phi), self.problem.prior
        if prior is None:
            return ravel(phi).double().new_zeros(0, count)
        with self._reproducible():
            pieces = _pieces(range(count), self.chunk or _CHUNK)
            parts = [batched_jvp(prior, (phi,), (self.basis(part),), "prior")[1] for part in pieces]
        return torch.cat(parts).double().T.contiguous()

    def basis(self, numbers: Sequence[int]) -> Tree:
        """Unit vectors by number, leaves of shape (len, *leaf)."""
        flat = ravel(self.like)
        rows = torch.zeros(len(numbers), len(flat), dtype=flat.dtype, device=flat.device)
        rows[range(len(numbers)), list(numbers)] = 1
        return unravel(rows, self.like)

    def jacobian(self, phi: Tree, u: Tree, residuals: Tensor, turn: int) -> tuple[Tensor, float]:
        """J = dr/dφ in float64, (m, N), and second over first differences; ``turn`` counts the Jacobians."""
        count = size(phi)
        mine = range(count) if self.spread is None else self.spread.owned(count)
        rows = self._columns(phi, u, mine, len(residuals))
        if self.spread is not None:
            rows = self._shared(rows, phi, u, residuals, turn)
        bend, rise = rows[:, -2:].sum(0).tolist()
        curvature = math.sqrt(bend / rise) if rise else math.inf if bend else 0.0
        return rows[:, :-2].T.contiguous(), curvature

    def refuse_useless(self, jacobian: Tensor, bend: float) -> None:
        """Refuse a Jacobian that is not finite, nothing, or made of rounding."""
        if not torch.isfinite(jacobian).all():
            raise RunError(
                "least squares: a column of the Jacobian is not finite: solve(phi) fails beside a φ where it works; "
                "pass a shorter GaussNewton.step, or keep φ inside the domain of the solver by a change of variables"
            )
        if not jacobian.any():
            raise UserError(
                "residuals", got="values that no element of φ moves", why="nothing can be fitted",
                do="do not detach u or φ inside residuals(u, phi), and look at what solve(phi) does with φ",
            )  # fmt: skip
        refuse_bend("GaussNewton.step", self.step, bend)

    def _shared(self, rows: Tensor, phi: Tree, u: Tree, residuals: Tensor, turn: int) -> Tensor:
        """Columns of all ranks; those of a lost one are computed by each rank that is left."""
        assert self.spread is not None
        here = torch.cat([ravel(phi).double(), residuals]).tolist()
        total = math.fsum(value * math.cos(place) for place, value in enumerate(here))
        rounding = torch.finfo(ravel(self.like).dtype).eps ** (2 / 3) * math.fsum(map(abs, here))
        run = (float(number(self.seed, f"Jacobian {turn} of {size(phi)} unknowns") % 2**52), total, rounding)
        found = replace(self.spread, key=f"{self.spread.key}/{turn}").exchange(rows, size(phi), run)
        lost = [place for place in range(len(found)) if torch.isnan(found[place]).all()]
        if lost:
            found[lost] = self._columns(phi, u, lost, len(residuals))
        return found

    def _columns(self, phi: Tree, u: Tree, numbers: Sequence[int], height: int) -> Tensor:
        """dr/dφ along the given unknowns, and squares of second and first differences, float64, (len, m + 2)."""
        rows = [ravel(phi).double().new_zeros(0, height + 2)]
        unroll = self._unroll(phi) if self.exact else None
        for part in _pieces(numbers, self.chunk or _CHUNK):
            basis = self.basis(part)
            if unroll is not None:
                state, tangents, _ = carry_tangents(unroll, phi, basis, unroll.steps, None)
                u, moved = rebuild(u, state.theta), rebuild(u, tangents.theta)
                squares = rows[0].new_zeros(len(part), 2)
            else:
                moved, squares = self._differences(phi, u, basis)
            with self._reproducible():
                found = batched_jvp(self.problem.residuals, (u, phi), (moved, basis), "residuals")[1].double()
            rows.append(torch.cat([found, squares.to(found)], dim=1))
        return torch.cat(rows)

    def _differences(self, phi: Tree, u: Tree, basis: Tree) -> tuple[Tree, Tensor]:
        """du/dφ along rows by central differences, leaves (b, *leaf), and squares of second and first ones, (b, 2)."""
        columns: list[list[Tensor]] = []
        squares: list[list[float]] = []
        for place in range(len(leaves(basis)[0])):
            row = rebuild(phi, [leaf[place] for leaf in leaves(basis)])
            ends = [add(phi, rebuild(row, [sign * self.step * leaf for leaf in leaves(row)])) for sign in (1, -1)]
            refuse_lost_step("GaussNewton.step", self.step, ends, ravel(row))
            trios = list(
                zip(*(leaves(tree) for tree in (self.solve(ends[0], u), self.solve(ends[1], u), u)), strict=True)
            )
            columns.append([(up - down) / (2 * self.step) for up, down, _ in trios])
            bend = sum(float((up + down - 2 * at).square().sum()) for up, down, at in trios)
            rise = sum(float((up - down).square().sum()) for up, down, _ in trios)
            # a column that is not finite is an error of its own
            squares.append([bend, rise] if finite(columns[-1]) else [0.0, 0.0])
        stacked = rebuild(u, [torch.stack(parts) for parts in zip(*columns, strict=True)])
        return stacked, torch.tensor(squares, dtype=torch.float64)

    def check_repeats(self, phi: Tree, u: Tree) -> None:
        """Refuse a solver, residuals or a prior that answer differently when asked again."""
        if not isinstance(self.problem.solve, Bilevel):
            refuse_other_values("solve(phi)", u, check_solution(self.problem.solve(phi), u))
        # the second call goes on where the first left the generators, so that another draw is another answer
        with torch.no_grad(), self._reproducible():
            for name, function, at in self._functions(phi, u):
                one, two = function(*at), function(*at)
                _vector(name, one)
                refuse_other_values(name, one, two)

    def check_slopes(self, phi: Tree, u: Tree) -> None:
        """Refuse residuals or a prior that torch's forward mode differentiates wrongly."""
        with self._reproducible():
            for name, function, at in self._functions(phi, u):
                refuse_wrong_slopes(name, function, at, self.seed)

    def _functions(self, phi: Tree, u: Tree) -> list[tuple[str, Callable[..., Tensor], tuple[Tree, ...]]]:
        """Name, function and arguments of the residuals, and of the prior if there is one."""
        found: list[tuple[str, Callable[..., Tensor], tuple[Tree, ...]]] = [
            ("residuals", self.problem.residuals, (u, phi))
        ]
        return found if self.problem.prior is None else [*found, ("prior", self.problem.prior, (phi,))]

    def _reproducible(self) -> AbstractContextManager[None]:
        """The global generators as they are to be in the residuals and the prior; the caller's are put back."""
        return reproducible(self.seed, "residuals")

    def _unroll(self, phi: Tree) -> Unroll:
        assert isinstance(self.problem.solve, Bilevel)
        # directions live in the space of φ, so a bottleneck becomes a part of every step
        return check_problem(self.problem.solve.composed(), phi, self.seed, through_updates=self.exact)


def columns_of(
    problem: Residuals, phi: Tree, *, seed: int, step: float, exact: bool, chunk: int | None, spread: Spread | None
) -> tuple[Columns, Tree]:
    """The columns of a problem, and φ detached."""
    if not isinstance(problem, Residuals):
        raise UserError(
            "problem", got=type(problem).__name__, why="a sum of squares has residuals", do="pass hypergrad.Residuals"
        )
    refuse_inference_mode("least_squares")
    like = check_tree("phi", phi)
    through = exact and isinstance(problem.solve, Bilevel)
    bound = Columns(problem=problem, seed=seed, like=like, step=step, exact=through, chunk=chunk, spread=spread)
    return bound, like


def _vector(name: str, value: object) -> Tensor:
    """A float64 vector; UserError for anything else."""
    if not isinstance(value, Tensor) or value.dim() != 1 or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(name, got=got, why="its squares are summed", do="return a floating tensor of shape (m,)")
    return value.detach().double()


def _pieces(numbers: Sequence[int], length: int) -> list[Sequence[int]]:
    return [numbers[low : low + length] for low in range(0, len(numbers), length)]
