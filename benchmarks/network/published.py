"""The seven speed-ups that the paper prints, beside what three readings of its clusters give (Zhang et al. 2024).

    python -m benchmarks.network.published

The ratios are as its text prints them; times on flat rings are by its formulas, reconstructed, as those are images.
Four machines of eight A100, 80 Gbit/s between GPUs of different machines and 2000 Gbit/s inside one, ten micro-steps of
4 × 512 tokens a GPU, 16 bits on the wire, 65B with checkpointing: all as stated. Not stated are how fast the GPUs
computed, how much of the communication passed behind that, and which parameters train where 1/16 of them do. Two
readings take 40 % of an A100's peak and hide all that can be hidden. Two take from a grid the speed and the hidden
share whose worst ratio is least off, with backward passes through the whole model and with those that end early.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from benchmarks.memory_tables import table
from sparing.sharding import Topology, Workload, simulate
from sparing.sharding.planner.cost import PaperSeconds, paper_seconds

MACHINE = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
PEAK, TOKENS, MICRO_STEPS, BLOCKS = 312e12, 4 * 512, 10, 32
"""16-bit operations of an A100 in a second, tokens of a GPU's micro-step, micro-steps, blocks that are assumed."""
FEW = 1 / 16


@dataclass(frozen=True)
class Ratio:
    """A printed speed-up: plan ``ours`` over plan ``theirs``."""

    params: float
    share: float
    """Parameters that train, of all."""
    ours: str
    theirs: str
    printed: float

    @property
    def name(self) -> str:
        """Model, share and plans."""
        known = {"GGG": "ZeRO-3", "NGG": "ZeRO-2"}[self.theirs]
        share = {1.0: "", FEW: ", 1/16", 0.003: ", 3/1000"}[self.share]
        return f"{self.params / 1e9:.0f}B{share}: {self.ours} over {known}"


PRINTED = (
    Ratio(7e9, 1.0, "IIG", "GGG", 2.28),
    Ratio(7e9, 1.0, "NII", "NGG", 1.67),
    Ratio(7e9, FEW, "NII", "NGG", 1.21),
    Ratio(7e9, FEW, "NIG", "NGG", 1.15),
    Ratio(65e9, 1.0, "IIG", "GGG", 1.86),
    Ratio(65e9, FEW, "IIG", "GGG", 2.66),
    Ratio(65e9, 0.003, "ING", "GGG", 1.44),
)
"""Its text; "up to 266 % that of ZeRO-3" is read as 2.66 times, as its abstract's 1.19 to 2.50 asks for."""


@dataclass(frozen=True)
class Reading:
    """What the paper does not say."""

    speed: float
    """Operations of a GPU in a second."""
    hidden: float
    """Share of the shorter of communication and arithmetic that passes behind the longer."""
    early: bool
    """Whether 1/16 of the parameters are the last ones, so that backward passes end above the others."""


def operations(ratio: Ratio, *, early: bool) -> tuple[float, float]:
    """Operations of a forward and of a backward pass of a micro-step, recomputation in the latter."""
    whole = 2 * ratio.params * TOKENS
    # gradients of inputs reach down to what trains, those of weights are made where they train
    reached = ratio.share if early and ratio.share == FEW else 1.0
    again = reached if ratio.params > 20e9 else 0.0
    return whole, whole * (reached + ratio.share + again)


@functools.cache
def sent(ratio: Ratio, plan: str) -> PaperSeconds:
    """Seconds on flat rings, by cause."""
    work = Workload(params=ratio.params, trainable=ratio.share, accumulate=MICRO_STEPS)
    return paper_seconds(work, MACHINE, plan)


def flat_seconds(ratio: Ratio, plan: str, reading: Reading) -> float:
    """A step on flat rings."""
    forward, backward = operations(ratio, early=reading.early)
    wires = sent(ratio, plan)
    reached = ratio.share if reading.early and ratio.share == FEW else 1.0
    # parameters are gathered for both passes, for the backward one as far as it goes
    travels = MICRO_STEPS * (wires.params * (1 + reached) / 2 + wires.grads)
    computes = MICRO_STEPS * (forward + backward) / reading.speed
    both = max(travels, computes) + (1 - reading.hidden) * min(travels, computes)
    return both + wires.sync_grads + wires.sync_params


def flat(ratio: Ratio, reading: Reading) -> float:
    """The speed-up on flat rings."""
    return flat_seconds(ratio, ratio.theirs, reading) / flat_seconds(ratio, ratio.ours, reading)


def two_level(ratio: Ratio, reading: Reading) -> float:
    """The speed-up by the simulator: rings in two levels, every GPU with a wire of its own."""
    forward, backward = (work / reading.speed for work in operations(ratio, early=False))
    work = Workload(
        params=ratio.params, trainable=ratio.share, accumulate=MICRO_STEPS, blocks=BLOCKS,
        seconds_forward=forward, seconds_backward=backward,
    )  # fmt: skip
    ours, theirs = (simulate(work, MACHINE, plan).seconds for plan in (ratio.ours, ratio.theirs))
    return theirs / ours


STATED = Reading(speed=0.4 * PEAK, hidden=1.0, early=False)


def off(reading: Reading) -> float:
    """By which factor the worst of the seven is off."""
    return math.exp(max(abs(math.log(flat(one, reading) / one.printed)) for one in PRINTED))


def grid(*, early: bool) -> Iterator[Reading]:
    """Speeds from 10 to 160 TFLOP/s and hidden shares by tenths."""
    for speed in range(10, 161, 2):
        yield from (Reading(speed * 1e12, tenth / 10, early) for tenth in range(11))


@functools.cache
def fitted(*, early: bool) -> Reading:
    """The reading of the grid whose worst ratio is least off."""
    return min(grid(early=early), key=off)


def tau(found: list[float], printed: list[float]) -> float:
    """Kendall's rank correlation.

    Example:
        >>> tau([1.0, 2.0, 3.0], [1.0, 3.0, 2.0])
        0.3333333333333333
    """
    pairs = combinations(zip(found, printed, strict=True), 2)
    return fmean(math.copysign(1.0, (a[0] - b[0]) * (a[1] - b[1])) if a[0] != b[0] else 0.0 for a, b in pairs)


def apart(*, early: bool) -> tuple[float, float]:
    """How many times the arithmetic of 1/16 that of 3/1000 must have taken, by the two ratios, and takes by count.

    Where nothing is hidden, a plan that gathers inside groups beats ZeRO-3 by a factor of one and ZeRO-3's gathers over
    the arithmetic, all else being small. Both runs gather the same parameters, the one whose backward passes end early
    fewer times.
    """
    few, least = PRINTED[5], PRINTED[6]
    gathers = (1 + FEW) / 2 if early else 1.0
    counted = sum(operations(least, early=early)) / sum(operations(few, early=early))
    return (few.printed - 1) / (least.printed - 1) / gathers, counted


def published() -> str:
    """The seven ratios beside the readings."""
    readings = [fitted(early=early) for early in (False, True)]
    printed = [one.printed for one in PRINTED]
    ways = [[two_level(one, STATED) for one in PRINTED], [flat(one, STATED) for one in PRINTED]]
    ways += [[flat(one, reading) for one in PRINTED] for reading in readings]
    lines = [
        [one.name, f"{one.printed:.2f}", *(f"{way[at]:.2f}" for way in ways)] for at, one in enumerate(PRINTED)
    ]  # fmt: skip
    worst = [max(max(a / b, b / a) for a, b in zip(way, printed, strict=True)) for way in ways]
    lines.append(["the worst is off by", "", *(f"{one:.2f}×" for one in worst)])
    lines.append(["Kendall's τ with the printed order", "", *(f"{tau(way, printed):.2f}" for way in ways)])
    told = [f"{r.speed / 1e12:.0f} TFLOP/s, {100 * r.hidden:.0f} % hidden" for r in readings]
    head = ["", "printed", "two levels, 125 TFLOP/s, all hidden", "flat, 125 TFLOP/s, all hidden",
            f"flat, {told[0]}", f"flat, {told[1]}, backward passes end early at 1/16"]  # fmt: skip
    return table(head, lines)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(published())
    for early in (False, True):
        needs, counted = apart(early=early)
        where = "ends early at 1/16" if early else "goes through all"
        print(f"3/1000 over 1/16 in arithmetic, backward {where}: {needs:.1f} by the ratios, {counted:.2f} by count")


if __name__ == "__main__":
    main()
