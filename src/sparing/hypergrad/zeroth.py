"""Zeroth-order hypergradients: the inner run is only ever run, never differentiated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.hypergrad.checks import check_solution
from sparing.hypergrad.directions import Law, Rademacher
from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.problem import BlackBox, scalar
from sparing.hypergrad.sampled import combined, confidence, draw_of, masked_warning
from sparing.hypergrad.trees import Tree, added, inner_product, leaves, ravel, rebuilt, unravel
from sparing.hypergrad.unroll import State, Unroll, pulled
from sparing.seeds import number


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
    """Whether the outer loss is differentiated; else its values are differenced too."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        if self.directions < 1:
            raise UserError("directions", got=self.directions, why="directions are counted", do="pass at least 1")
        if not self.step > 0:
            raise UserError("step", got=self.step, why="a difference needs a distance", do="pass step > 0")

    def __str__(self) -> str:
        """Name for tables."""
        return f"zeroth order b={self.directions}"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The estimate, from 2b runs beside the one at φ."""
        state = unroll.run(psi)
        value, slopes, direct = unroll.outer_slopes(state, phi)
        if self.exact_outer:
            ends, slope = lambda at: unroll.run(at).theta, slopes
        else:
            ends, slope = lambda at: [unroll.outer(unroll.run(at), phi)], [torch.ones_like(value)]
        through, facts = self.along(ends, slope, psi, direct if unroll.problem.through is None else None, unroll.seed)
        return Estimate(through=through, direct=direct, value=value, state=state, facts=facts)

    def along(
        self,
        solve: Callable[[Tree], list[Tensor]],
        slopes: list[Tensor],
        psi: Tree,
        direct: list[Tensor] | None,
        seed: int,
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """The sampled part: slopes · (solve(ψ + µv) − solve(ψ − µv))/2µ along each direction.

        Args:
            solve: ψ -> leaves of u.
            slopes: ∂f/∂u, as those leaves.
            psi: Where.
            direct: What is known exactly in the same space, if anything.
            seed: Seed of the directions.

        Returns:
            Leaves as of ψ, and the facts of the draw.
        """
        draw = draw_of(self.law, self.directions, psi, number(seed, "directions"))
        weights = []
        for place in range(self.directions):
            move = unravel(self.step * draw.rows([place])[0], psi)
            back = unravel(-self.step * draw.rows([place])[0], psi)
            with torch.no_grad():
                pairs = zip(solve(added(psi, move)), solve(added(psi, back)), strict=True)
                weights.append(inner_product(slopes, [(up - down) / (2 * self.step) for up, down in pairs]))
        found = torch.stack(weights).to(ravel(psi))
        known = ravel(direct).to(found) if direct else torch.zeros_like(ravel(psi))
        grad, cross = combined(draw, found, known)
        sure = confidence(draw, found, known, cross)
        masked = int((~torch.isfinite(found)).sum())
        facts = {
            "directions": self.directions, "weights": found, "masked": masked,
            "norm_squared": sure.norm_squared, "norm_squared_interval": sure.interval, "cosine": sure.cosine,
            "warnings": (masked_warning(masked, self.directions),) if masked else (),
        }  # fmt: skip
        return leaves(unravel(grad, psi)), facts


def black_box(problem: BlackBox, phi: Tree, method: ZerothOrder, seed: int) -> tuple[Estimate, Tree]:
    """The hypergradient around a solver that cannot be differentiated.

    Args:
        problem: A ``BlackBox``.
        phi: φ, detached.
        method: Directions and step.
        seed: Seed of the directions.

    Returns:
        Both parts, and u.

    Raises:
        UserError: If ``solve`` returns no tree of floating tensors, or values at φ that are not finite.
    """
    tree = check_solution(problem.solve(phi))

    def solve(at: Tree) -> list[Tensor]:  # values that are not finite lose their direction only
        return leaves(check_solution(problem.solve(at), tree))

    with torch.enable_grad():
        ends = [leaf.detach().requires_grad_() for leaf in leaves(tree)]
        given = [leaf.detach().requires_grad_() for leaf in leaves(phi)]
        value = scalar("outer", problem.outer(rebuilt(tree, ends), rebuilt(phi, given)))
    slopes = pulled(value, [*ends, *given])
    direct = slopes[len(ends) :]
    through, facts = method.along(solve, slopes[: len(ends)], phi, direct, seed)
    state = State([leaf.detach() for leaf in ends], ())
    return Estimate(through=through, direct=direct, value=value.detach(), state=state, facts=facts), tree
