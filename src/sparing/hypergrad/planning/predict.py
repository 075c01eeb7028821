"""Predicted cost of a hypergradient: bytes on fake tensors, work in gradient steps, expected cosine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from sparing.errors import UserError
from sparing.hypergrad.checkpointed import Checkpointed, work
from sparing.hypergrad.estimate import Method
from sparing.hypergrad.forward import Forward, ForwardGradient
from sparing.hypergrad.forward_mode.directions import Gaussian, Law, Orthonormal, Rademacher, Sphere
from sparing.hypergrad.forward_mode.sampled import Directions, combine
from sparing.hypergrad.forward_mode.sweep import carry_tangents
from sparing.hypergrad.implicit import (
    ConjugateGradient,
    FiniteDifference,
    HessianFree,
    Neumann,
    SecondDerivatives,
    Vector,
    add_scaled,
    implicit_estimate,
    mixed_difference,
)
from sparing.hypergrad.inner.checks import PIECE, refuse_inference_mode
from sparing.hypergrad.inner.offload import Store
from sparing.hypergrad.inner.unroll import Unroll
from sparing.hypergrad.problem import Bilevel
from sparing.hypergrad.reverse import Reverse, Truncated, pullback
from sparing.hypergrad.trees import Tree, add, bytes_of, leaves, ravel, size, sum_dtype, unravel, zeros_like
from sparing.hypergrad.zeroth import ZerothOrder
from sparing.memory import Ledger

# Gradient steps of a run that its pieces take. By ``benchmarks.hypergrad_prices`` they are up to half as many on a
# perceptron and 1.5 to 2.3 times as many on a ConvNet and a small GPT-2; ``choose`` times a pull and scales by it.
PULL = 2.0
"""Building the graph of a step and pulling through it."""
_TANGENTS = ((1, 1.7), (2, 1.4), (4, 1.3), (1 << 62, 1.2))  # directions at once -> of each, beside the primal step
PRODUCT = 1.0
"""A product with the inner Hessian."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Predicted cost of a method."""

    method: Method
    bytes: int | None
    """Peak of live tensors beside problem and φ (B); None where it is not known, as of a black box."""
    offloaded: int | None = None
    """Most that lies in main memory or in a file at once (B); None where nothing is to be offloaded."""
    gradient_steps: float
    """Work, in inner gradient steps, of a black box in solves (count)."""
    plain_steps: float = 0.0
    """Those of them that are steps, or solves, of a run without derivatives of it (count)."""
    exact: bool
    """Whether the result is the gradient of the run itself."""
    cosine: float | None
    """Expected cosine to it; None for a bias that nobody knows beforehand."""


def predict(problem: Bilevel, phi: Tree, method: Method, *, seed: int = 0) -> Price:
    """Predict the cost of a hypergradient without running it.

    The bytes are those of the method's own code on fake tensors, for two or three steps and directions, extrapolated
    linearly; so losses that read values (``.item()``, branches on data) are not supported.

    Args:
        problem: The two-level problem.
        phi: Tree of floating tensors; only shapes matter.
        method: The method.
        seed: Seed of batches, which are drawn for their shapes.

    Returns:
        The price.

    Raises:
        UserError: If nothing is known about the method.
    """
    return prices(problem, phi, [method], seed=seed)[0]


def prices(problem: Bilevel, phi: Tree, methods: Sequence[Method], *, seed: int = 0) -> list[Price]:
    """Price several methods; what they share is measured once."""
    refuse_inference_mode("predict")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tree_map(mode.from_tensor, phi)
        psi = problem.through(fake) if problem.through else fake
        psi = tree_map(lambda leaf: leaf.detach(), psi)
        start = tree_map(mode.from_tensor, problem.start(psi, seed)) if not callable(problem.init) else None
        # what is priced is this process
        problem = replace(problem, group=None, **({} if start is None else {"init": start}))
        # fake generators do not move, so whether the loss draws is not seen: the dearer case is priced
        meter = _PeakMeter(Unroll(problem, seed, problem.start(psi, seed), draws=True), psi, fake)
        return [_price(meter, method) for method in methods]


class _Likeness(Directions):
    """Directions in bytes alone: some laws read numbers, or keep a frame, which must not be fake."""

    def rows(self, numbers: Sequence[int]) -> Tensor:
        """As many rows, and what making them takes."""
        if isinstance(self.law, Rademacher | Gaussian | Sphere):
            return super().rows(numbers)
        if isinstance(self.law, Orthonormal):  # all of them by one decomposition in double precision
            made = torch.empty(4, self.count, self.size, dtype=torch.float64)
            del made
        return torch.empty(len(numbers), self.size, dtype=ravel(self.like).dtype)


@dataclass(frozen=True)
class _PeakMeter:
    """Peaks (bytes) of pieces of a run on fake tensors, each measured once."""

    unroll: Unroll
    psi: Tree
    phi: Tree
    peaks: dict[tuple[object, ...], int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """T."""
        return self.unroll.steps

    @property
    def theta(self) -> int:
        """Bytes of θ."""
        return bytes_of(self.unroll.start(self.psi).theta)

    @property
    def held(self) -> int:
        """Bytes of a state: θ and moments."""
        return bytes_of(self.unroll.start(self.psi))

    def peak(self, key: tuple[object, ...], run: Callable[[], object]) -> int:
        """Most bytes alive at once in a piece of a run."""
        if key not in self.peaks:
            with Ledger(nn.Module()) as ledger:
                run()
            self.peaks[key] = ledger.peak.total
        return self.peaks[key]

    def pullback(self, steps: int) -> int:
        """Peak of a backward pass through the first ``steps`` steps and the outer loss."""

        def at(count: int) -> int:
            start = self.unroll.start
            return self.peak(
                ("pull", count), lambda: pullback(self.unroll, start(self.psi), self.psi, 0, count, None, self.phi)
            )

        return _extrapolate(at, steps, (0, 1, 2, 3, 4))

    def offloaded(self, steps: int) -> tuple[int, int]:
        """The same where the graph of all steps but one lies in a store: the peak, and the bytes in the store."""
        stored: dict[int, int] = {}

        def at(count: int) -> int:
            def run() -> None:
                store, start = Store(), self.unroll.start(self.psi)
                pullback(self.unroll, start, self.psi, 0, count, None, self.phi, store)
                stored[count] = store.peak

            return self.peak(("offloaded", count), run)

        points = (1, 2, 3, 4)
        peak = _extrapolate(at, steps, points)
        return peak, _extrapolate(lambda count: stored[count] if at(count) else 0, steps, points)

    def stretch(self, steps: int, *, last: bool) -> int:
        """Peak of a backward pass through a stretch whose first state was loaded; ``last``: and the outer loss."""

        def at(count: int) -> int:
            def run() -> None:
                state = tree_map(torch.clone, self.unroll.start(self.psi))
                through = [torch.zeros_like(leaf, dtype=sum_dtype(leaf)) for leaf in leaves(self.psi)]
                cotangent = None if last else zeros_like(state)
                # a very short run has no step before its stretch
                first = min(1, self.steps - count)
                pullback(self.unroll, state, self.psi, first, first + count, cotangent, self.phi)
                del through

            return self.peak(("stretch", last, count), run)

        # between stretches the end of the run is kept, and what φ adds directly
        return _extrapolate(at, steps, (1, 2, 3)) + (0 if last else self.held + bytes_of(self.phi))

    def carry(self, count: int, width: int) -> int:
        """Peak of ``count`` tangents carried through two steps, directions included."""

        def run() -> None:
            rows = unravel(torch.ones(count, size(self.psi), dtype=ravel(self.psi).dtype), self.psi)
            carry_tangents(self.unroll, self.psi, rows, min(2, self.steps), width)

        return self.peak(("carry", count, width), run)

    def moved(self, method: ZerothOrder) -> int:
        """Peak of two plain runs at ψ ± µv, the direction included."""

        def run() -> None:
            row = _Likeness(method.law, method.directions, size(self.psi), 0, self.psi).rows([0])[0]
            ends = [add(self.psi, unravel(sign * method.step * row, self.psi)) for sign in (1, -1)]
            # φ ± µv is compared with µv in double precision, in pieces
            check = torch.empty(4 * min(size(self.psi), PIECE), dtype=torch.float64)
            del check
            held = [self.unroll.run(end, last=min(2, self.steps)).theta for end in ends]
            del held

        return self.peak(("moved", method.law, method.directions), run)

    def assembly(self, law: Law, count: int) -> int:
        """Peak of summing ``count`` directions by their weights, which makes them anew."""
        numbers, dtype = size(self.psi), ravel(self.psi).dtype

        def run() -> None:
            draw = _Likeness(law, count, numbers, 0, self.psi)
            combine(draw, torch.ones(count, dtype=dtype), torch.zeros(numbers, dtype=dtype))

        return self.peak(("assembly", law, count), run)

    def plain(self) -> int:
        """Peak of plain steps."""
        return self.peak(("plain",), lambda: self.unroll.run(self.psi, last=min(2, self.steps)))


def _sum_bytes(psi: Tree) -> int:
    """Bytes of what the steps add to ψ: 16 bits are summed in 32."""
    return sum(leaf.numel() * sum_dtype(leaf).itemsize for leaf in leaves(psi))


_EXACT: dict[str, Any] = {"exact": True, "cosine": 1.0}


def _price(meter: _PeakMeter, method: Any) -> Price:
    steps = meter.steps
    if isinstance(method, Reverse) and method.offload is not None:
        peak, stored = meter.offloaded(steps)
        work_steps = PULL * steps
        return Price(method=method, bytes=peak, offloaded=stored, gradient_steps=work_steps, **_EXACT)
    if isinstance(method, Reverse):
        return Price(method=method, bytes=meter.pullback(steps), gradient_steps=PULL * steps, **_EXACT)
    if isinstance(method, Truncated):
        reach = min(method.steps, steps)
        work_steps = steps - reach + PULL * reach
        peak = meter.pullback(reach) + meter.theta
        exact, plain = reach == steps, steps - reach
        return Price(method=method, bytes=peak, gradient_steps=work_steps, plain_steps=plain, exact=exact, cosine=None)
    if isinstance(method, Checkpointed):
        return _replay_price(meter, method)
    if isinstance(method, Forward | ForwardGradient):
        return _forward_price(meter, method)
    if isinstance(method, ZerothOrder):
        work_steps = (2 * method.directions + 1.0) * steps
        cosine = method.law.cosine(method.directions, size(meter.psi))
        peak = meter.moved(method) + meter.held + meter.theta + bytes_of(meter.phi)
        peak = max(peak, meter.assembly(method.law, method.directions) + meter.held + bytes_of(meter.phi))
        return Price(
            method=method, bytes=peak, gradient_steps=work_steps, plain_steps=work_steps, exact=False, cosine=cosine
        )
    return _implicit_price(meter, method)


def _replay_price(meter: _PeakMeter, method: Checkpointed) -> Price:
    """Snapshots beside the graph of one unit; in a longer run an old and a new cotangent besides."""
    leaf, states = method.schedule(meter.unroll, meter.psi, meter.unroll.start(meter.psi))
    units = -(-meter.steps // leaf)
    kept = states if states >= units - 1 else states + 2
    stored = None
    peak = meter.pullback(min(leaf, meter.steps)) + kept * meter.held + 2 * _sum_bytes(meter.psi)
    if method.offload is not None:
        # the start of the run lies in the store too
        stored = (min(states, units - 1) + 1) * meter.held
        peak = max(
            meter.stretch(min(leaf, meter.steps), last=last) for last in ((True, False) if units > 1 else (True,))
        )
    plain = leaf * work(units, states)
    work_steps = plain + PULL * meter.steps
    return Price(method=method, bytes=peak, offloaded=stored, gradient_steps=work_steps, plain_steps=plain, **_EXACT)


def direction(width: int) -> float:
    """Gradient steps that each of so many directions at once takes."""
    return next(rate for most, rate in _TANGENTS if width <= most)


def _forward_price(meter: _PeakMeter, method: Forward | ForwardGradient) -> Price:
    """Tangents of one chunk through one step, and the outer loss reversed once (with the tail, if there is one)."""
    if isinstance(method, Forward):
        exact, count, max_width, tail = True, size(meter.psi), None, 0
    else:
        exact, count, max_width, tail = False, method.directions, method.width, min(method.tail, meter.steps)
    chunk = min(method.chunk or count, count)
    width = min(max_width or chunk, chunk)
    # what the tail and the outer loss add to ψ and φ
    known = _sum_bytes(meter.psi) + bytes_of(meter.phi)
    # two pieces hold the activations of one and the tangents of both; each further direction adds only its tangent
    measured = chunk if width == chunk else min(2 * width, chunk)
    # with few directions the peak is that of the gradient's own graph, so the line begins where tangents outweigh it
    points = (1, 2, 3, 4, 6, 8, 12, 16) if width == chunk else (measured,)
    carry = _extrapolate(lambda b: meter.carry(b, min(width, b)), measured, points)
    if width < chunk:
        carry += (chunk - measured) * (bytes_of(meter.psi) + meter.held)
    if chunk < count:
        # kept from the first chunk on: the cotangent and the end of the run
        carry += 2 * meter.held + known
    back = meter.pullback(tail) + chunk * (meter.held + bytes_of(meter.psi))
    # ‖y_t‖ of each direction after each step, of which two steps were measured
    norms = (meter.steps - tail) * count * ravel(meter.psi).element_size()
    carry += max(norms - 2 * measured * ravel(meter.psi).element_size(), 0)
    back += norms
    plain = (meter.steps - tail) * -(-count // chunk)
    work_steps = plain + (meter.steps - tail) * direction(width) * count + PULL * tail
    cosine = 1.0 if isinstance(method, Forward) else method.law.cosine(count, size(meter.psi))
    peak = max(carry, back)
    if isinstance(method, ForwardGradient):
        one = bytes_of(meter.psi)
        summed = meter.assembly(method.law, count)
        if method.control is not None:
            summed = (2 * count + 3) * one  # all directions, and those that are finite
        elif method.guides:
            # a frame is kept through the run; while it is made there are its draws in double precision as well
            peak, summed = peak + (count + len(method.guides)) * one, (4 * count - 1) * one
        peak = max(peak, summed + meter.held + known)
    return Price(method=method, bytes=peak, gradient_steps=work_steps, plain_steps=plain, exact=exact, cosine=cosine)


def _implicit_price(meter: _PeakMeter, method: Any) -> Price:
    """A run of plain steps, then the vectors of the solver beside the graph of one inner gradient."""
    unroll, psi, phi = meter.unroll, meter.psi, meter.phi

    def differenced() -> None:
        state = unroll.run(psi, last=min(2, unroll.steps))
        _, cotangent, direct = unroll.outer_gradients(state, phi)
        d = cotangent.theta
        mixed_difference(unroll, state, psi, d, 1.0, lambda along: add_scaled(state.theta, along, d))
        del direct  # held until then

    if not isinstance(method, FiniteDifference | HessianFree | Neumann | ConjugateGradient):
        raise UserError(
            "method",
            got=method,
            why="nothing is known of its price",
            do="pass one of the methods of docs/api/hypergrad.md",
        )
    products = method.terms + method.check if isinstance(method, Neumann) else getattr(method, "terms", 0)
    if isinstance(method, FiniteDifference):
        peak = meter.peak(("differenced",), differenced)
    else:
        inverse = _scaled if isinstance(method, HessianFree) else _iterated
        # plain steps hold the same from the second on, so two stand for T
        short = replace(unroll, problem=replace(unroll.problem, steps=min(2, unroll.steps)))
        peak = meter.peak(("solved", inverse), lambda: implicit_estimate(short, psi, phi, inverse))
    work_steps = unroll.steps + PULL + PRODUCT * products
    return Price(
        method=method, bytes=peak, gradient_steps=work_steps, plain_steps=unroll.steps, exact=False, cosine=None
    )


def _scaled(point: SecondDerivatives, d: Vector) -> tuple[Vector, dict[str, object]]:
    return [1.0 * part for part in d], {}


def _iterated(point: SecondDerivatives, d: Vector) -> tuple[Vector, dict[str, object]]:
    """Stands for an iterative solver: a sum, a direction, the solution, and the product that checks it."""
    held = [[1.0 * part for part in d] for _ in range(3)]
    product = point.hessian(held[-1])
    residual = [a - b for a, b in zip(d, product, strict=True)]
    del product, residual
    return held[-1], {}


def _extrapolate(at: Callable[[int], int], where: int, points: tuple[int, ...]) -> int:
    """``at(where)``, where it is not among ``points`` by the line through the last two of them."""
    known = [point for point in points if point <= where]
    if where in points or len(points) == 1:
        return at(where if where in points else points[0])
    last, before = known[-1], known[-2]
    high, low = at(last), at(before)
    return high + (where - last) * (high - low) // (last - before)
