"""Forward-mode unrolling: exact along every coordinate, or unbiased along a few random directions, (FG)²U."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.hypergrad.estimate import Estimate
from sparing.hypergrad.forward_mode.directions import Law, Rademacher
from sparing.hypergrad.forward_mode.guided import build_frame, guided_estimate
from sparing.hypergrad.forward_mode.sampled import (
    Directions,
    combine,
    combine_with_control,
    confidence,
    draw_directions,
    exponent,
    masked_warning,
)
from sparing.hypergrad.forward_mode.sweep import Sweep, sweep
from sparing.hypergrad.inner.repeatability import FirstPass
from sparing.hypergrad.inner.unroll import Unroll
from sparing.hypergrad.settings import require_count, require_law
from sparing.hypergrad.spread import Spread
from sparing.hypergrad.trees import Tree, leaves, ravel, size, unravel
from sparing.seeds import number

# Growth of ‖y_t‖ over the second half of a run above which a report warns of chaos.
CHAOTIC = 1e3


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Exact, by one tangent for each of the N elements of φ (or n of ψ); memory constant in T (FGU).

    Source: Shen et al. 2024, eq. 4.
    """

    chunk: int | None = None
    """Tangents carried through the run together (count); None for all."""

    def __post_init__(self) -> None:
        if self.chunk is not None:
            require_count("chunk", self.chunk, "tangents are counted")

    def __str__(self) -> str:
        return "forward"

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The exact hypergradient."""
        like, count = ravel(psi), size(psi)

        def basis(numbers: Sequence[int]) -> Tensor:
            rows = torch.zeros(len(numbers), count, dtype=like.dtype, device=like.device)
            rows[range(len(numbers)), list(numbers)] = 1
            return rows

        swept = sweep(unroll, psi, phi, basis, range(count), chunk=self.chunk)
        through = leaves(unravel(swept.weights, psi))
        details = {"growth": swept.growth, "exponent": exponent(swept.growth)}
        return replace(swept.finish, through=through, details=details)


@dataclass(frozen=True, kw_only=True)
class ForwardGradient:
    """(FG)²U: unbiased, ĝ = (1/b) Σ (∇h·v_i) v_i, in memory constant in T and linear in the chunk.

    The direct part ∂f/∂φ is not sampled but added exactly, by the one backward pass through the outer loss that also
    replaces b forward passes through it. Under Rademacher directions the rest has the relative error (N − 1)/b.

    Source: Shen et al. 2024, eq. 8–10, Algorithm 1, Lemma 3.1.
    """

    directions: int = 16
    """b (count)."""
    law: Law = Rademacher()  # noqa: RUF009  # a frozen value
    """Law of the directions; guides replace it by an orthonormal frame."""
    chunk: int | None = None
    """Directions carried through the run together (count): memory is linear in it; None for all b. The primal run is
    repeated for each chunk."""
    width: int | None = None
    """Directions that pass through one step together (count): bounds the activations; None for the chunk."""
    guides: tuple[Any, ...] = ()
    """Guesses of the gradient, methods or trees like ψ: one direction each, the others orthogonal to them. The report
    then holds an audit of each guess."""
    tail: int = 0
    """Last steps s that are reversed exactly (count); only the head is sampled."""
    control: Tree | None = None
    """Control variate h, a tree like ψ, usually ``result.control`` of the step before; zeros to begin with."""
    shrink: bool = False
    """Whether the sampled part is scaled by 1/(1 + relative error): smallest mean squared error, no longer unbiased.
    Not with guides or a control variate, whose error is different."""
    spread: Spread | None = None
    """Processes to share the directions with."""

    def __post_init__(self) -> None:
        for name in ("directions", "chunk", "width"):
            value = getattr(self, name)
            if value is not None or name == "directions":
                require_count(name, value, "directions are counted")
        require_count("tail", self.tail, "steps are counted", least=0)
        require_law(self.law)
        if self.guides and self.control is not None:
            raise UserError("control", got="guides too", why="each replaces the other", do="pass one; h can be a guide")
        if self.shrink and (self.guides or self.control is not None):
            raise UserError(
                "shrink", got=f"True beside {'guides' if self.guides else 'control'}",
                why="it undoes the error of plain directions, and what is known already has none",
                do="pass one of them",
            )  # fmt: skip

    def __str__(self) -> str:
        extras = [("guided", self.guides), (f"tail {self.tail}", self.tail), ("control", self.control is not None)]
        return ", ".join([f"(FG)²U b={self.directions}", *(name for name, used in extras if used)])

    def estimate(self, unroll: Unroll, psi: Tree, phi: Tree) -> Estimate:
        """The unbiased estimate."""
        seed = number(unroll.seed, "directions")
        if self.guides or self.control is not None:
            name = "guides" if self.guides else "control"
            dtype, why = ravel(psi).dtype, "small systems of equations are solved, in more than 16 bits"
            require(dtype.itemsize >= 4, name, f"φ of {dtype}", why, f"give φ in float32, or omit the {name}")
        if not self.guides:
            draw = draw_directions(self.law, self.directions, psi, seed)
            swept, weights = self._sweep(unroll, psi, phi, draw.rows)
            return self.assembled(unroll, psi, draw, swept, weights)
        frame = build_frame([_guess(guide, unroll, psi, phi) for guide in self.guides], self.directions, seed)
        swept, weights = self._sweep(unroll, psi, phi, lambda numbers: frame.rows[list(numbers)])
        guided = guided_estimate(frame, weights)
        known = _known(unroll, swept).to(guided.grad)
        names = [str(guide) if hasattr(guide, "estimate") else "given" for guide in self.guides]
        # ‖k + g‖² with the cross term estimated, since only ĝ is known of g
        whole = guided.norm_squared + float(known.square().sum() + 2 * known @ guided.grad)
        details = {
            "norm_squared": guided.norm_squared,
            "cosine": (whole / (whole + guided.error)) ** 0.5 if whole > 0 else 0.0,
            "audit": {f"{n}: {names[n]}": value for n, value in guided.audit.items()},
        }
        return self._report(swept, psi, weights, guided.grad, details, None)

    def _sweep(self, unroll: Unroll, psi: Tree, phi: Tree, make_rows: Any) -> tuple[Sweep, Tensor]:
        """The sweep of this rank's directions, and the weights of all ranks' directions."""
        numbers = self.spread.owned(self.directions) if self.spread else range(self.directions)
        tail = min(self.tail, unroll.steps)
        swept = sweep(unroll, psi, phi, make_rows, numbers, chunk=self.chunk, width=self.width, tail=tail)
        if self.spread is None:
            return swept, swept.weights
        run = (unroll.first_pass or FirstPass()).signature(f"{self.directions} directions of {self.law}", unroll.seed)
        return swept, self.spread.exchange(swept.weights, self.directions, run)

    def assembled(self, unroll: Unroll, psi: Tree, draw: Directions, swept: Sweep, weights: Tensor) -> Estimate:
        """Turn the weights of all directions into the estimate and its report.

        Args:
            unroll: The inner run.
            psi: φ or ψ(φ).
            draw: The directions.
            swept: Exact part and end of the run.
            weights: Weights of all directions, shape (b,).

        Returns:
            Both parts of the hypergradient.
        """
        control = None
        known = _known(unroll, swept).to(weights)
        grad, cross = combine(draw, weights, known)
        if self.control is not None:
            grad, control = combine_with_control(draw, weights, _vector("control", self.control, draw.size).to(weights))
        if self.shrink:
            # the minimizer of E‖cĝ − g‖² is c = 1/(1 + relative error)
            left = max(int(torch.isfinite(weights).sum()), 1)
            grad = grad / (1 + draw.law.excess(left, draw.size))
        return self._report(swept, psi, weights, grad, confidence(draw, weights, known, cross), control)

    def _report(
        self, swept: Sweep, psi: Tree, weights: Tensor, grad: Tensor, details: dict[str, Any], control: Tensor | None
    ) -> Estimate:
        """The estimate with its warnings and the fields that all kinds of directions report."""
        masked = int((~torch.isfinite(weights)).sum())
        slope = exponent(swept.growth)
        warnings = []
        if masked:
            warnings.append(masked_warning(masked, self.directions))
        if slope is not None and slope * len(swept.growth) / 2 > torch.tensor(CHAOTIC).log().item():
            warnings.append(f"‖y_t‖ grows by {slope:.2g} nat a step: the run is chaotic, lower the inner rate")
        sampled = {"directions": self.directions, "masked": masked, "weights": weights, "growth": swept.growth}
        return replace(
            swept.finish,
            through=[part + known for part, known in zip(leaves(unravel(grad, psi)), swept.known, strict=True)],
            details=sampled | details | {"exponent": slope, "warnings": tuple(warnings)},
            control=None if control is None else leaves(unravel(control, psi)),
        )


def _known(unroll: Unroll, swept: Sweep) -> Tensor:
    """The exact part in the space of the directions, shape (N,)."""
    # with a bottleneck, directions live in the space of ψ and the direct part in that of φ
    tail = ravel(swept.known)
    return tail if unroll.problem.through else tail + ravel(swept.finish.direct)


def _guess(guide: Any, unroll: Unroll, psi: Tree, phi: Tree) -> Tensor:
    """A guess as a vector of shape (N,): a tree as it is, a method's through-part as it estimates it."""
    if hasattr(guide, "estimate"):
        # Beyond its first steps a method's run is compared with itself only. Its kernels are not those of the sweep,
        # and in a chaotic run the two differ by more than rounding; a guess is allowed to be of any run.
        sweeps, guides = unroll.first_pass or FirstPass(), FirstPass()
        guides.adopt_early_losses(sweeps)
        guess = ravel(guide.estimate(replace(unroll, first_pass=guides), psi, phi).through)
        guides.compare_pending()
        sweeps.adopt_early_losses(guides)
        return guess
    return _vector("guides", guide, size(psi)).to(ravel(psi))


def _vector(name: str, tree: Tree, count: int) -> Tensor:
    """A tree of as many elements as ψ, as a vector."""
    if size(tree) != count:
        raise UserError(
            name, got=f"{size(tree)} elements", why=f"φ (or ψ) has {count}", do="pass a tree of the same shapes"
        )
    return ravel(tree)
