"""How fast a device really does what a step of training consists of: passes of a block, and an optimizer's step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from sparing.memory.passes import trace

# width and tokens of the block, and elements of the optimizer's state: more than caches hold, seconds at the most
_SIZES: Final = {"cuda": (4096, 4096, 2**28), "cpu": (1024, 512, 2**24)}
ROUNDS: Final = 5  # repetitions at least, after a first that loads kernels (count)
SECONDS: Final = 1.0  # of all repetitions at least
MEASURED: Final = 3  # speeds (count): two number formats and the optimizer's step
STEP: Final = "step of AdamW"
MOVED: Final = 28  # bytes per element of a step of AdamW in float32: four tensors are read and three written


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a device reached in one number format; medians over ``rounds``."""

    what: str
    dtype: str
    rate: float  # operations, or bytes, per second
    spread: float  # largest less smallest rate, as a share of the median
    rounds: int


class _Block(nn.Module):
    """A Transformer block of torch, as a model that returns its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        heads = math.gcd(width, max(width // 64, 1))  # of 64, where that divides
        how = {"dropout": 0.0, "batch_first": True, "norm_first": True, "bias": False}
        self.block = nn.TransformerEncoderLayer(width, heads, 4 * width, **how)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.block(x).square().mean()
        return loss


def speeds(device: torch.device, *, width: int | None = None, tokens: int | None = None) -> Iterator[Speed]:
    """Measure passes of a block of ``width`` over a row of ``tokens``, in both formats of `plan`, and AdamW's step.

    A block's operations are those of its matrix products and attention, forward and backward, as `plan` counts them.
    """
    default_width, default_tokens, elements = _SIZES[device.type]
    width, tokens = width or default_width, tokens or default_tokens
    for dtype in (torch.bfloat16, torch.float32):
        yield _passes(device, dtype, width, tokens)
    yield _step(device, elements)


def _passes(device: torch.device, dtype: torch.dtype, width: int, tokens: int) -> Speed:
    block = _Block(width).to(device, dtype)
    row = torch.randn(1, tokens, width, device=device, dtype=dtype, requires_grad=True)

    def once() -> None:
        block.zero_grad(set_to_none=True)
        block(row).backward()

    size = operations(width, tokens)
    return _speed("passes of a block", dtype, size, once, device)


def operations(width: int, tokens: int) -> int:
    """Operations of both passes of the block in matrix products and attention; a multiply-add counts two."""
    with torch.device("meta"):
        block = _Block(width)
    row = {"x": ((1, tokens, width), torch.float32)}
    return trace(block, row, loss=lambda model, batch: model(batch["x"].requires_grad_())).flops


def _step(device: torch.device, elements: int) -> Speed:
    weight = nn.Parameter(torch.zeros(elements, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)

    def once() -> None:
        optimizer.step()

    return _speed(STEP, torch.float32, MOVED * elements, once, device)


def _speed(what: str, dtype: torch.dtype, size: int, once: Callable[[], None], device: torch.device) -> Speed:
    times: list[float] = []
    while len(times) <= ROUNDS or sum(times[1:]) < SECONDS:
        begin = time.perf_counter()
        once()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    rates = [size / taken for taken in times[1:]]
    middle, name = statistics.median(rates), str(dtype).removeprefix("torch.")
    return Speed(what=what, dtype=name, rate=middle, spread=(max(rates) - min(rates)) / middle, rounds=len(rates))
