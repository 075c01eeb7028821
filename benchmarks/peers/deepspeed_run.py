"""DeepSpeed 0.19.8, ZeRO-1, 2 and 3 on CPU over gloo, with the torch AdamW that the other arms use.

Its engine divides the loss by the accumulation steps and knows from their count when to reduce and to update. Stage 3
gathers every parameter (``stage3_param_persistence_threshold``). By its defaults it frees none between forward and
backward in a model of less than a billion parameters, so it holds the whole model then and gathers once less than the
plan GGG; ``lean`` gives it two blocks to keep, which is what GGG holds and what it would do with a large model.
"""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch

from benchmarks.network.arms import Running, Seat
from benchmarks.network.problem import LEARNING_RATE, Data, model


class Zero:
    """DeepSpeed's engine."""

    def __init__(self, engine: Any, data: Data, micros: int) -> None:
        self.engine, self.data, self.micros = engine, data, micros

    def step(self) -> float:
        """One step."""
        total = 0.0
        for micro in range(self.micros):
            loss = self.data.loss(self.engine, micro)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / self.micros
        return total

    def close(self) -> None:
        """Let its hooks and buffers go."""
        self.engine.destroy()


def settings(seat: Seat, stage: int, lean: bool) -> dict[str, Any]:
    """DeepSpeed's JSON."""
    cell = seat.cell
    block = 2 * cell.width * (cell.width + 1)
    zero = {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    if lean:
        zero |= {
            "stage3_max_live_parameters": 2 * block,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": block,
        }
    return {
        "train_micro_batch_size_per_gpu": cell.batch,
        "gradient_accumulation_steps": cell.accumulate,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def prepare(seat: Seat, stage: int, *, lean: bool = False) -> Running:
    """One stage on this rank; torch.distributed is there already."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # its shared memory joins ranks of one machine; here groups stand for machines, and it would take minutes to compile
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    net = model(seat.cell)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, config=settings(seat, stage, lean), dist_init_required=False
    )
    return Zero(engine, seat.data, seat.cell.accumulate)
