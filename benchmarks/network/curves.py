"""The same loss curve under every plan: the next character of a real book, in float32, over 2 × 2 local ranks.

    python -m benchmarks.network.curves    # five to nine minutes of processor time; no network, no root

One process takes the micro-batches of all ranks one after the other; that is the curve the others are held against. In
exact arithmetic all are the same (tests hold every plan to the bits of one process where sums are exact). In float32
sums over ranks are taken in another order, and training makes rounding grow. How much of that is no plan's doing is
seen in the second run of one process, which takes the same micro-batches in the opposite order.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.arms import PLANS
from benchmarks.network.runs import Ranks
from benchmarks.pictures import drawn
from sparing import sharding as sh
from sparing.data import bundled_text
from sparing.report import Figure, Progress, environment, format_number, plots, print_table
from sparing.report.atomic import write_whole
from sparing.report.environment import command
from sparing.seeds import stream

RESULT = Path(__file__).parents[1] / "results" / "network_curves.json"
ONE_PROCESS, BACKWARDS = "one process", "one process, opposite order"
ARMS = (ONE_PROCESS, BACKWARDS, "ddp", *PLANS)
BLOCKS, WIDTH, EACH, LENGTH, BATCH, MICROS, GROUPS, PER_GROUP = 2, 64, 8, 16, 16, 2, 2, 2
WORLD = GROUPS * PER_GROUP
RATE = 3e-3


# ---- on a rank


def text() -> Tensor:
    """The book that ships with the package, as numbers of its characters, int64."""
    book = bundled_text("alice")
    letters = {letter: at for at, letter in enumerate(sorted(set(book)))}
    return torch.tensor([letters[letter] for letter in book])


class Block(nn.Module):
    """Norm, two linear maps and a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, width) as it came."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """The next character from those before it: their embeddings side by side, blocks, a head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.letters, self.inward = nn.Embedding(vocabulary, EACH), nn.Linear(LENGTH * EACH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, shape (batch, vocabulary), of ids of shape (batch, length)."""
        x = self.inward(self.letters(ids).flatten(1))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def model(vocabulary: int, seed: int) -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(seed)
    return Net(vocabulary)


class Data:
    """Micro-batches of every rank: rows that begin anywhere in the text."""

    def __init__(self, seed: int, steps: int) -> None:
        self.ids = text()
        self.vocabulary = int(self.ids.max()) + 1
        size = (steps, MICROS, WORLD, BATCH)
        self.starts = torch.randint(len(self.ids) - LENGTH, size, generator=stream(seed, "curves"))

    def loss(self, net: nn.Module, step: int, micro: int, rank: int) -> Tensor:
        """Mean next-character loss of one micro-batch, in nats."""
        rows = self.ids[self.starts[step, micro, rank][:, None] + torch.arange(LENGTH + 1)]
        return F.cross_entropy(net(rows[:, :-1]), rows[:, -1])


Step = Callable[[int], float]
"""Takes an optimizer step by its number; the mean loss of this rank's micro-batches before it."""


def plain(net: nn.Module, data: Data, places: Sequence[tuple[int, int]], last: Callable[[int], Any]) -> Step:
    """A wrapped or plain module over some micro-batches (micro, rank); ``last`` surrounds each with what it needs."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)

    def step(number: int) -> float:
        total = 0.0
        for at, (micro, rank) in enumerate(places):
            with last(at):
                loss = data.loss(net, number, micro, rank)
                (loss / len(places)).backward()
            total += loss.item() / len(places)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def ours(engine: sh.Engine, data: Data, rank: int) -> Step:
    """An engine over this rank's micro-batches."""

    def step(number: int) -> float:
        total = 0.0
        for micro in range(MICROS):
            loss = data.loss(engine.model, number, micro, rank)
            engine.backward(loss)
            total += loss.item() / MICROS
        engine.step()
        return total

    return step


def flat(weights: dict[str, Tensor]) -> Tensor:
    """All weights one after the other, in double precision."""
    return torch.cat([weights[name].detach().double().flatten() for name in sorted(weights)])


def trained(arm: str, data: Data, mesh: sh.Mesh, steps: int, seed: int) -> tuple[list[float], Tensor]:
    """Losses of this rank and the weights at the end."""
    net, rank = model(data.vocabulary, seed), dist.get_rank()
    whole = [(micro, other) for micro in range(MICROS) for other in range(WORLD)]
    nothing = torch.autograd.set_grad_enabled
    if arm in {ONE_PROCESS, BACKWARDS}:
        step = plain(net, data, whole if arm == ONE_PROCESS else whole[::-1], lambda at: nothing(True))
        return [step(number) for number in range(steps)], flat(net.state_dict())
    if arm == "ddp":
        wrapped = DistributedDataParallel(net)
        own = [(micro, rank) for micro in range(MICROS)]
        step = plain(wrapped, data, own, lambda at: nothing(True) if at == MICROS - 1 else wrapped.no_sync())
        return [step(number) for number in range(steps)], flat(net.state_dict())
    optimizer = partial(torch.optim.AdamW, lr=RATE)
    engine = sh.shard_(net, arm, mesh, optimizer=optimizer, accumulate=MICROS)
    step = ours(engine, data, rank)
    losses = [step(number) for number in range(steps)]
    engine.close()
    return losses, flat(net.state_dict())


def curves_job(job: dict[str, Any], answer: Callable[..., None]) -> None:
    """Every arm in turn; rank 0 tells mean losses over ranks, and how far the weights end from those of one process."""
    steps, seed = job["steps"], job["seed"]
    data = Data(seed, steps)
    start, end = flat(model(data.vocabulary, seed).state_dict()), torch.zeros(())
    with sh.make_mesh(groups=GROUPS, per_group=PER_GROUP) as mesh:
        for arm in job["arms"]:
            answer("at", arm=arm, doing="train")
            if arm in {ONE_PROCESS, BACKWARDS} and dist.get_rank():
                continue
            losses, weights = trained(arm, data, mesh, steps, seed)
            if arm == ONE_PROCESS:
                end = weights
            mean = torch.tensor(losses, dtype=torch.float64)
            if arm not in {ONE_PROCESS, BACKWARDS}:
                dist.all_reduce(mean)
                mean /= WORLD
            if dist.get_rank() == 0:
                apart = float((weights - end).norm() / (end - start).norm())
                answer("curve", arm=arm, losses=mean.tolist(), weights=apart)


# ---- in one place


def measured(steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """One row per arm."""
    kept: dict[str, list[float]] = {}
    with Ranks(groups=GROUPS, per_group=PER_GROUP, network=None) as ranks:
        for found in ranks.do(kind="curves", arms=list(ARMS), steps=steps, seed=seed):
            if found["kind"] != "curve":
                continue
            kept[found["arm"]] = losses = found["losses"]
            off = apart(losses, kept[ONE_PROCESS])
            yield {
                "arm": found["arm"], "first": losses[0], "last": losses[-1], "apart_10": max(off[:10]),
                "apart": max(off), "weights": found["weights"], "losses": [round(loss, 10) for loss in losses],
            }  # fmt: skip


def apart(losses: Sequence[float], held: Sequence[float]) -> list[float]:
    """Relative deviation of a curve from another, step by step."""
    return [abs(mine - other) / other for mine, other in zip(losses, held, strict=True)]


def figure(document: dict[str, Any]) -> Figure:
    """The loss curves: one process on top of DDP on top of the plans, from the lowest of them to the highest."""
    rows = {row["arm"]: row for row in document["arms"]}
    steps = [float(step + 1) for step in range(len(rows[ONE_PROCESS]["losses"]))]
    columns = list(zip(*(rows[plan]["losses"] for plan in PLANS), strict=True))
    low, high, middle = ([end(column) for column in columns] for end in (min, max, median))
    most, noise = max(rows[plan]["apart"] for plan in PLANS), rows[BACKWARDS]["apart"]
    series = [
        plots.Series("one process", steps, rows[ONE_PROCESS]["losses"], "reference"),
        plots.Series("DDP", steps, rows["ddp"]["losses"], "rival"),
        plots.Series("14 plans", steps, middle, "ours", low, high, len(PLANS)),
    ]
    return plots.lines(
        series,
        title=f"The loss under every plan stays within {format_number(most)} of one process's; its own sums in another "
        f"order move it by {format_number(noise)}",
        x=plots.Axis("optimizer step"), y=plots.Axis("loss of the next character", "nat"),
        between="lowest to highest plan",
    )  # fmt: skip


def pictures() -> dict[Path, str]:
    """The picture for light and for dark pages, as SVG."""
    return drawn("sharding-curves", figure(json.loads(RESULT.read_text())))


def main() -> None:
    """Measure and write; ``python -m benchmarks.results`` draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    arms = []
    with Progress("curves", total=len(ARMS), unit="arm") as bar:
        for row in measured(options.steps, options.seed):
            arms.append(row)
            bar.advance(loss=row["last"])
    settings = {
        "seed": options.seed, "steps": options.steps, "groups": GROUPS, "per_group": PER_GROUP, "micros": MICROS,
        "batch": BATCH, "length": LENGTH, "blocks": BLOCKS, "width": WIDTH, "lr": RATE, "text": "alice",
    }  # fmt: skip
    cpu = sum(os.times()[:4])
    about = {"command": command(sys.argv), "environment": environment(), "settings": settings, "cpu": round(cpu)}
    write_whole(options.out, json.dumps(about | {"arms": arms}) + "\n")
    print_table(
        [{name: value for name, value in row.items() if name != "losses"} for row in arms],
        units={"first": "nat", "last": "nat"},
    )


if __name__ == "__main__":
    main()
