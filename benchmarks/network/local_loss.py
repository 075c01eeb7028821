"""What local steps cost in held-out loss: the next character of a real book, over four groups, paired by seed.

    python -m benchmarks.network.local_loss                # 40 runs, 25 minutes on two cores; resumable
    python -m benchmarks.network.local_loss --only "H 32"  # one arm

Groups meet after every H = 1, 8 or 32 steps, with DiLoCo's outer step (rate 0.7, momentum 0.9), their differences exact
or (8 and 32) in eight bits. Beside them: ordinary steps of all ranks, which is what local steps stand in for; plain
means of weights (rate 1, no momentum) at H = 32, which is local SGD; and one group that never hears of the others, on a
quarter of the rows, below which no arm should fall. Seeds draw weights and rows; all arms of a seed share both, the
inner rate, and its schedule. The entropy of the held-out text under counts of pairs of characters stands below. Every
run is four processes of the real engine. Rows go into a JSON file one by one, and several workers may fill it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import onednn
from benchmarks.network.curves import LENGTH, text
from benchmarks.network.lowbit_loss import OneBlock, bigram, held_out, loss_of, parts, rate_at
from benchmarks.network.paired_losses import PairedLosses
from sparing import sharding as sh
from sparing.seeds import stream

RESULT = Path(__file__).parents[1] / "results" / "network_local_loss.json"
COMMAND = "python -m benchmarks.network.local_loss"
GROUPS, STEPS, BATCH, RATE = 4, 3200, 32, 3e-3
EIGHT = sh.LowBit(bits=8)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How groups meet."""

    local: sh.LocalSteps | None = None
    alone: bool = False
    """Whether the first group never meets another, as if there were no others."""


ORDINARY = "ordinary"
ARMS: Mapping[str, Arm] = {
    ORDINARY: Arm(),
    **{f"H {every}": Arm(local=sh.LocalSteps(every=every)) for every in (1, 8, 32)},
    **{f"H {every}, int8": Arm(local=sh.LocalSteps(every=every, wire=EIGHT)) for every in (8, 32)},
    "H 32, mean": Arm(local=sh.LocalSteps(every=32, rate=1.0, momentum=0.0)),
    "one group": Arm(alone=True),
}


# ---- on a rank


def local_job(job: dict[str, Any], answer: Callable[..., None]) -> None:
    """Train one arm with one seed; rank 0 tells what it ends with."""
    onednn.use()
    seed, steps, arm = job["seed"], job["steps"], ARMS[job["arm"]]
    train, rest = parts()
    torch.manual_seed(seed)
    net, started = OneBlock(int(text().max()) + 1), time.process_time()
    with sh.make_mesh(groups=GROUPS, per_group=1) as mesh:
        # a group that never meets: an interval longer than the run, and no outer step at its end
        local = sh.LocalSteps(every=steps + 1) if arm.alone else arm.local
        optimizer = partial(torch.optim.AdamW, lr=RATE)
        engine = sh.shard_(net, "NNN", mesh, optimizer=optimizer, local=local)
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: rate_at(step, steps))
        draws = stream(seed, "local")
        for step in range(steps):
            if step % 100 == 0:
                answer("at", arm=job["arm"], doing=f"step {step}")
            starts = torch.randint(len(train) - LENGTH, (GROUPS, BATCH), generator=draws)
            engine.backward(loss_of(engine.model, train, starts[mesh.rank]))
            engine.step()
            schedule.step()
        engine.check()
        sent = dict(mesh.counter.sent)
        if not arm.alone:
            engine.outer_step()
        if mesh.rank == 0:
            with torch.no_grad():
                found = {"held_out": held_out(net, rest), "train": held_out(net, train[: len(rest)])}
            answer("trained", **found, sent=sent, cpu=time.process_time() - started)
        if arm.alone:
            engine.outer_step()
        engine.close()


# ---- in one place


STUDY = PairedLosses(
    name="local", arms=list(ARMS), against=ORDINARY, steps=STEPS, sizes=(GROUPS, 1),
    kept=("held_out", "train", "sent", "cpu"),
)  # fmt: skip


def main() -> None:
    """Fill the file, then print it."""
    options = STUDY.parser(__doc__, RESULT).parse_args()
    onednn.use()  # in the ranks, too; here so that rows say it
    STUDY.told(STUDY.fill(options, COMMAND), bigram())


if __name__ == "__main__":
    main()
