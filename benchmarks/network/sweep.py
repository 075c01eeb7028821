"""Measure one arm, one cell or the whole grid on a shaped network, and keep a row for every arm of every cell.

    python -m benchmarks.network.sweep --arms plans,rivals --rounds 7          # the reference cell, about half an hour
    python -m benchmarks.network.sweep --arms IIG,ddp --accumulate 1           # one cell, two arms
    python -m benchmarks.network.sweep --grid --arms plans --budget 120 --out benchmarks/results/network_plans.jsonl

``--arms engines`` has every plan on both engines, side by side: ``benchmarks.network.engines`` makes the table.

Needs root for the network namespaces; ``--links throttled`` works without, for our own arms: the rings hold back what
they send (``Wires(rate=…)``). DeepSpeed's arms need ``--python`` of an interpreter that has it: ``benchmarks.peers``.

The arms of a cell are built once in the same processes and take turns, round after round; a row has the median and the
ends of the rounds, in seconds of the slowest rank, with CPU seconds of all ranks and bytes that left each group's
interfaces beside it. What finished is in the file at once, and a run with the same ``--out`` goes on where it ended.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.network.arms import ARMS, FSDP2, PLANS, RIVALS
from benchmarks.network.cells import ACCUMULATE, RATES, RATIOS, REFERENCE, SHAPES, TRAINABLE, Cell, grid
from benchmarks.network.namespaces import Network
from benchmarks.network.predictions import priced
from benchmarks.network.rows import Book, arm_rows
from benchmarks.network.runs import RankError, Ranks
from sparing.report import Progress

RESULT = Path(__file__).parents[1] / "results" / "network_reference.jsonl"
BOTH = tuple(arm for plan in PLANS for arm in (plan, plan + FSDP2))
SETS = {"plans": PLANS, "engines": BOTH, "rivals": RIVALS, "all": ("alone", *RIVALS, *PLANS)}
SETS["few"] = ("alone", "NNG", "NNG int8", "NNG int4", "NNI", "NNI every 8", "NNI every 32 int8")


@dataclass(kw_only=True)
class Lab:
    """A network and ranks that are kept while the next cell can use them."""

    links: str
    """``shaped``, ``throttled`` or ``none``."""

    python: str
    """Interpreter of the ranks."""

    patience: float
    """Seconds of silence after which the ranks are given up."""

    log: Path | None
    """Where the ranks' standard error goes."""

    links_known: dict[tuple[float, float], list[dict[str, Any]]] = field(default_factory=dict)
    """What these ranks have said of links of these rates: cells of one network share it."""

    shape: tuple[int, int] | None = None
    network: Network | None = None
    ranks: Ranks | None = None

    def ready(self, cell: Cell) -> Ranks:
        """Ranks for a cell, on links of its rates."""
        if self.shape != (cell.groups, cell.per_group):
            self.close()
        if self.ranks is None:
            self._start(cell)
        if self.network is not None and self.links == "shaped":
            self.network.shape(inter=cell.inter, intra=cell.intra)
        assert self.ranks is not None
        return self.ranks

    def _start(self, cell: Cell) -> None:
        """Make what is missing."""
        self.shape = (cell.groups, cell.per_group)
        if self.network is None and self.links != "throttled":
            self.network = Network(groups=cell.groups)
            self.network.__enter__()
        ranks = Ranks(
            groups=cell.groups, per_group=cell.per_group, network=self.network, python=self.python,
            patience=self.patience, log=self.log,
        )  # fmt: skip
        self.ranks = ranks.__enter__()

    def drop(self) -> None:
        """End the ranks, which are of no use after an error."""
        if self.ranks is not None:
            self.ranks.close()
        self.ranks = None
        self.links_known.clear()

    def close(self) -> None:
        """End everything."""
        self.drop()
        if self.network is not None:
            self.network.close()
        self.network = None


@contextlib.contextmanager
def lab(**options: Any) -> Iterator[Lab]:
    """A lab that is closed whatever happens."""
    made = Lab(**options)
    try:
        yield made
    finally:
        made.close()


def measure_cell(place: Lab, cell: Cell, arms: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the arms of a cell; an arm that fails is reported and left out, and the others start again."""
    rows: list[dict[str, Any]] = []
    left = list(arms)
    while left:
        try:
            answers = list(cell_answers(place, cell, left, options))
        except RankError as error:
            place.drop()
            culprit = error.arm if error.arm in left else left[0]
            print(f"{culprit} failed: {error}", file=sys.stderr)
            rows.append({"table": "failed", **cell.plain(), "arm": culprit, "error": str(error)[-1500:]})
            left.remove(culprit)
            continue
        versions = place.ranks.versions if place.ranks else ""
        rows += [row | {"versions": versions} for row in priced(cell, arm_rows(cell, answers))]
        break
    return rows


def cell_answers(place: Lab, cell: Cell, arms: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the ranks say about a cell, and about its links before."""
    ranks = place.ready(cell)
    if options.links != "throttled":
        rates = (cell.inter, cell.intra)
        if rates not in place.links_known:
            place.links_known[rates] = list(link_answers(ranks, cell, options))
        yield from place.links_known[rates]
    total = len(arms) * (options.rounds + 1)
    job = {"rounds": options.rounds, "steps": options.steps, "seconds": options.seconds}
    title = f"{cell.groups}×{cell.per_group}, ratio {cell.ratio:g}, s={cell.accumulate}, {cell.trainable:.3g}"
    with Progress(title, total=total, unit="turn") as bar:
        for found in ranks.do(kind="cell", cell=cell.plain(), arms=arms, throttled=options.links == "throttled", **job):
            yield found
            if found["kind"] == "round" and found["rank"] == 0:
                bar.advance(seconds=found["seconds"])


def link_answers(ranks: Ranks, cell: Cell, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What plain messages get, and what the library's own measurement says."""
    yield from ranks.do(kind="p2p", per_group=cell.per_group, sizes=[2**12, 2**22], repeats=3)
    if options.probe:
        yield from ranks.do(kind="probe", groups=cell.groups, per_group=cell.per_group, seconds=options.probe)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """The cells that the options name."""
    model = {"blocks": options.blocks, "width": options.width, "batch": options.batch, "seed": options.seed}
    if not options.grid:
        groups, per_group = options.shape[0]
        cell = replace(
            REFERENCE, groups=groups, per_group=per_group, accumulate=options.accumulate[0],
            trainable=options.trainable[0], **model,
        )  # fmt: skip
        inter, intra = RATES[options.ratio[0]]
        return [replace(cell, inter=options.inter or inter, intra=options.intra or intra)]
    return grid(options.shape, options.ratio, options.accumulate, options.trainable, **model)


def arms_of(names: Iterable[str], options: argparse.Namespace) -> list[str]:
    """Arms by their names and the names of sets; what this run cannot have is left out and said."""
    asked = dict.fromkeys(arm for name in names for arm in SETS.get(name, (name,)))
    unknown = [arm for arm in asked if arm not in ARMS]
    if unknown:
        raise SystemExit(f"--arms: {', '.join(unknown)}: none of {', '.join([*SETS, *ARMS])}")
    missing = [arm for arm in asked if arm.startswith("zero") and options.python == sys.executable]
    foreign = [arm for arm in asked if arm in RIVALS and options.links == "throttled"]
    for arm in dict.fromkeys([*missing, *foreign]):
        why = "its links are not throttled" if arm in foreign else "pass --python of an interpreter with DeepSpeed"
        print(f"left out: {arm} ({why})", file=sys.stderr)
    return [arm for arm in asked if arm not in {*missing, *foreign}]


def shape_of(text: str) -> tuple[int, int]:
    """``2x4`` as groups and ranks of a group."""
    groups, ranks = text.split("x")
    return int(groups), int(ranks)


def share_of(text: str) -> float:
    """``1/16`` or ``0.003``."""
    above, _, below = text.partition("/")
    return float(above) / float(below or 1)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say = parser.add_argument
    say("--arms", default="all", help=f"names or sets ({', '.join(SETS)}), between commas")
    say("--grid", action="store_true", help="all cells of the next four lists, by default 81; else the first of each")
    say("--shape", type=lambda text: [shape_of(one) for one in text.split(",")], help="such as 2x2,4x2")
    say("--ratio", type=lambda text: [int(one) for one in text.split(",")], help="B'/B: 25, 5 or 1")
    say("--accumulate", type=lambda text: [int(one) for one in text.split(",")])
    say("--trainable", type=lambda text: [share_of(one) for one in text.split(",")], help="such as 1,1/16,3/1000")
    say("--inter", type=float, help="bits per second between groups, instead of the ratio's")
    say("--intra", type=float, help="bits per second inside a group, instead of the ratio's")
    for name in ("blocks", "width", "batch", "seed"):
        say(f"--{name}", type=int, default=getattr(REFERENCE, name))
    say("--rounds", type=int, default=5)
    say("--steps", type=int, default=4, help="most steps of one arm in one round")
    say("--seconds", type=float, default=8.0, help="about how long one arm may take in one round")
    say("--probe", type=float, default=10.0, help="seconds for `measure(mesh)` before a cell; 0: without")
    say("--budget", type=float, default=float("inf"), help="minutes after which no cell is begun")
    say("--patience", type=float, default=300.0, help="seconds of silence after which the ranks are given up")
    say("--links", choices=["shaped", "throttled", "none"], default="shaped")
    say("--python", default=sys.executable, help="interpreter of the ranks")
    say("--log", type=Path, help="file for what the ranks write to standard error")
    say("--again", action="store_true", help="measure also what the record has")
    say("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    whole = {"shape": SHAPES, "ratio": RATIOS[::-1], "accumulate": ACCUMULATE, "trainable": TRAINABLE}
    first = {"shape": [(2, 2)], "ratio": [25], "accumulate": [4], "trainable": [1.0]}
    for name, values in (whole if options.grid else first).items():
        if getattr(options, name) is None:
            setattr(options, name, list(values))
    return options


def main() -> None:
    """Measure what the record does not have yet."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that the namespaces go
    arms, cells = arms_of(options.arms.split(","), options), cells_of(options)
    book = Book(options.out, links=options.links)
    until = time.monotonic() + 60 * options.budget
    with lab(links=options.links, python=options.python, patience=options.patience, log=options.log) as place:
        for number, cell in enumerate(cells):
            left = [arm for arm in arms if options.again or not book.has(cell, arm)]
            if time.monotonic() > until:
                print(f"the budget is spent: {len(cells) - number} cells are left", file=sys.stderr)
                break
            if left:
                book.begin()
                book.add(measure_cell(place, cell, left, options))
                book.show(cell)


if __name__ == "__main__":
    main()
