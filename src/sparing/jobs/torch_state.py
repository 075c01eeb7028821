"""Torch's own state around a model: its device, its evaluation mode, and the global generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.seeds import stream


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the modes of all modules come back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def seeded(seed: int, *labels: str | int, device: torch.device) -> Iterator[None]:
    """Let the global generators be a named stream for a while; they come back as they were.

    The generator of ``device`` is set besides the CPU's. Dropout can only draw from the global generators. Setting them
    from (seed, step) makes a step a pure function of its number, so that a resumed run drops the same units.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        generator = stream(seed, *labels)
        torch.set_rng_state(generator.get_state())
        if devices:
            torch.cuda.manual_seed(generator.initial_seed())
        yield


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Move a tensor from host memory; to a CUDA device through pinned memory, and without waiting for it."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's first parameter."""
    return next(model.parameters()).device


def device_for(choice: str) -> torch.device:
    """The device that a setting means: ``auto``, ``cpu`` or ``cuda``, which is refused where there is none."""
    there = torch.cuda.is_available()
    require(there or choice != "cuda", "device", "cuda", "no CUDA device is visible", "pass --device cpu")
    return torch.device("cuda" if there and choice != "cpu" else "cpu")
