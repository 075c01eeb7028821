"""The planner: which method fits the memory, what it costs, how exact it is, and why the others lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sparing.errors import UserError
from sparing.hypergrad.apply import bottleneck
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.estimate import Method
from sparing.hypergrad.forward import Forward, ForwardGradient
from sparing.hypergrad.forward_mode.directions import Law, Orthonormal, Rademacher
from sparing.hypergrad.implicit import HessianFree
from sparing.hypergrad.inner.checks import check_problem, check_solution, check_tree
from sparing.hypergrad.planning.predict import PULL, Price, prices
from sparing.hypergrad.problem import Bilevel, BlackBox
from sparing.hypergrad.reverse import Reverse, Truncated, pullback
from sparing.hypergrad.trees import Tree, size, zeros_like
from sparing.hypergrad.zeroth import ZerothOrder
from sparing.memory import format_bytes, parse_bytes

# Elements of φ (or ψ) up to which exact forward mode is an option: its work alone grows with their number.
FEW = 64


@dataclass(frozen=True, kw_only=True)
class Option:
    """One method at its price."""

    price: Price
    """Bytes, gradient steps, expected cosine."""
    seconds: float
    """Predicted time (s)."""
    fits: bool
    """Whether the bytes are within the memory; true where they are not known."""
    verdict: str
    """Why it is picked, or not."""

    def row(self) -> dict[str, object]:
        """Cells for a table; ``bytes`` in B, or "not known"; ``seconds`` in s."""
        held = "not known" if self.price.bytes is None else self.price.bytes
        return {
            "method": str(self.price.method), "bytes": held, "seconds": self.seconds,
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
    """Pick the method for a problem, a memory and a time.

    The rule: of the exact methods whose predicted bytes fit the memory and whose predicted time fits the seconds, the
    fastest; where there is none, the most certain of the sampled ones that fit, the faster of two that are equally
    certain. Biased methods are listed, never picked: nobody knows their error beforehand. One inner step is run and
    timed, without derivatives and with a cotangent pulled back through it; everything else is predicted.

    A black box leaves only differences. Its solver is run twice and timed once; its memory is not known, so the limit
    plays no part there, and its bytes are None, not zero.

    Args:
        problem: The two-level problem.
        phi: Tree of floating tensors.
        memory: Memory that the hypergradient may use besides problem and φ ("2GB", or bytes).
        seconds: Time that it may take (s); None for no limit.
        seed: Seed of the step that is timed.

    Returns:
        The pick and all options.

    Raises:
        UserError: If nothing fits.
    """
    budget, phi = parse_bytes(memory), check_tree("phi", phi)
    if isinstance(problem, BlackBox):
        check_solution(problem.solve(phi))
        # the second call is timed: the first may compile or load something
        begin = time.perf_counter()
        problem.solve(phi)
        unit = time.perf_counter() - begin
        return _pick(_black_box_prices(size(phi)), Pace(unit, unit), budget, seconds)
    psi, _ = bottleneck(problem, phi, seed)
    # the second of two steps too; it starts from another state, so it is compared with nothing
    unroll = check_problem(problem, psi, seed).unchecked()
    state = unroll.run(psi, last=1)
    begin = time.perf_counter()
    unroll.run(psi, state=state, first=0, last=1)
    unit = time.perf_counter() - begin
    # the second step where there is one: the first of a constant start leaves the cotangent of θ out
    first = min(1, problem.steps - 1)
    pullback(unroll, state, psi, first, first + 1, zeros_like(state))
    begin = time.perf_counter()
    pullback(unroll, state, psi, first, first + 1, zeros_like(state))
    pace = Pace(unit, (time.perf_counter() - begin) / PULL)
    return _pick(prices(problem, phi, _candidates(problem, size(psi)), seed=seed), pace, budget, seconds)


@dataclass(frozen=True)
class Pace:
    """Seconds of work on this problem."""

    plain: float  # of a plain step, or a solve
    derived: float  # of each gradient step that predicted derivatives take

    def seconds(self, price: Price) -> float:
        """Of a whole call (s)."""
        return self.plain * price.plain_steps + self.derived * (price.gradient_steps - price.plain_steps)


def _pick(all_prices: Sequence[Price], pace: Pace, budget: int, seconds: float | None) -> Choice:
    """The pick and all options."""
    comparable = [price for price in all_prices if price.exact or price.cosine is not None]
    fitting = [price for price in comparable if price.bytes is None or price.bytes <= budget]
    in_time = [price for price in fitting if seconds is None or pace.seconds(price) <= seconds]
    if not fitting:
        least = min(comparable, key=lambda price: price.bytes or 0)
        raise UserError(
            "memory", got=format_bytes(budget),
            why=f"the leanest option, {least.method}, takes {format_bytes(least.bytes or 0)}",
            do="give more memory, or take fewer inner steps",
        )  # fmt: skip
    if not in_time:
        least = min(fitting, key=pace.seconds)
        raise UserError(
            "seconds", got=seconds,
            why=f"the quickest option that fits the memory, {least.method}, takes {pace.seconds(least):.3g} s",
            do="give more time or memory, or take fewer inner steps",
        )  # fmt: skip
    best = min(
        in_time, key=lambda price: (not price.exact, 0 if price.exact else -(price.cosine or 0), pace.seconds(price))
    )
    options = [
        Option(
            price=price, seconds=pace.seconds(price), fits=price.bytes is None or price.bytes <= budget,
            verdict=_verdict(price, best, budget, seconds, pace),
        )
        for price in all_prices
    ]  # fmt: skip
    options.sort(key=lambda option: (option.price is not best, not option.fits, option.seconds))
    return Choice(pick=best.method, why=options[0].verdict, options=tuple(options))


def _candidates(problem: Bilevel, elements: int) -> list[Method]:
    """All exact methods, samples of several sizes, and two biased methods for comparison."""
    steps = problem.steps
    states = sorted({1, 3, 10, round(steps**0.5)} & set(range(1, steps)))
    methods: list[Method] = [Reverse(), Checkpointed(), *(Checkpointed(states=count) for count in states)]
    if elements <= FEW:
        methods += [Forward(chunk=chunk) for chunk in sorted({1, min(elements, 16)}, reverse=True)]
    for count in (8, 32, 128):
        if count < elements:
            law: Law = Orthonormal() if count * 10 >= elements else Rademacher()
            methods.append(ForwardGradient(directions=count, chunk=min(count, 8), law=law))
    # up to 8 elements ``Forward(chunk=1)`` takes as little memory and is exact
    if elements > 8:
        methods.append(ForwardGradient(directions=8, chunk=1))
    # an implicit method has no gradient of losses along the run
    implicit = [HessianFree()] if problem.path is None else []
    return [*methods, Truncated(steps=max(1, steps // 10)), *implicit]


def _verdict(price: Price, best: Price, budget: int, seconds: float | None, pace: Pace) -> str:
    """Why a method is picked or not."""
    time_ = pace.seconds(price)
    if price is best and price.exact:
        return "exact, and the fastest that fits"
    if price is best and price.bytes is None:
        return "a black box leaves only differences; the surest that fit the time, its bytes are not known"
    if price is best:
        return "unbiased, and the surest that fits"
    if price.bytes is not None and price.bytes > budget:
        return f"takes {price.bytes / budget:.2g} times the memory"
    if seconds is not None and time_ > seconds:
        return f"takes {time_ / seconds:.2g} times the time"
    if price.cosine is None and not price.exact:
        return "biased by an amount that nobody knows beforehand"
    if price.exact:
        return f"exact, but takes {time_ / pace.seconds(best):.2g} times as long"
    return f"expected cosine {price.cosine or 0:.2f} only"


def _black_box_prices(elements: int) -> list[Price]:
    """Options for a black box: differences along all directions where φ is small, else along some of them."""
    counts = {min(elements, count) for count in (4, 16, 64, elements if elements <= 256 else 64)}
    methods = [ZerothOrder(directions=count, law=Orthonormal()) for count in sorted(counts)]
    return [
        Price(
            method=method, bytes=None, gradient_steps=2.0 * method.directions + 1,
            plain_steps=2.0 * method.directions + 1, exact=False, cosine=method.law.cosine(method.directions, elements),
        )
        for method in methods
    ]  # fmt: skip
