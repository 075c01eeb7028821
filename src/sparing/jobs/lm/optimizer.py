"""The optimizers that fit a model, as values: each makes itself, and says from shapes what it holds.

With 32-bit masters of 16-bit weights an optimizer steps on float32: ask it with ``torch.float32``, and count 4 bytes
per weight for the master besides and, during the step, 4 for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch

from sparing.errors import UserError, require
from sparing.jobs.lm.lowbit import AdamW4bit, AdamW8bit, Device, PagedAdamW8bit
from sparing.jobs.lm.lowrank import Adafactor, Apollo, ApolloMini, GaLore
from sparing.jobs.lm.names import OptimizerName
from sparing.jobs.lm.one_by_one import FLOAT, INSTALL, AllOnDevice, OneByOne, is_installed, largest, numel

__all__ = [
    "Adafactor", "AdamW", "AdamW4bit", "AdamW8bit", "Apollo", "ApolloMini", "Device", "GaLore",
    "OffloadedAdamW", "Optimizer", "PagedAdamW8bit", "adamw", "check_optimizer", "optimizer_of",
    "reason", "shared_of",
]  # fmt: skip


# Parameters, or groups of them -> the optimizer, without state.
adamw: Callable[..., torch.optim.AdamW] = partial(torch.optim.AdamW, fused=True)


class Optimizer(Protocol):
    """A way to step, as a value."""

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer over parameter groups, without state."""
        ...

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter of this shape and type."""
        ...

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held in host memory instead."""
        ...

    def shared(self) -> int:
        """Bytes held once, whatever trains."""
        ...

    def step(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Bytes that a step over these parameters needs at most at once beside them, their gradients and state."""
        ...


@dataclass(frozen=True, kw_only=True)
class AdamW(AllOnDevice):
    """AdamW of torch in its fused form; moments have the type of the weights.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state."""
        return adamw(groups, lr=lr)

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter: two moments and the number of the step."""
        return 2 * numel(shape) * dtype.itemsize + FLOAT

    def step(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Bytes of temporaries: the kernel has none."""
        return 0


def _to_host(value: torch.Tensor) -> torch.Tensor:
    """In host memory: as it is, or a copy that is pinned, so that a CUDA device need not be waited for."""
    if not value.is_cuda:
        return value
    host = torch.empty_like(value, device="cpu", pin_memory=True)
    return host.copy_(value, non_blocking=True)


class _Offloaded(OneByOne, torch.optim.AdamW):
    """Fused AdamW whose state visits the device, one parameter at a time."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        for group in self.param_groups:
            group["offloaded"] = True  # restored state stays in host memory

    def open_(self, state: dict[str, Any], p: torch.Tensor, group: dict[str, Any]) -> None:
        state.update({key: value.to(p.device) for key, value in state.items()})

    def close_(self, state: dict[str, Any], p: torch.Tensor) -> None:
        state.update({key: _to_host(value) for key, value in state.items()})


@dataclass(frozen=True, kw_only=True)
class OffloadedAdamW:
    """``AdamW`` whose state is in pinned host memory between steps, and on the device for one parameter at a time.

    To the same bits as ``AdamW``. A step moves the state both ways: 8 bytes per 16-bit weight, 16 per 32-bit one. The
    optimizer of this kind in torchao copies gradients to the host before they are clipped, so that clipping does
    nothing, and cannot freeze a block.
    """

    device: Device = "cuda"
    """Where the model is: on the CPU, device and host memory are one."""

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state."""
        return _Offloaded(groups, lr=lr, fused=True)

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held on the device between steps for a parameter."""
        return AdamW().state(shape, dtype) if self.device == "cpu" else 0

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes held in host memory between steps for a parameter."""
        return AdamW().state(shape, dtype) if self.device == "cuda" else 0

    def shared(self) -> int:
        """Bytes held once, whatever trains."""
        return 0

    def step(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
        """Bytes of temporaries: the state of one parameter."""
        return largest(self.host(shape, dtype) for shape in shapes)


# optimizer -> libraries it comes from
_LIBRARIES: Final[dict[str, tuple[str, ...]]] = {
    "adamw-8bit": ("bitsandbytes",),
    "paged-adamw-8bit": ("bitsandbytes",),
    "adamw-4bit": ("torchao",),
    # theirs import it
    "apollo": ("bitsandbytes", "apollo_torch"),
    "apollo-mini": ("bitsandbytes", "apollo_torch"),
    "galore": ("bitsandbytes", "galore_torch"),
}


def check_optimizer(name: str) -> None:
    """Refuse an optimizer whose library is not installed; nothing is imported."""
    for library in _LIBRARIES.get(name, ()):
        require(is_installed(library), "optimizer", name, f"{library} is not installed", INSTALL)


def optimizer_of(name: OptimizerName, *, device: Device, apollo: Apollo, galore: GaLore) -> Optimizer:
    """The optimizer that a setting names; ``apollo`` and ``galore`` are the values for theirs."""
    made: dict[str, Callable[[], Optimizer]] = {
        "adamw": AdamW,
        "adamw-8bit": partial(AdamW8bit, device=device),
        "paged-adamw-8bit": partial(PagedAdamW8bit, device=device),
        "adamw-4bit": partial(AdamW4bit, device=device),
        "adafactor": Adafactor,
        "apollo": lambda: apollo,
        "apollo-mini": ApolloMini,
        "galore": lambda: galore,
        "offloaded-adamw": partial(OffloadedAdamW, device=device),
    }
    return made[name]()


def shared_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Tensors that an optimizer holds once for all parameters."""
    return optimizer.shared if isinstance(optimizer, OneByOne) else []


def reason(error: Exception) -> str:
    """Why a prediction failed, in a clause that begins with "not predicted"."""
    if isinstance(error, UserError):
        return f"not predicted: {error}"
    lines = str(error).strip().splitlines()
    return f"not predicted: {type(error).__name__}: {' '.join(lines[0].split())[:160] if lines else 'without a word'}"
