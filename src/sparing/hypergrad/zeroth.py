"""Zeroth-order hypergradients: inner runs are differenced, never differentiated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.errors import require
from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.forward_mode.directions import Law, Rademacher
from sparing.hypergrad.forward_mode.sampled import Directions, combine, confidence, draw_directions, masked_warning
from sparing.hypergrad.inner.checks import (
    check_solution,
    refuse_bend,
    refuse_changed_phi,
    refuse_lost_step,
    refuse_other_values,
)
from sparing.hypergrad.inner.repeatability import FirstPass, NoForeignWrites
from sparing.hypergrad.inner.unroll import State, Unroll, reproducible, vjp
from sparing.hypergrad.problem import BlackBox, check_scalar, refuse_constant
from sparing.hypergrad.settings import require_count, require_law
from sparing.hypergrad.trees import (
    Tree,
    add,
    differentiable,
    inner_product,
    leaves,
    ravel,
    rebuild,
    unravel,
    zeros_like,
)
from sparing.seeds import number

# Ratio of second to first differences above which a solver is called twice at φ: of a smooth one it is of the order of
# the step, of a random one about 2.
_RECHECK_ABOVE = 0.01
# The same ratio above which a result warns; above 1 it is refused.
_WARN_ABOVE = 0.5
# One step in this many is repeated, to see whether the run is deterministic: 3 % of the work.
_REPEAT_EVERY = 33


Vector = list[Tensor]  # leaves of u


@dataclass(frozen=True, kw_only=True)
class ZerothOrder:
    """(FG)²U-ZO: derivatives along directions by central differences of whole inner runs; 2b runs.

    Both runs of a difference, and all directions, share their randomness. By default the difference is taken of θ_T
    (or of the solver's u) alone and the outer loss is differentiated exactly, which spares it the cancellation; error
    O(µ²) in the step, and about ε/µ in rounding: 1e-3 suits float32, 1e-4 float64.

    Source: Shen et al. 2024, eq. 16 (which uses a forward difference); Sow, Ji & Liang 2022 for the exact outer part.
    """

    directions: int = 16
    """b (count)."""
    step: float = 1e-3
    """µ, in units of φ."""
    law: Law = Rademacher()  # noqa: RUF009  # a frozen value
    """Law of the directions."""
    exact_outer: bool = True
    """Whether the outer loss is differentiated; else its values are differenced too: those of a ``BlackBox`` whole,
    which then needs no graph, those of a ``Bilevel`` through θ_T, beside an exact ∂f/∂φ."""

    def __post_init__(self) -> None:
        require_count("directions", self.directions, "directions are counted")
        require(0 < self.step < math.inf, "step", self.step, "a difference needs a distance", "pass step > 0")
        require_law(self.law)

    def __str__(self) -> str:
        return f"zeroth order b={self.directions}"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The estimate, from 2b runs besides the one at φ."""
        state = unroll.run(psi, repeat_every=math.ceil(_REPEAT_EVERY / (2 * self.directions + 1)))
        value, cotangent, direct = unroll.outer_gradients(state, phi)
        slopes = _flat(cotangent)
        del cotangent  # that of the moments is zero
        moved = unroll.unchecked()
        if self.exact_outer:
            ends, here, slope = lambda at: _flat(moved.run(at)), _flat(state), slopes
        else:
            ends, here = lambda at: [moved.outer(moved.run(at), phi)], [value]
            slope = [torch.ones_like(value)]
            # the outer loss is evaluated at other φ from now on, so it is compared with itself here
            unroll.check_same("outer", 0, value)
            unroll.check_same("outer", 0, unroll.outer(state, phi))
        known = direct if unroll.problem.through is None else None
        through, details, curvature = self.along(ends, here, slope, psi, known, unroll.seed)
        refuse_bend("ZerothOrder.step", self.step, curvature)
        return Estimate(through=through, direct=direct, value=value, state=state, details=details)

    def along(
        self,
        solve: Callable[[Tree], list[Tensor]],
        here: list[Tensor],
        slopes: list[Tensor],
        psi: Tree,
        direct: list[Tensor] | None,
        seed: int,
    ) -> tuple[list[Tensor], dict[str, Any], float]:
        """The sampled part: slopes · (solve(ψ + µv) − solve(ψ − µv))/2µ along each direction.

        Args:
            solve: ψ -> leaves of u.
            here: u at ψ itself.
            slopes: ∂f/∂u, as those leaves.
            psi: The point ψ.
            direct: What is known exactly in the same space, if anything.
            seed: Seed of the directions.

        Returns:
            Leaves as of ψ, fields of the report, and second over first differences: of a smooth u they are of the
            order of the step, of noise 1.7.
        """
        draw = draw_directions(self.law, self.directions, psi, number(seed, "directions"))
        weights, curvature = self._differences(draw, solve, here, slopes, psi)
        masked = int((~torch.isfinite(weights)).sum())
        warnings = []
        if math.isnan(curvature):
            warnings.append("no run moved: φ has no effect, or the step is lost in rounding")
        elif curvature > _WARN_ABOVE:
            differences = f"second differences are {curvature:.2g} of the first"
            warnings.append(f"{differences}: rounding or a bend; try another step")
        if masked:
            warnings.append(masked_warning(masked, self.directions))
        known = ravel(direct).to(weights) if direct else torch.zeros_like(ravel(psi))
        grad, cross = combine(draw, weights, known)
        details = {"directions": self.directions, "weights": weights, "masked": masked, "warnings": tuple(warnings)}
        return leaves(unravel(grad, psi)), details | confidence(draw, weights, known, cross), curvature

    def _differences(
        self, draw: Directions, solve: Callable[[Tree], Vector], here: Vector, slopes: Vector, psi: Tree
    ) -> tuple[Tensor, float]:
        """The derivative along each direction, shape (b,); second over first differences, NaN where no run moved."""
        weights, bend, rise = [], 0.0, 0.0
        for place in range(self.directions):
            row = draw.rows([place])[0]
            ends = [add(psi, unravel(sign * self.step * row, psi)) for sign in (1, -1)]
            refuse_lost_step("ZerothOrder.step", self.step, ends, row)
            with torch.no_grad():
                pairs = list(zip(solve(ends[0]), solve(ends[1]), strict=True))
                bend += _square(up + down - 2 * at for (up, down), at in zip(pairs, here, strict=True))
                rise += _square(up - down for up, down in pairs)
                weights.append(inner_product(slopes, [(up - down) / (2 * self.step) for up, down in pairs]))
            del pairs  # free them before the next two runs
        curvature = math.sqrt(bend / rise) if rise else math.inf if bend else math.nan
        return torch.stack(weights).to(ravel(psi)), curvature


def black_box(problem: BlackBox, phi: Tree, method: ZerothOrder, seed: int) -> tuple[Estimate, Tree]:
    """The hypergradient through a solver that cannot be differentiated, and u."""
    before = [leaf.clone() for leaf in leaves(phi)]
    tree = check_solution(problem.solve(phi))
    refuse_changed_phi(before, phi)

    # beside φ, values that are not finite cost their direction only, not the estimate
    def solve(at: Tree) -> list[Tensor]:
        return leaves(check_solution(problem.solve(at), tree))

    def outer(u: Tree, at: Tree) -> Tensor:
        with reproducible(seed, "outer"):
            return check_scalar("outer", problem.outer(u, at))

    def follow(at: Tree) -> list[Tensor]:
        return [outer(rebuild(tree, solve(at)), at)]

    ends, phi_leaves = differentiable(tree), differentiable(phi)
    if method.exact_outer:
        with torch.enable_grad(), NoForeignWrites("outer"):
            value = outer(rebuild(tree, ends), rebuild(phi, phi_leaves))
        refuse_constant(value)
        slopes = vjp(value, [*ends, *phi_leaves], name="outer")
        direct = slopes[len(ends) :]
        through, details, curvature = method.along(solve, leaves(tree), slopes[: len(ends)], phi, direct, seed)
    else:
        with torch.no_grad(), NoForeignWrites("outer"):
            value = outer(tree, phi)
            first = FirstPass()
            first.check_same("outer", 0, value)
            first.check_same("outer", 0, outer(tree, phi))
        # φ moves in both arguments, so that an outer loss without a graph has its explicit part too
        direct = zeros_like(phi_leaves)
        through, details, curvature = method.along(follow, [value], [torch.ones_like(value)], phi, None, seed)
    # the second call costs little beside many directions; with few, only suspicious differences pay for it
    if method.directions >= _REPEAT_EVERY / 2 or curvature > _RECHECK_ABOVE:
        refuse_other_values("solve(phi)", tree, check_solution(problem.solve(phi), tree))
    refuse_bend("ZerothOrder.step", method.step, curvature)
    state = State([leaf.detach() for leaf in ends], ())
    return Estimate(through=through, direct=direct, value=value.detach(), state=state, details=details), tree


def _flat(state: State) -> Vector:
    """What the outer loss takes of a state: θ and the loss along the run."""
    return [*state.theta, *state.path]


def _square(parts: Iterable[Tensor]) -> float:
    """Sum of squares over all leaves; 0 where it is not finite, since that direction is masked anyway."""
    total = sum(float(torch.linalg.vector_norm(part)) ** 2 for part in parts)
    return total if math.isfinite(total) else 0.0
