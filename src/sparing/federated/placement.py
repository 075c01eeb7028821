"""Where the tensors of a run lie: the model and the server's state on one device, clients' rows wherever they are.

Batches move to the model's device when they are used. What a client keeps between its rounds goes to host memory, which
holds the states of more clients than a device does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.federated.methods.interface import Sent, Update

HOST: Final = torch.device("cpu")


def device_of(model: nn.Module) -> torch.device:
    """Return the one device of a model; refuse several, and devices on which a round cannot be summed."""
    found = list(dict.fromkeys(value.device for value in (*model.parameters(), *model.buffers())))
    names = " and ".join(map(str, found))
    do = "put it on one, as by model.to(device)"
    require(len(found) < 2, "model", f"on {names}", "a client's step and the server's sums take it together", do)
    device = found[0] if found else HOST
    why, do = "it holds no numbers there", "make it on the CPU or a GPU"
    require(device.type != "meta", "model", "on meta", why, do)
    why = "sums of a round are in float64, which this device lacks"
    require(device.type != "mps", "model", f"on {device}", why, "make it on the CPU")
    return device


def placed(tree: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a tree of tensors on a device; those that lie there are not copied, and what is no tensor stays."""
    return {
        name: placed(value, device) if isinstance(value, Mapping)
        else value.to(device) if isinstance(value, Tensor) else value
        for name, value in tree.items()
    }  # fmt: skip


def sent_on(sent: Sent, device: torch.device) -> Sent:
    """Return what the server sends, on a client's device."""
    return Sent(placed(sent.params, device), placed(sent.extras, device), placed(sent.buffers, device))


def update_on(update: Update, device: torch.device) -> Update:
    """Return an update on the server's device."""
    return replace(
        update,
        params=placed(update.params, device),
        extras=placed(update.extras, device),
        buffers=placed(update.buffers, device),
    )


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed torch's global generators within a block, also those of CUDA devices in use; they come back as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(number)
        yield
