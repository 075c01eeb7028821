"""Low-bit wires one number at a time, in Python's float64: what each group sends, owes and gets."""

from __future__ import annotations

from collections.abc import Sequence

Vector = list[float]


def step_of(block: Sequence[float], bits: int) -> float:
    """The smallest power of two with which the largest number still rounds to a code: found by trying."""
    step, largest, most = 2.0**-126, max(map(abs, block)), 2 ** (bits - 1) - 1
    while round(largest / step) > most:  # halves go to the even neighbour, in Python as in torch
        step *= 2
    return step


def rounded(x: Vector, bits: int, block: int) -> Vector:
    """What arrives of a message."""
    found: Vector = []
    for at in range(0, len(x), block):
        step = step_of(x[at : at + block], bits)
        found += [round(value / step) * step for value in x[at : at + block]]
    return found


def plus(a: Vector, b: Vector) -> Vector:
    return [p + q for p, q in zip(a, b, strict=True)]


def minus(a: Vector, b: Vector) -> Vector:
    return [p - q for p, q in zip(a, b, strict=True)]


def summed(
    given: list[list[Vector]], owed: list[list[Vector]], bits: int, block: int, *, whole: bool
) -> tuple[list[Vector], list[list[Vector]]]:
    """Sums, and what is owed afterwards, of ``given[rank][part]``; with ``whole`` each sum is rounded for all ranks.

    The order of additions is that of the library: mine, then those of the ranks before me on the circle.
    """
    width, sums = len(given), []
    after = [list(parts) for parts in owed]
    for me in range(width):
        total = given[me][me]
        for h in range(1, width):
            frm = (me - h) % width
            wanted = plus(owed[frm][me], given[frm][me])
            sent = rounded(wanted, bits, block)
            after[frm][me] = minus(wanted, sent)
            total = plus(total, sent)
        if whole:
            wanted = plus(owed[me][me], total)
            total = rounded(wanted, bits, block)
            after[me][me] = minus(wanted, total)
        else:
            total = plus(total, owed[me][me])
            after[me][me] = [0.0] * len(total)
        sums.append(total)
    return sums, after
