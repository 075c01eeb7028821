"""Implicit hypergradients: c − d·H⁻¹·Y at the end of the run, as if it had converged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.inner.checks import refuse_lost_move
from sparing.hypergrad.inner.repeatability import refuse_once_differentiable
from sparing.hypergrad.inner.unroll import State, Unroll, inner_slopes, vjp
from sparing.hypergrad.protocol import coupled_terms
from sparing.hypergrad.settings import require_count
from sparing.hypergrad.trees import Tree, differentiable, inner_product, rebuild, zeros_like
from sparing.seeds import stream

Vector = list[Tensor]
Product = Callable[[Vector], Vector]


@dataclass(frozen=True)
class SecondDerivatives:
    """The inner gradient at θ_T with its graph: a product with H = ∂²g/∂θ² or Y = ∂²g/∂θ∂ψ is one backward pass."""

    theta: Vector  # θ_T, requiring gradients
    psi_leaves: Vector  # leaves of ψ, requiring gradients
    grads: Vector  # ∇_θ g, with what the optimizer adds to it (L2 decay), part of a graph

    def hessian(self, vector: Vector) -> Vector:
        """H·vector."""
        return vjp(self.grads, self.theta, vector, keep=True)

    def mixed(self, vector: Vector) -> Vector:
        """vector·Y."""
        return vjp(self.grads, self.psi_leaves, vector, keep=True)


def second_derivatives(unroll: Unroll, state: State, psi: Tree) -> SecondDerivatives:
    """Second derivatives of the inner loss at the end of the run, on the batch of the last step."""
    theta = differentiable(state.theta)
    psi_leaves = differentiable(psi)
    with torch.enable_grad(), unroll.at(unroll.steps - 1) as batch:
        loss = unroll.loss(theta, rebuild(psi, psi_leaves), batch)
        unroll.check_same("loss", unroll.steps, loss)
        grads = inner_slopes(loss, theta, create_graph=True)
        added = coupled_terms(unroll.problem.optimizer, theta, unroll.steps - 1, rebuild(psi, psi_leaves))
        # in here: under the caller's no_grad the sum would have no graph, and every product with H or Y be zero
        whole = grads if added is None else add_scaled(grads, 1.0, added)
    refuse_once_differentiable(grads)
    check_end_loss(unroll, state, psi)
    return SecondDerivatives(theta, psi_leaves, whole)


def refuse_path(unroll: Unroll) -> None:
    """Refuse outer losses along the run: an implicit method knows its end alone."""
    if unroll.problem.path is not None:
        raise UserError(
            "path", got="an implicit method", why="it takes the run as converged, and has no gradient of states before",
            do="use Checkpointed() or another method that unrolls",
        )  # fmt: skip


def check_end_loss(unroll: Unroll, state: State, psi: Tree) -> None:
    """Compare the loss at the end of the run, on the batch of the last step, with that of other passes."""
    theta = differentiable(state.theta)  # a loss may contain gradients itself, such as a penalty on them
    with torch.enable_grad(), unroll.at(unroll.steps - 1) as batch:
        unroll.check_same("loss", unroll.steps, unroll.loss(theta, psi, batch))


def largest_eigenvalue(product: Product, like: Vector, *, rounds: int, seed: int) -> float:
    """Largest |λ| by power iteration, from below; ``like`` gives shapes."""
    generator = stream(seed, "power")
    vector = [torch.randn(part.shape, generator=generator).to(part) for part in like]
    size = 0.0
    for _ in range(rounds):
        length = _norm(vector)
        vector = product([part / length for part in vector])
        size = _norm(vector)
        if size == 0:
            break
    return size


def _norm(vector: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in vector))


def add_scaled(vector: Vector, step: float | Tensor, along: Vector) -> Vector:
    """Vector + step·along."""
    return [a + step * b for a, b in zip(vector, along, strict=True)]


def implicit_estimate(
    unroll: Unroll, psi: Tree, phi: Tree, solve: Callable[[SecondDerivatives, Vector], tuple[Vector, dict[str, object]]]
) -> Estimate:
    """Run, solve for x ≈ H⁻¹d by ``solve``: (derivatives, d) -> x and report fields, and return −x·Y (eq. 24)."""
    refuse_path(unroll)
    state = unroll.run(psi)
    value, cotangent, direct = unroll.outer_gradients(state, phi)
    d = cotangent.theta
    del cotangent  # that of the moments is zero
    point = second_derivatives(unroll, state, psi)
    solution, details = solve(point, d)
    through = [-part for part in point.mixed(solution)]
    return Estimate(through=through, direct=direct, value=value, state=state, details=details)


@dataclass(frozen=True, kw_only=True)
class HessianFree:
    """H⁻¹ replaced by a number: −α·d·Y (T1–T2); one backward pass, biased.

    Source: Luketina et al. 2016; Shen et al. 2024, eq. 28.
    """

    scale: float = 1.0
    """α, in place of H⁻¹."""

    def __str__(self) -> str:
        return "Hessian-free"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The estimate."""
        return implicit_estimate(unroll, psi, phi, lambda point, d: ([self.scale * part for part in d], {}))


@dataclass(frozen=True, kw_only=True)
class Neumann:
    """H⁻¹ by α Σ_{k=0..K} (I − αH)^k; K products with H.

    Source: Lorraine, Vicol & Duvenaud 2020; Shen et al. 2024, eq. 25.
    """

    step: float = 0.1
    """α, below 2/λ_max."""
    terms: int = 20
    """K (count)."""
    check: int = 10
    """Power iterations that estimate λ_max before anything is summed (count); 0 trusts the step."""

    def __post_init__(self) -> None:
        require(self.step > 0, "Neumann.step", self.step, "the series needs a step", "pass step > 0")
        require_count("Neumann.terms", self.terms, "products are counted", least=0)
        require_count("Neumann.check", self.check, "iterations are counted", least=0)

    def __str__(self) -> str:
        return f"Neumann {self.terms}"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The estimate."""

        def solve(point: SecondDerivatives, d: Vector) -> tuple[Vector, dict[str, object]]:
            largest = None
            if self.check:
                largest = largest_eigenvalue(point.hessian, point.theta, rounds=self.check, seed=unroll.seed)
                if self.step * largest >= 2:
                    raise UserError(
                        "Neumann.step", got=f"{self.step:.3g}", do=f"pass step <= {1 / largest:.2g}",
                        why=f"the series diverges from 2/λ_max = {2 / largest:.3g} on",
                    )  # fmt: skip
            total, term = d, d
            for _ in range(self.terms):
                term = add_scaled(term, -self.step, point.hessian(term))
                total = add_scaled(total, 1.0, term)
            solution, length = [self.step * part for part in total], _norm(d)
            left = add_scaled(d, -1.0, point.hessian(solution))
            return solution, {"curvature": largest, "residual": _norm(left) / length if length else 0.0}

        return implicit_estimate(unroll, psi, phi, solve)


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient:
    """(H + λI)x = d by conjugate gradients; stops where H shows negative curvature, and says so.

    Source: Pedregosa 2016; Rajeswaran et al. 2019; Shen et al. 2024, Appendix B.
    """

    terms: int = 20
    """Iterations at most (count)."""
    damping: float = 1e-3
    """λ added to the diagonal of H."""
    tolerance: float = 1e-10
    """Stop at this ‖residual‖/‖d‖."""

    def __post_init__(self) -> None:
        require_count("ConjugateGradient.terms", self.terms, "iterations are counted")
        why = "it is added to the curvature"
        require(self.damping >= 0, "ConjugateGradient.damping", self.damping, why, "pass damping >= 0")

    def __str__(self) -> str:
        return f"CG {self.terms}"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The estimate."""
        return implicit_estimate(unroll, psi, phi, self._solve)

    def _solve(self, point: SecondDerivatives, d: Vector) -> tuple[Vector, dict[str, object]]:
        solution = zeros_like(d)
        residual, direction = list(d), list(d)
        square, whole = inner_product(residual, residual), _norm(d)
        warnings: tuple[str, ...] = ()
        for _ in range(self.terms):
            if float(square) ** 0.5 <= self.tolerance * whole:
                break
            product = add_scaled(point.hessian(direction), self.damping, direction)
            curve = inner_product(direction, product)
            # not `curve <= 0`: NaN must stop here as well
            if not float(curve) > 0:
                warnings = ("the inner Hessian has negative curvature: more damping, or another method",)
                break
            step = square / curve
            solution, residual = add_scaled(solution, step, direction), add_scaled(residual, -step, product)
            before, square = square, inner_product(residual, residual)
            direction = add_scaled(residual, square / before, direction)
        return solution, {"residual": _norm(residual) / whole if whole else 0.0, "warnings": warnings}


@dataclass(frozen=True, kw_only=True)
class FiniteDifference:
    """Hessian-free with d·Y by a central difference of ∇_φ g: no second derivative at all (DARTS).

    Source: Liu, Simonyan & Yang 2019, Section 2.3; its ε = 0.01/‖d‖.
    """

    scale: float = 1.0
    """α, in place of H⁻¹."""
    radius: float = 0.01
    """ε·‖d‖: how far θ_T is moved."""

    def __str__(self) -> str:
        return "finite difference"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The estimate."""
        refuse_path(unroll)
        state = unroll.run(psi)
        # twice: its own passes are at other θ, so this is what shows a loss that differs each time
        check_end_loss(unroll, state, psi)
        check_end_loss(unroll, state, psi)
        value, cotangent, direct = unroll.outer_gradients(state, phi)
        d = cotangent.theta
        del cotangent  # that of the moments is zero
        length = _norm(d)
        step = self.radius / length if length else 1.0
        moved = lambda along: self._moved(state.theta, along, d)  # noqa: E731
        mixed = mixed_difference(unroll, state, psi, d, step, moved)
        through = [-self.scale * part for part in mixed]
        return Estimate(through=through, direct=direct, value=value, state=state)

    def _moved(self, theta: Vector, step: float, d: Vector) -> Vector:
        end = add_scaled(theta, step, d)
        refuse_lost_move("FiniteDifference.radius", self.radius, theta, end, step, d)
        return end


def mixed_difference(
    unroll: Unroll, state: State, psi: Tree, d: Vector, step: float, moved: Callable[[float], Vector]
) -> Vector:
    """d·∂/∂ψ of what the optimizer follows, leaves as of ψ; ``moved``: distance along d -> θ."""
    up, down = (psi_gradient(unroll, moved(sign * step), psi) for sign in (1, -1))
    mixed = [(a - b) / (2 * step) for a, b in zip(up, down, strict=True)]
    # of what the optimizer adds to the gradient, which no loss has
    return [a + b for a, b in zip(mixed, coupled_gradient(unroll, state, psi, d), strict=True)]


def coupled_gradient(unroll: Unroll, state: State, psi: Tree, cotangent: Vector) -> Vector:
    """Cotangent · ∂/∂ψ of what the optimizer adds to ∇_θ g at the end of the run, leaves as of ψ."""
    psi_leaves = differentiable(psi)
    with torch.enable_grad():
        added = coupled_terms(unroll.problem.optimizer, state.theta, unroll.steps - 1, rebuild(psi, psi_leaves))
    return zeros_like(psi_leaves) if added is None else vjp(added, psi_leaves, cotangent)


def psi_gradient(unroll: Unroll, theta: Vector, psi: Tree) -> Vector:
    """∇_ψ g at some θ, on the batch of the last step, leaves as of ψ."""
    psi_leaves = differentiable(psi)
    with torch.enable_grad(), unroll.at(unroll.steps - 1) as batch:
        loss = unroll.loss([weight.requires_grad_() for weight in theta], rebuild(psi, psi_leaves), batch)
    return vjp(loss, psi_leaves)
