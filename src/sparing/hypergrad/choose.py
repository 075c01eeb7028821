"""The planner: which method fits the memory, what it costs, how exact it is, and why the others lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sparing.errors import UserError
from sparing.hypergrad.apply import bottleneck
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.checks import check_problem, check_tree
from sparing.hypergrad.directions import Law, Orthonormal, Rademacher
from sparing.hypergrad.estimate import Method
from sparing.hypergrad.forward import Forward, ForwardGradient
from sparing.hypergrad.implicit import HessianFree
from sparing.hypergrad.predict import Price, prices
from sparing.hypergrad.problem import Bilevel, BlackBox
from sparing.hypergrad.reverse import Reverse, Truncated
from sparing.hypergrad.trees import Tree, size
from sparing.hypergrad.zeroth import ZerothOrder
from sparing.memory import format_bytes, parse_bytes

FEW = 4
"""Elements of φ (or ψ) up to which exact forward mode is no dearer than replaying the run."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One method at its price."""

    price: Price
    """Bytes, gradient steps, expected cosine."""
    seconds: float | None
    """Predicted time (s); None for a solver that was not timed."""
    fits: bool
    """Whether the bytes are within the memory."""
    verdict: str
    """Why it is picked, or not."""

    def row(self) -> dict[str, object]:
        """Cells for a table; ``bytes`` in B, ``seconds`` in s."""
        return {
            "method": str(self.price.method), "bytes": self.price.bytes, "seconds": self.seconds,
            "gradient_steps": self.price.gradient_steps, "cosine": self.price.cosine, "fits": self.fits,
            "verdict": self.verdict,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The pick, and every option beside it."""

    pick: Method
    """The method to use."""
    why: str
    """In one sentence."""
    options: tuple[Option, ...]
    """All of them, the pick first, then by verdict and time."""

    @property
    def rows(self) -> list[dict[str, object]]:
        """One row of cells for each option."""
        return [option.row() for option in self.options]


def choose(
    problem: Bilevel | BlackBox, phi: Tree, *, memory: str | int, seconds: float | None = None, seed: int = 0
) -> Choice:
    """Pick the method for a problem and a memory.

    The rule: an exact method that fits wins, the fastest of them; replaying keeps exact reverse mode possible down to
    a few states. Forward mode wins where φ (or ψ) has only a few elements, where no schedule fits, or where time is
    too short for replays; a black box leaves only differences. Biased methods are listed, never picked: nobody knows
    their error beforehand. One inner step is run and timed; everything else is predicted.

    Args:
        problem: The two-level problem.
        phi: Tree of floating tensors.
        memory: What the hypergradient may hold beside problem and φ ("2GB", or bytes).
        seconds: What it may take (s); None for no limit.
        seed: Seed of the step that is timed.

    Returns:
        The pick and all options.

    Raises:
        UserError: If nothing fits.
    """
    budget, phi = parse_bytes(memory), check_tree("phi", phi)
    if isinstance(problem, BlackBox):
        return _black_box(phi)
    psi, _ = bottleneck(problem, phi, seed)
    unit = _step_seconds(problem, phi, seed)
    known = prices(problem, phi, _candidates(problem, size(psi)), seed=seed)
    fitting = [price for price in known if price.bytes <= budget]
    quick = [price for price in fitting if seconds is None or price.gradient_steps * unit <= seconds]
    exact = sorted((price for price in quick if price.exact), key=lambda price: price.gradient_steps)
    sampled = sorted((price for price in quick if price.cosine and not price.exact), key=lambda price: -_cosine(price))
    if not exact and not sampled:
        least = min((p for p in known if p.exact or p.cosine), key=lambda price: price.bytes)
        raise UserError(
            "memory", got=memory, why=f"the leanest option, {least.method}, takes {format_bytes(least.bytes)}"
            + ("" if seconds is None else f" and {least.gradient_steps * unit:.3g} s"),
            do="give more memory or time, a smaller chunk, or fewer inner steps",
        )  # fmt: skip
    best = (exact or sampled)[0]
    options = [_option(price, best, budget, seconds, unit) for price in known]
    options.sort(key=lambda option: (option.price is not best, not option.fits, option.price.gradient_steps))
    return Choice(pick=best.method, why=options[0].verdict, options=tuple(options))


def _cosine(price: Price) -> float:
    return price.cosine or 0.0


def _candidates(problem: Bilevel, elements: int) -> list[Method]:
    """What is compared: all exact ways, samples of several sizes, and two biased ones for their price."""
    steps = problem.steps
    states = sorted({1, 3, 10, round(steps**0.5)} & set(range(1, steps)))
    found: list[Method] = [Reverse(), Checkpointed(), *(Checkpointed(states=count) for count in states)]
    if elements <= max(FEW, 64):
        found.append(Forward(chunk=min(elements, 16)))
    for count in (8, 32, 128):
        if count < elements:
            law: Law = Orthonormal() if count * 10 >= elements else Rademacher()
            found.append(ForwardGradient(directions=count, chunk=min(count, 8), law=law))
    found.append(ForwardGradient(directions=min(8, elements), chunk=1))
    return [*found, Truncated(steps=max(1, steps // 10)), HessianFree()]


def _step_seconds(problem: Bilevel, phi: Tree, seed: int) -> float:
    """Seconds of one inner gradient step, the second of two."""
    psi, _ = bottleneck(problem, phi, seed)
    unroll = check_problem(problem, psi, seed)
    state = unroll.run(psi, last=1)
    begin = time.perf_counter()
    unroll.run(psi, state=state, first=0, last=1)
    return time.perf_counter() - begin


def _option(price: Price, best: Price, budget: int, seconds: float | None, unit: float) -> Option:
    fits, time_ = price.bytes <= budget, price.gradient_steps * unit
    if price is best:
        verdict = "exact, and the fastest that fits" if price.exact else "unbiased, and the surest that fits"
    elif not fits:
        verdict = f"takes {price.bytes / budget:.2g} times the memory"
    elif seconds is not None and time_ > seconds:
        verdict = f"takes {time_ / seconds:.2g} times the time"
    elif price.cosine is None and not price.exact:
        verdict = "biased by an amount that nobody knows beforehand"
    elif price.exact:
        verdict = f"exact, but takes {price.gradient_steps / best.gradient_steps:.2g} times the work"
    else:
        verdict = f"expected cosine {_cosine(price):.2f} only"
    return Option(price=price, seconds=time_, fits=fits, verdict=verdict)


def _black_box(phi: Tree) -> Choice:
    """Differences along every direction where φ is small, along some of them elsewhere."""
    elements = size(phi)
    counts: Sequence[int] = sorted({min(elements, count) for count in (4, 16, 64, elements if elements <= 256 else 64)})
    options: list[Option] = []
    for count in reversed(counts):
        method = ZerothOrder(directions=count, law=Orthonormal())
        price = Price(
            method=method, bytes=0, gradient_steps=2.0 * count + 1, exact=False,
            cosine=method.law.cosine(count, elements),
        )  # fmt: skip
        verdict = "a black box leaves only differences" if not options else "fewer runs, less sure"
        options.append(Option(price=price, seconds=None, fits=True, verdict=f"{verdict}; {2 * count + 1} runs"))
    return Choice(pick=options[0].price.method, why=options[0].verdict, options=tuple(options))
