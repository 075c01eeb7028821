"""Layer sampling: each client of a round trains and sends only a few body blocks, drawn for it.

What is no body block (embedding, tail, head) always trains and travels. Over many clients every block is trained, and
the server averages each parameter over those who sent it.
"""

from __future__ import annotations

import torch
from torch import nn

from sparing.blocks import find_blocks
from sparing.errors import require
from sparing.federated.settings import Schedule
from sparing.seeds import stream


def body_params(model: nn.Module, schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """Return the parameter names of each body block; empty where the schedule draws no blocks."""
    if schedule.blocks is None:
        return ()
    body = tuple(tuple(block.params) for block in find_blocks(model) if block.role == "body")
    why = f"the body has {len(body)} blocks"
    require(schedule.blocks <= len(body), "Schedule.blocks", schedule.blocks, why, f"pass at most {len(body)}")
    return body


def frozen_names(
    body: tuple[tuple[str, ...], ...], schedule: Schedule, number: int, client: int, seed: int
) -> frozenset[str]:
    """Return the parameters that a client does not train in a round: those of the body blocks not drawn for it."""
    if schedule.blocks is None:
        return frozenset()
    # Labelled by round and client: what others draw, and in which order, changes nothing.
    order = torch.randperm(len(body), generator=stream(seed, "federated", "blocks", number, client))
    return frozenset(name for block in order[schedule.blocks :].tolist() for name in body[block])
