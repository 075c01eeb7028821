"""The price of a hypergradient before it is paid: bytes on fake tensors, work in gradient steps, expected cosine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from sparing.errors import UserError
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.estimate import Method
from sparing.hypergrad.forward import Forward, ForwardGradient
from sparing.hypergrad.implicit import (
    ConjugateGradient,
    FiniteDifference,
    HessianFree,
    Neumann,
    Stationary,
    Vector,
    moved,
    slopes_of_psi,
    solved,
)
from sparing.hypergrad.problem import Bilevel
from sparing.hypergrad.replay import work
from sparing.hypergrad.reverse import Reverse, Truncated, flat, pull
from sparing.hypergrad.sweep import carried
from sparing.hypergrad.trees import Tree, bytes_of, ravel, size, unravel
from sparing.hypergrad.unroll import Unroll
from sparing.hypergrad.zeroth import ZerothOrder
from sparing.memory import Ledger

_PULL = 2.1
"""Gradient steps that building the graph of a step and pulling through it take (measured on an MLP and a ConvNet)."""
_TANGENTS = ((1, 2.2), (4, 1.5), (16, 1.35), (1 << 62, 1.3))
"""Directions at once -> gradient steps a direction, beside the one of the primal (measured on an MLP)."""
_PRODUCT = 2.0
"""Gradient steps that a product with the inner Hessian takes."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a method will take."""

    method: Method
    """The method."""
    bytes: int
    """Peak of live tensors beside problem and φ (B)."""
    gradient_steps: float
    """Work, in inner gradient steps (count)."""
    exact: bool
    """Whether the result is the gradient of the run itself."""
    cosine: float | None
    """Expected cosine to it; None for a bias that nobody knows beforehand."""


def predict(problem: Bilevel, phi: Tree, method: Method, *, seed: int = 0) -> Price:
    """Price a hypergradient without running it.

    The bytes are those of the method's own code on fake tensors, for two or three steps and directions, carried on by
    the line through them; so losses that read values (``.item()``, branches on data) cannot be priced.

    Args:
        problem: The two-level problem.
        phi: Tree of floating tensors; only shapes matter.
        method: How.
        seed: Seed of batches, asked for their shapes.

    Returns:
        The price.

    Raises:
        UserError: If nothing is known about the method.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = tree_map(mode.from_tensor, phi)
        psi = problem.through(fake) if problem.through else fake
        psi = tree_map(lambda leaf: leaf.detach(), psi)
        start = tree_map(mode.from_tensor, problem.start(psi, seed)) if not callable(problem.init) else None
        made = problem if start is None else replace(problem, init=start)
        unroll = Unroll(made, seed, made.start(psi, seed))
        return _price(unroll, psi, fake, method)


def _price(unroll: Unroll, psi: Tree, phi: Tree, method: Any) -> Price:
    steps = unroll.steps
    held = bytes_of(flat(unroll.start(psi)))
    if isinstance(method, Reverse):
        return Price(method=method, bytes=_pull_bytes(unroll, psi, phi, steps), gradient_steps=_PULL * steps, **_EXACT)
    if isinstance(method, Truncated):
        reach = min(method.steps, steps)
        bytes_ = _pull_bytes(unroll, psi, phi, reach) + bytes_of(unroll.start(psi).theta)
        done = steps - reach + _PULL * reach
        return Price(method=method, bytes=bytes_, gradient_steps=done, exact=reach == steps, cosine=None)
    if isinstance(method, Checkpointed):
        leaf, states = method.schedule(unroll, psi, unroll.start(psi))
        units = -(-steps // leaf)
        kept = (
            states if states >= units - 1 else states + 2
        )  # in a longer run a cotangent comes in and another goes out besides
        bytes_ = _pull_bytes(unroll, psi, phi, min(leaf, steps)) + kept * held + 2 * bytes_of(psi)
        done = leaf * work(units, states) + _PULL * steps
        return Price(method=method, bytes=bytes_, gradient_steps=done, **_EXACT)
    if isinstance(method, Forward | ForwardGradient):
        return _forward_price(unroll, psi, phi, method)
    if isinstance(method, ZerothOrder):
        done = (2 * method.directions + 1.0) * steps
        cosine = method.law.cosine(method.directions, size(psi))
        room = _plain_bytes(unroll, psi) + held + 2 * bytes_of(unroll.start(psi).theta)
        return Price(method=method, bytes=room, gradient_steps=done, exact=False, cosine=cosine)
    return _implicit_price(unroll, psi, phi, method)


_EXACT: dict[str, Any] = {"exact": True, "cosine": 1.0}


def _forward_price(unroll: Unroll, psi: Tree, phi: Tree, method: Forward | ForwardGradient) -> Price:
    """Tangents of one chunk through one step, and the outer loss reversed once (with the tail, if there is one)."""
    whole = isinstance(method, Forward)
    count = size(psi) if isinstance(method, Forward) else method.directions
    chunk = min(method.chunk or count, count)
    width = chunk if isinstance(method, Forward) else min(method.width or chunk, chunk)
    tail = 0 if isinstance(method, Forward) else min(method.tail, unroll.steps)
    measured = chunk if width == chunk else min(2 * width, chunk)  # two pieces show what any number of them holds
    points = (1, 2, 3) if width == chunk else (measured,)
    carry = _line(lambda b: _carry_bytes(unroll, psi, b, min(width, b)), measured, points)
    held = bytes_of(flat(unroll.start(psi)))
    if width < chunk:
        carry += (chunk - measured) * (bytes_of(psi) + held)
    if chunk < count:
        carry += 2 * held + bytes_of(psi)  # the first chunk leaves the cotangent and the end of the run
    back = _pull_bytes(unroll, psi, phi, tail) + chunk * (held + bytes_of(psi))
    rate = next(rate for most, rate in _TANGENTS if width <= most)
    head = unroll.steps - tail
    done = head * (-(-count // chunk) + rate * count) + _PULL * tail
    cosine = 1.0 if whole else method.law.cosine(count, size(psi))  # type: ignore[union-attr]
    return Price(method=method, bytes=max(carry, back), gradient_steps=done, exact=whole, cosine=cosine)


def _implicit_price(unroll: Unroll, psi: Tree, phi: Tree, method: Any) -> Price:
    """One step's run, then the vectors of the solver beside the graph of the slopes."""
    if isinstance(method, FiniteDifference):
        with Ledger(nn.Module()) as ledger:
            state = unroll.run(psi, last=min(2, unroll.steps))
            _, slopes, _ = unroll.outer_slopes(state, phi)
            slopes_of_psi(unroll, moved(state.theta, 1.0, slopes), psi)
        room, products = ledger.peak.total, 0
    elif isinstance(method, HessianFree | Neumann | ConjugateGradient):
        products = method.terms + method.check if isinstance(method, Neumann) else getattr(method, "terms", 0)
        with Ledger(nn.Module()) as ledger:
            solved(_shortened(unroll, 2), psi, phi, _free if isinstance(method, HessianFree) else _vectors)
        room = ledger.peak.total
    else:
        raise UserError("method", got=method, why="nothing is known of its price", do="pass a method of this room")
    done = unroll.steps + _PULL + _PRODUCT * products
    return Price(method=method, bytes=room, gradient_steps=done, exact=False, cosine=None)


def _free(place: Stationary, d: Vector) -> tuple[Vector, dict[str, object]]:
    return [1.0 * part for part in d], {}


def _vectors(place: Stationary, d: Vector) -> tuple[Vector, dict[str, object]]:
    """What an iterative solver holds at its end: a sum, a direction, the solution, and the product that checks it."""
    held = [[1.0 * part for part in d] for _ in range(3)]
    bent = place.hessian(held[-1])
    off = [a - b for a, b in zip(d, bent, strict=True)]
    del bent, off
    return held[-1], {}


def _line(at: Callable[[int], int], where: int, points: tuple[int, ...]) -> int:
    """A value at ``where`` by the line through the last two of a few points."""
    known = [point for point in points if point <= where]
    if where in points or len(points) == 1:
        return at(where if where in points else points[0])
    last, before = known[-1], known[-2]
    high, low = at(last), at(before)
    return high + (where - last) * (high - low) // (last - before)


def _shortened(unroll: Unroll, steps: int) -> Unroll:
    return replace(unroll, problem=replace(unroll.problem, steps=steps))


def _pull_bytes(unroll: Unroll, psi: Tree, phi: Tree, steps: int) -> int:
    """Peak of a backward pass through the first ``steps`` steps and the outer loss."""

    def at(count: int) -> int:
        with Ledger(nn.Module()) as ledger:
            pull(unroll, unroll.start(psi), psi, 0, count, None, phi)
        return ledger.peak.total

    return _line(at, steps, (0, 1, 2, 3, 4))


def _carry_bytes(unroll: Unroll, psi: Tree, count: int, width: int) -> int:
    """Peak of ``count`` tangents carried through two steps, directions included."""
    with Ledger(nn.Module()) as ledger:
        rows = unravel(torch.ones(count, size(psi), dtype=ravel(psi).dtype), psi)
        carried(unroll, psi, rows, min(2, unroll.steps), width)
    return ledger.peak.total


def _plain_bytes(unroll: Unroll, psi: Tree) -> int:
    """Peak of plain steps."""
    with Ledger(nn.Module()) as ledger:
        unroll.run(psi, last=min(2, unroll.steps))
    return ledger.peak.total
