"""What low-bit wires cost in held-out loss: the next character of a real book, over two groups, paired by seed.

    python -m benchmarks.network.lowbit_loss              # 25 runs, ten minutes on two cores; resumable
    python -m benchmarks.network.lowbit_loss --only int4  # one arm

Exact wires, eight and four bits for gradients and changes under NNG, four bits without error feedback as the control of
what feedback does, and four bits under NNN, whose sums are rounded twice. Each group is one rank: what happens inside a
group is exact, and the same in all arms. Seeds draw weights and rows; all arms of a seed share both. Beside them stands
the entropy of the held-out text under counts of pairs of characters of the rest. The learning rate is that of exact
wires. Rows go into a JSON file one by one, and several workers may fill it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.network.curves import LENGTH, MICROS, Net, text
from benchmarks.network.paired_losses import PairedLosses
from sparing import sharding as sh
from sparing.seeds import stream

RESULT = Path(__file__).parents[1] / "results" / "network_lowbit_loss.json"
COMMAND = "python -m benchmarks.network.lowbit_loss"
GROUPS, STEPS, BATCH, RATE, WARMUP = 2, 3000, 32, 3e-3, 100
HELD_OUT = 0.1  # share of the text, at its end


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Wires and a plan."""

    plan: str = "NNG"
    slow: sh.LowBit | None = None


ARMS: Mapping[str, Arm] = {
    "exact": Arm(),
    "int8": Arm(slow=sh.LowBit(bits=8)),
    "int4": Arm(slow=sh.LowBit(bits=4)),
    "int4, no feedback": Arm(slow=sh.LowBit(bits=4, feedback=False)),
    "int4, NNN": Arm(plan="NNN", slow=sh.LowBit(bits=4)),
}


# ---- on a rank


class OneBlock(nn.Module):
    """The net as a single block, whose parameters travel in one bucket: few messages for a net this small."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Net(vocabulary)])

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, shape (batch, vocabulary), of ids of shape (batch, length)."""
        out: Tensor = self.blocks[0](ids)
        return out


def parts() -> tuple[Tensor, Tensor]:
    """Training and held-out characters, int64."""
    ids = text()
    cut = round(len(ids) * (1 - HELD_OUT))
    return ids[:cut], ids[cut:]


def loss_of(net: nn.Module, ids: Tensor, starts: Tensor) -> Tensor:
    """Mean next-character loss of rows that begin at ``starts``, in nats."""
    rows = ids[starts[:, None] + torch.arange(LENGTH + 1)]
    return F.cross_entropy(net(rows[:, :-1]), rows[:, -1])


@torch.no_grad()
def held_out(net: nn.Module, ids: Tensor) -> float:
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
    net = OneBlock(vocabulary)
    started = time.process_time()
    with sh.make_mesh(groups=GROUPS, per_group=1, wires=sh.Wires(slow=arm.slow)) as mesh:
        optimizer = partial(torch.optim.AdamW, lr=RATE)
        engine = sh.shard_(net, arm.plan, mesh, optimizer=optimizer, accumulate=MICROS)
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: rate_at(step, steps))
        draws = stream(seed, "lowbit")
        for step in range(steps):
            if step % 100 == 0:
                answer("at", arm=job["arm"], doing=f"step {step}")
            starts = torch.randint(len(train) - LENGTH, (MICROS, GROUPS, BATCH), generator=draws)
            for micro in range(MICROS):
                engine.backward(loss_of(engine.model, train, starts[micro, mesh.rank]))
            engine.step()
            schedule.step()
        engine.check()
        sent, masters = dict(mesh.counter.sent), engine.full_state_dict(masters=True)
        engine.close()
        if mesh.rank == 0:
            fresh = OneBlock(vocabulary)
            fresh.load_state_dict(masters)
            answer(
                "trained", held_out=held_out(net, rest), masters=held_out(fresh, rest), sent=sent,
                train=held_out(net, train[: len(rest)]), cpu=time.process_time() - started,
            )  # fmt: skip


# ---- in one place


def bigram() -> float:
    """Cross-entropy of the held-out text under smoothed counts of pairs of the rest, in nats: a trivial control."""
    train, rest = parts()
    size = int(text().max()) + 1
    counts = torch.full((size, size), 0.1, dtype=torch.float64)
    counts.index_put_((train[:-1], train[1:]), torch.ones((), dtype=torch.float64), accumulate=True)
    return -(counts / counts.sum(1, keepdim=True)).log()[rest[:-1], rest[1:]].mean().item()


STUDY = PairedLosses(
    name="lowbit", arms=list(ARMS), against="exact", steps=STEPS, sizes=(GROUPS, 1),
    kept=("held_out", "masters", "train", "sent", "cpu"),
)  # fmt: skip


def main() -> None:
    """Fill the file, then print it."""
    options = STUDY.parser(__doc__, RESULT).parse_args()
    STUDY.told(STUDY.fill(options, COMMAND), bigram())


if __name__ == "__main__":
    main()
