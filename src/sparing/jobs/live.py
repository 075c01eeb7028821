"""What every job does with a live model: where it lives, what its dropout draws, how it is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from sparing.errors import require
from sparing.seeds import stream


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the modes of all modules come back.

    Args:
        model: Any module.

    Yields:
        Nothing.
    """
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

    Dropout can only draw from the global generators. Setting them from (seed, step) makes a step a pure function of
    its number, so that a resumed run drops the same units.

    Args:
        seed: Seed of the run.
        labels: What the numbers are for.
        device: Whose generator to set besides the CPU's.

    Yields:
        Nothing.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        generator = stream(seed, *labels)
        torch.set_rng_state(generator.get_state())
        if devices:
            torch.cuda.manual_seed(generator.initial_seed())
        yield


def device_of(model: nn.Module) -> torch.device:
    """Where a model lives.

    Args:
        model: Any module with parameters.

    Returns:
        The device of its first parameter.
    """
    return next(model.parameters()).device


def device_for(choice: str) -> torch.device:
    """The device that a setting means.

    Args:
        choice: ``auto``, ``cpu`` or ``cuda``.

    Returns:
        The device.

    Raises:
        UserError: If CUDA was asked for and there is none.
    """
    there = torch.cuda.is_available()
    require(there or choice != "cuda", "device", "cuda", "no CUDA device is visible", "pass --device cpu")
    return torch.device("cuda" if there and choice != "cpu" else "cpu")
