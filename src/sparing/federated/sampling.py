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


def body_of(model: nn.Module, schedule: Schedule) -> tuple[tuple[str, ...], ...]:
    """Return the parameter names of each body block, where the schedule draws blocks.

    Args:
        model: Any module that ``sparing.blocks.find_blocks`` can divide.
        schedule: Its ``blocks``.

    Returns:
        Canonical names by block; empty where every block trains.

    Raises:
        UserError: If the model has fewer body blocks than are to be drawn, or none can be found.
    """
    if schedule.blocks is None:
        return ()
    body = tuple(tuple(block.params) for block in find_blocks(model) if block.role == "body")
    why = f"the body has {len(body)} blocks"
    require(schedule.blocks <= len(body), "Schedule.blocks", schedule.blocks, why, f"pass at most {len(body)}")
    return body


def resting(
    body: tuple[tuple[str, ...], ...], schedule: Schedule, number: int, client: int, seed: int
) -> frozenset[str]:
    """Return the parameters that a client does not train in a round.

    Args:
        body: As ``body_of`` gives it.
        schedule: Its ``blocks``.
        number: Of the round, 0 for the first.
        client: Its number.
        seed: The experiment.

    Returns:
        Names in the body blocks that were not drawn; empty where every block trains.
    """
    if schedule.blocks is None:
        return frozenset()
    order = torch.randperm(len(body), generator=stream(seed, "federated", "blocks", number, client))
    return frozenset(name for block in order[schedule.blocks :].tolist() for name in body[block])
