"""Time one linear layer, masked dense and sparse: forward and backward, in seconds on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparing.errors import require
from sparing.scaling.sparse.layers import SparseLinear, unsupported
from sparing.seeds import stream


class Seconds(NamedTuple):
    """Median seconds of one forward and backward pass."""

    # masked dense: the product with a weight that holds zeros, its two gradients, the mask on the weight's
    dense: float
    sparse: float  # CSR; infinite where it cannot run


def even_mask(fan_out: int, fan_in: int, density: float, *, seed: int = 0) -> Tensor:
    """Return a mask, bool, with the same number of live weights in every row, at least one."""
    draws = torch.rand(fan_out, fan_in, generator=stream(seed, "timing", fan_out, fan_in))
    chosen = draws.topk(max(1, round(density * fan_in)), dim=1).indices
    return torch.zeros(fan_out, fan_in, dtype=torch.bool).scatter_(1, chosen, value=True)


def masked_dense(x: Tensor, weight: Tensor, mask: Tensor) -> Callable[[], None]:
    """Return one forward and backward pass with zeros in the weight and a mask on its gradient."""

    def run() -> None:
        F.linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        weight.grad.mul_(mask)
        weight.grad = x.grad = None

    return run


def sparse(x: Tensor, layer: SparseLinear) -> Callable[[], None]:
    """Return one forward and backward pass of a sparse layer."""

    def run() -> None:
        layer(x).sum().backward()
        layer.weight.grad = x.grad = None

    return run


def interleave(runs: list[Callable[[], None]], *, rounds: int = 5) -> list[list[float]]:
    """Return seconds by candidate and round, after a warm-up; in turn, so that a slower machine slows them equally."""
    # Processor time is free of other load, but would add up the time of several threads.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, seconds in zip(runs, taken, strict=True):
            start = clock()
            run()
            if turn:
                seconds.append(clock() - start)
    return taken


def time_layer(
    d_in: int, d_out: int, density: float, tokens: int, *, dtype: torch.dtype = torch.float32, rounds: int = 5
) -> Seconds:
    """Return median seconds of one layer, dense and sparse, on ``tokens`` random rows; infinite without CSR."""
    require(0 < density <= 1, "density", density, "it is a share of live weights", "give a number in (0, 1]")
    least = min(d_in, d_out, tokens, rounds)
    require(least >= 1, "time_layer", least, "sizes and rounds are counts", "give at least one")
    draw = partial(torch.randn, generator=stream(0, "timing", "numbers"), dtype=torch.float32)
    mask = even_mask(d_out, d_in, density)
    x = draw(tokens, d_in).to(dtype).requires_grad_()
    weight = (draw(d_out, d_in) * mask).to(dtype)
    with torch.enable_grad():
        candidates = [masked_dense(x, weight.clone().requires_grad_(), mask)]
        if not unsupported(weight):
            candidates.append(sparse(x, SparseLinear(weight, mask)))
        medians = [statistics.median(seconds) for seconds in interleave(candidates, rounds=rounds)]
    return Seconds(medians[0], medians[1] if len(medians) > 1 else float("inf"))
