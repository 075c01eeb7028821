"""What low-bit wires cost in held-out loss: the next character of a real book, over 2 × 2 local ranks, paired by seed.

    python -m benchmarks.network.lowbit_loss              # 25 runs, 2.5 processor hours; goes on where it stopped
    python -m benchmarks.network.lowbit_loss --only int4  # one arm

Exact wires, eight and four bits for gradients and changes under IIG, four bits without error feedback as the control of
what feedback does, and four bits under III, whose sums are rounded twice. Seeds draw weights and rows; all arms of a
seed share both. Beside them stands the entropy of the held-out text under counts of pairs of characters of the rest.
The learning rate is that of exact wires. Rows go into a JSON file one by one, and several workers may fill it.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layers.store import Row, Rows, Store, work
from benchmarks.network.curves import LENGTH, MICROS, WORLD, Net, text
from benchmarks.network.runs import Ranks
from sparing import sharding as sh
from sparing.report import print_table
from sparing.seeds import stream

RESULT = Path(__file__).parents[1] / "results" / "network_lowbit_loss.json"
COMMAND = "python -m benchmarks.network.lowbit_loss"
SEEDS, STEPS, BATCH, RATE, WARMUP = 5, 3000, 16, 3e-3, 100
HELD_OUT = 0.1  # share of the text, at its end
# Quantile of Student's law for two-sided intervals of 95 % over five pairs.
T_95 = 2.776


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Wires and a plan."""

    plan: str = "IIG"
    slow: sh.LowBit | None = None


ARMS: Mapping[str, Arm] = {
    "exact": Arm(),
    "int8": Arm(slow=sh.LowBit(bits=8)),
    "int4": Arm(slow=sh.LowBit(bits=4)),
    "int4, no feedback": Arm(slow=sh.LowBit(bits=4, feedback=False)),
    "int4, III": Arm(plan="III", slow=sh.LowBit(bits=4)),
}


# ---- on a rank


def parts() -> tuple[Tensor, Tensor]:
    """Training and held-out characters, int64."""
    ids = text()
    cut = round(len(ids) * (1 - HELD_OUT))
    return ids[:cut], ids[cut:]


def loss_of(net: torch.nn.Module, ids: Tensor, starts: Tensor) -> Tensor:
    """Mean next-character loss of rows that begin at ``starts``, in nats."""
    rows = ids[starts[:, None] + torch.arange(LENGTH + 1)]
    return F.cross_entropy(net(rows[:, :-1]), rows[:, -1])


@torch.no_grad()
def held_out(net: torch.nn.Module, ids: Tensor) -> float:
    """Mean loss of every character that has enough before it, in nats."""
    every = torch.arange(len(ids) - LENGTH)
    total = sum(loss_of(net, ids, starts).item() * len(starts) for starts in every.split(4096))
    return total / len(every)


def rate_at(step: int, steps: int) -> float:
    """Share of the learning rate: a short rise, then half a cosine."""
    return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def lowbit_job(job: dict[str, Any], answer: Callable[..., None]) -> None:
    """Train one arm with one seed; rank 0 tells what it ends with."""
    seed, steps, arm = job["seed"], job["steps"], ARMS[job["arm"]]
    train, rest = parts()
    torch.manual_seed(seed)
    vocabulary = int(text().max()) + 1
    net = Net(vocabulary)
    started = time.process_time()
    with sh.make_mesh(groups=2, per_group=2, wires=sh.Wires(slow=arm.slow)) as mesh:
        optimizer = partial(torch.optim.AdamW, lr=RATE)
        engine = sh.shard_(net, arm.plan, mesh, optimizer=optimizer, accumulate=MICROS)
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: rate_at(step, steps))
        draws = stream(seed, "lowbit")
        for step in range(steps):
            if step % 100 == 0:
                answer("at", arm=job["arm"], doing=f"step {step}")
            starts = torch.randint(len(train) - LENGTH, (MICROS, WORLD, BATCH), generator=draws)
            for micro in range(MICROS):
                engine.backward(loss_of(engine.model, train, starts[micro, mesh.rank]))
            engine.step()
            schedule.step()
        engine.check()
        sent, masters = dict(mesh.counter.sent), engine.full_state_dict(masters=True)
        engine.close()
        if mesh.rank == 0:
            fresh = Net(vocabulary)
            fresh.load_state_dict(masters)
            answer(
                "trained", held_out=held_out(net, rest), masters=held_out(fresh, rest), sent=sent,
                train=held_out(net, train[: len(rest)]), cpu=time.process_time() - started,
            )  # fmt: skip


# ---- in one place


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    steps: int = STEPS

    @property
    def key(self) -> str:
        """Name of the row."""
        return f"{self.arm}, seed {self.seed}" + ("" if self.steps == STEPS else f", {self.steps} steps")


def left(rows: Rows, arms: Sequence[str], steps: int) -> list[Run]:
    """What is missing, seed by seed, so that whatever is there is paired."""
    every = (Run(arm=arm, seed=seed, steps=steps) for seed in range(SEEDS) for arm in arms)
    return [run for run in every if run.key not in rows]


def measured(run: Run) -> Row:
    """Train it."""
    with Ranks(groups=2, per_group=2, network=None) as ranks:
        answers = list(ranks.do(kind="lowbit", arm=run.arm, seed=run.seed, steps=run.steps))
    found = next(answer for answer in answers if answer["kind"] == "trained")
    kept = ("held_out", "masters", "train", "sent", "cpu")
    return {"arm": run.arm, "seed": run.seed, "steps": run.steps} | {name: found[name] for name in kept}


def bigram() -> float:
    """Cross-entropy of the held-out text under smoothed counts of pairs of the rest, in nats: a trivial control."""
    train, rest = parts()
    size = int(text().max()) + 1
    counts = torch.full((size, size), 0.1, dtype=torch.float64)
    counts.index_put_((train[:-1], train[1:]), torch.ones((), dtype=torch.float64), accumulate=True)
    return -(counts / counts.sum(1, keepdim=True)).log()[rest[:-1], rest[1:]].mean().item()


def summary(rows: Rows) -> list[dict[str, Any]]:
    """By arm: held-out loss, its distance to exact wires by seed, bytes between groups."""
    whole = {(row["arm"], row["seed"]): row for row in rows.values() if row["steps"] == STEPS}
    found = []
    for arm in ARMS:
        seeds = [seed for seed in range(SEEDS) if (arm, seed) in whole and ("exact", seed) in whole]
        if not seeds:
            continue
        losses = torch.tensor([whole[arm, seed]["held_out"] for seed in seeds], dtype=torch.float64)
        apart = losses - torch.tensor([whole["exact", seed]["held_out"] for seed in seeds], dtype=torch.float64)
        half = T_95 * apart.std().item() / math.sqrt(len(seeds)) if len(seeds) == SEEDS else math.nan
        found.append({
            "arm": arm, "seeds": len(seeds), "held out": losses.mean().item(), "lowest": losses.min().item(),
            "highest": losses.max().item(), "above exact": apart.mean().item(), "± 95 %": half,
            "sent": whole[arm, seeds[0]]["sent"]["inter"],
        })  # fmt: skip
    return found


def told(rows: Rows) -> None:
    """Print what is there."""
    if found := summary(rows):
        print_table(found, units={"held out": "nat", "above exact": "nat", "sent": "B"})
        print(f"pairs of characters: {bigram():.3f} nat")


def main() -> None:
    """Fill the file, then print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ARMS), help="one arm")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    arms = [options.only] if options.only else list(ARMS)
    claims = Path(tempfile.gettempdir()) / f"sparing-lowbit-{os.getuid()}"
    store = Store(options.out, command=COMMAND, folder=claims)
    work(store, lambda rows: left(rows, arms, options.steps), measured)
    told(store.rows())


if __name__ == "__main__":
    main()
