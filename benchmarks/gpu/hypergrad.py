"""What do hypergradients cost on a GPU at the size of the (FG)²U paper, and what do its condensations reach in minutes?

Run ``python -m benchmarks.gpu.hypergrad`` on a machine with a CUDA device until it says that nothing is left; a call
ends within eight minutes and the next goes on. Every cell has a process of its own and a limit; one that fails or runs
past it is a row that says why, and the next goes on. The net has three blocks of 128 channels, an inner run T = 100
steps with momentum 0.9. Three kinds of cells:

    directions  (FG)²U with 1 to 64 tangents carried at once: directions a second, and bytes
    memory      bytes and seconds of one hypergradient for T = 25 to 1,600, by reverse, checkpointed and (FG)²U; the
                first two also with their states in main memory
    table       a cell of the paper's Table 1: one, ten or fifty images a class, 512 directions an outer step, for 200
                seconds of outer steps; accuracy of fresh nets, beside as many real images

Images are random in the first two. Bytes are the allocator's peak beyond what was held before the call. The paper takes
10,000 outer steps for each accuracy; a row says how many there were. Of (FG)²U it is one: eight tangents at once took
3.2 s on an H100, so 512 take 3.5 minutes. Its row is the price of a step and says nothing of what it reaches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu import cells as shared
from benchmarks.gpu.cells import child, resumed, say
from sparing import hypergrad as hg
from sparing.data import load_images
from sparing.jobs.condense.inputs import Pair, channels_first, floats, split
from sparing.jobs.condense.learned import real_images
from sparing.jobs.condense.loop import accuracy
from sparing.jobs.condense.methods import PAPER
from sparing.jobs.condense.net import Shape, init_weights, logits, penalty
from sparing.report import Record, environment
from sparing.seeds import number, stream

RESULT = Path(__file__).parents[1] / "results" / "gpu_hypergrad.jsonl"
MINUTES = 8.0  # of a call
LIMITS = {"directions": 2.0, "memory": 2.0, "table": 7.5}  # minutes of a cell
OUTER_SECONDS = 200.0  # of the outer loop of a cell of the table, beside a step that may take as long by itself
REPEATS = 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

AT_ONCE = (1, 2, 4, 8, 16, 32, 64)
DEPTHS = (25, 100, 400, 1600)
WIDTH, STEPS, DIRECTIONS, REAL = 128, 100, 512, 512  # channels, T, b and real images of an outer step, as in the paper
CHUNK = 8  # directions of the table carried at once: 64 took more than 45 s on an H100, where eight took 3.2
PENALTY, LR, MOMENTUM = 1e-4, 0.01, 0.9
HELD_OUT, JUDGES = 5000, 3  # training images that choose a rate of the control, and nets of a verdict
# by images a class: outer rate and training steps of a net that judges. Source: Shen et al. 2024, Table F.1
OUTER_LR = {1: 1e-2, 10: 5e-4, 50: 5e-4}
JUDGE_STEPS = {1: 1000, 10: 10_000, 50: 10_000}
CONTROL_RATES = (0.003, 0.01, 0.03)

METHODS: dict[str, Any] = {
    "(FG)²U": hg.ForwardGradient(directions=DIRECTIONS, chunk=CHUNK),
    "truncated": hg.Truncated(steps=10),
    "Hessian-free": hg.HessianFree(),
    "Neumann": hg.Neumann(step=0.01, terms=20),
    "reverse": hg.Reverse(),
    "checkpointed": hg.Checkpointed(),
}
CONTROL = "real images"
# a run on the CPU has its states in main memory already, so a try takes the disk
ELSEWHERE = "cpu" if torch.cuda.is_available() else tempfile.gettempdir()
UNROLLS: dict[str, Any] = {
    "reverse": hg.Reverse(), "checkpointed": hg.Checkpointed(), "checkpointed, 10 states": hg.Checkpointed(states=10),
    "(FG)²U b=1": hg.ForwardGradient(directions=1), "(FG)²U b=8": hg.ForwardGradient(directions=8),
    "reverse, offloaded": hg.Reverse(offload=ELSEWHERE), "checkpointed, offloaded": hg.Checkpointed(offload=ELSEWHERE),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row."""

    kind: str
    method: str  # of UNROLLS or METHODS, or CONTROL
    data: str = "random"
    per_class: int = 1
    steps: int = STEPS  # T
    at_once: int = 0  # directions carried through the run together


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes that a try on the CPU shrinks."""

    width: int = WIDTH
    real: int = REAL
    directions: int = DIRECTIONS
    outer_seconds: float = OUTER_SECONDS
    judge_steps: dict[int, int] | None = None


FULL = Size()
TRY = Size(width=4, real=16, directions=2, outer_seconds=0.0, judge_steps=dict.fromkeys(JUDGE_STEPS, 2))


def cells(*, small: bool) -> Iterator[Cell]:
    """Every cell, short ones first."""
    steps = 2 if small else STEPS
    for at_once in AT_ONCE[:2] if small else AT_ONCE:
        yield Cell(kind="directions", method="(FG)²U", at_once=at_once, steps=steps)
    for depth, method in itertools.product((2,) if small else DEPTHS, UNROLLS):
        yield Cell(kind="memory", method=method, steps=depth)
    for (data, per_class), method in itertools.product(PAPER, [CONTROL, *METHODS]):
        if not small or (data, per_class) == ("mnist", 1):
            yield Cell(kind="table", method=method, data=data, per_class=per_class, steps=steps)


def run(cell: Cell, *, small: bool, path: Path | None = None) -> dict[str, Any]:
    """Measure one cell, in a process of its own; ``path``: a copy of the data set, where it cannot be fetched."""
    size = TRY if small else FULL
    if cell.kind == "table":
        train, held_out, test = images(cell.data, path, small=small)
        return table(cell, size, train, held_out, test)
    random = torch.randint(256, (64, 1, 28, 28), generator=stream(0, "gpu pixels"), dtype=torch.uint8)
    real = (random, torch.arange(64) % 10)
    if cell.kind == "memory":
        return one(cell, size, real, UNROLLS[cell.method])
    found = one(cell, size, real, hg.ForwardGradient(directions=cell.at_once))
    return found | {"directions_a_second": cell.at_once / found["seconds"]}


def images(name: str, path: Path | None, *, small: bool) -> tuple[Pair, Pair, Pair]:
    """Training part, held-out part and test part, bytes on the device; drawn at random for a try."""
    if small:
        pixels = torch.randint(256, (60, 1, 28, 28), generator=stream(0, "gpu pixels"), dtype=torch.uint8)
        whole = (pixels, torch.arange(60) % 10)
        parts = (*split(*whole, 20), whole)
    else:
        given, unseen = (load_images(name, split=part, path=path) for part in ("train", "test"))
        parts = (*split(channels_first(given[0]), given[1], HELD_OUT), (channels_first(unseen[0]), unseen[1]))
    moved = [(pixels.to(DEVICE), labels.to(DEVICE)) for pixels, labels in parts]
    return moved[0], moved[1], moved[2]


def problem(cell: Cell, size: Size, real: Pair, turn: int) -> hg.Bilevel:
    """Training a fresh net on φ for T steps, judged on a batch of real images; another net and batch each turn."""
    pixels, labels = real
    generator = stream(0, "gpu outer", turn)
    chosen = torch.randint(len(pixels), (size.real,), generator=generator).to(pixels.device)
    batch, targets = floats(pixels[chosen]), labels[chosen]
    shape = Shape(channels=pixels.shape[1], side=pixels.shape[2], classes=10, width=size.width)
    own = torch.arange(10, device=pixels.device).repeat_interleave(cell.per_class)
    start = {name: leaf.to(pixels.device) for name, leaf in init_weights(shape, generator).items()}
    return hg.Bilevel(
        inner=lambda theta, phi, _: F.cross_entropy(logits(theta, phi["images"]), own) + PENALTY * penalty(theta),
        outer=lambda theta, phi: F.cross_entropy(logits(theta, batch), targets),
        init=start, optimizer=hg.SGD(lr=hg.cosine(LR, cell.steps), momentum=MOMENTUM), steps=cell.steps,
    )  # fmt: skip


def one(cell: Cell, size: Size, real: Pair, method: Any) -> dict[str, Any]:
    """Seconds and bytes of one hypergradient at random images."""
    real = (real[0].to(DEVICE), real[1].to(DEVICE))
    given = problem(cell, size, real, 0)
    phi = {"images": torch.rand(10 * cell.per_class, *real[0].shape[1:], generator=stream(0, "gpu phi")).to(DEVICE)}
    if DEVICE.type == "cuda":
        hg.hypergradient(problem(Cell(kind="", method="", steps=2), size, real, 0), phi, method)  # loads the kernels
    seconds, held = [], 0
    for _ in range(REPEATS):
        begin = time.perf_counter()
        # on the CPU no allocator tells: a ledger of live tensors does, several times slower
        found = hg.hypergradient(given, phi, method, measure=DEVICE.type == "cpu")
        seconds.append(waited(begin))
        held = max(held, int(found.report.bytes or 0))
    row = {"seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds), "allocated": held}
    return row if found.report.offloaded is None else row | {"offloaded": found.report.offloaded}


def waited(begin: float) -> float:
    """Seconds since, once the device is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def table(cell: Cell, size: Size, train: Pair, held_out: Pair, test: Pair) -> dict[str, Any]:
    """Condense for as long as there is time, and judge by fresh nets; or judge as many real images."""
    paper = PAPER[cell.data, cell.per_class].get(cell.method)
    judge_steps = (size.judge_steps or JUDGE_STEPS)[cell.per_class]
    if cell.method == CONTROL:
        real = [control(cell, train, judge) for judge in range(JUDGES + 1)]
        # the last draw chooses the rate, the others are judged
        tried = {rate: judged(size, cell, real[-1], held_out, JUDGES, judge_steps, rate) for rate in CONTROL_RATES}
        rate = max(tried, key=lambda at: tried[at])
        scores = [judged(size, cell, real[k], test, k, judge_steps, rate) for k in range(JUDGES)]
        return verdict(scores) | {"lr": rate}
    # nothing but the number of directions is smaller in a try
    method = METHODS[cell.method]
    if isinstance(method, hg.ForwardGradient) and size.directions < method.directions:
        method = hg.ForwardGradient(directions=size.directions)
    phi = torch.rand(10 * cell.per_class, *train[0].shape[1:], generator=stream(0, "gpu phi")).to(DEVICE)
    phi.requires_grad_()
    rate = OUTER_LR[cell.per_class]
    optimizer = torch.optim.Adam([phi], lr=rate)

    def step(turn: int) -> float:
        begin = time.perf_counter()
        given = problem(cell, size, train, turn)
        phi.grad = hg.hypergradient(given, {"images": phi}, method, seed=number(0, "gpu step", turn)).grad["images"]
        optimizer.step()
        with torch.no_grad():
            phi.clamp_(0.0, 1.0)
        return waited(begin)

    taken = [step(0)]  # loads the kernels, so that it is slower than the rest
    if taken[0] < size.outer_seconds / 2:
        taken.append(step(1))
    spent, begun = sum(taken), len(taken)
    # fixed now, so that the rate falls linearly to zero at the end, as the paper's does over its 10,000
    turns = begun + int(max(0.0, size.outer_seconds - spent) / taken[-1])
    for turn in range(begun, turns):
        optimizer.param_groups[0]["lr"] = rate * (1 - turn / turns)
        spent += step(turn)
        if spent > 1.1 * size.outer_seconds:  # the pace was too quick; the row says how many there were
            turns = turn + 1
            break
    scores = [judged(size, cell, phi.detach(), test, k, judge_steps, LR) for k in range(JUDGES)]
    cost = {"outer_steps": turns, "seconds": spent, "seconds_a_step": spent / turns, "lr": rate}
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None
    return verdict(scores) | cost | {"allocated": peak, "paper": paper}


def control(cell: Cell, train: Pair, turn: int) -> Tensor:
    """As many real images, classes in order, on the device."""
    on_cpu = (train[0].cpu(), train[1].cpu())
    return real_images(on_cpu, 10, cell.per_class, stream(0, "gpu control", turn)).to(DEVICE)


def judged(size: Size, cell: Cell, given: Tensor, real: Pair, seed: int, steps: int, lr: float) -> float:
    """Accuracy (%) of a fresh net trained on the given images alone."""
    shape = Shape(channels=given.shape[1], side=given.shape[2], classes=10, width=size.width)
    own = torch.arange(10, device=given.device).repeat_interleave(cell.per_class)
    start = init_weights(shape, stream(0, "gpu judge", seed))
    weights = {name: leaf.to(given.device).requires_grad_() for name, leaf in start.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=lr, momentum=MOMENTUM)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(logits(weights, given), own) + PENALTY * penalty(weights)).backward()
        optimizer.step()
        falling.step()
    return accuracy({name: leaf.detach() for name, leaf in weights.items()}, real)


def verdict(scores: list[float]) -> dict[str, Any]:
    """Mean and ends of some accuracies (%)."""
    return {"accuracy": statistics.mean(scores), "lowest": min(scores), "highest": max(scores), "nets": len(scores)}


def fill(record: Record, out: Path, *, small: bool, path: Path | None, minutes: float) -> int:
    """Measure what is left; returns how many cells are left."""
    options = ["--try"] * small + (["--data", str(path)] if path else [])
    return shared.fill(
        record, out, "hypergrad", list(cells(small=small)),
        lambda cell, seconds: child("hypergrad", cell, seconds=seconds, options=options), minutes=minutes,
        limit=lambda cell: 60 * LIMITS[cell.kind],
    )  # fmt: skip


def main() -> None:
    """Run what is left for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--try", action="store_true", dest="small", help="tiny shapes, on the CPU too")
    parser.add_argument("--data", type=Path, help="folder of folders mnist and cifar10, where nothing can be fetched")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cell")
    options = parser.parse_args()
    if options.cell:
        cell = Cell(**json.loads(options.cell))
        path = options.data / cell.data if options.data else None
        sys.stdout.write(json.dumps(run(cell, small=options.small, path=path)) + "\n")
        return
    if not (options.small or DEVICE.type == "cuda"):
        parser.exit(2, "no CUDA device is here: pass --try for tiny shapes on the CPU\n")
    units = dict.fromkeys(["seconds", "seconds_a_step", "least", "most"], "s") | {"allocated": "B", "offloaded": "B"}
    units |= dict.fromkeys(["accuracy", "lowest", "highest", "paper"], "%") | {"directions_a_second": "1/s"}
    record = Record(
        question="What do hypergradients cost on a GPU at the paper's size, and what do condensations reach?",
        settings={"size": asdict(TRY if options.small else FULL), "repeats": REPEATS, "directions": DIRECTIONS},
        seed=0, environment=environment(), units=units,
    )  # fmt: skip
    out, minutes = options.out, options.minutes
    say(fill(resumed(record, out), out, small=options.small, path=options.data, minutes=minutes))


if __name__ == "__main__":
    main()
