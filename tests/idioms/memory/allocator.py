"""The answer of the allocator: what the CPU handed out at once, without any ledger of ours."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.utils._pytree import tree_leaves


def growths(works: Sequence[Callable[[], object]]) -> list[int]:
    """Growth of what the allocator holds at its peak inside each piece of work, by torch's profiler."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        for number, work in enumerate(works):
            with torch.profiler.record_function(f"work {number}"):
                work()
    found = {}
    for event in _below(profiler.profiler.kineto_results.experimental_event_tree()):
        if event.name.startswith("work "):
            sizes = [(e.start_time_ns, e.extra_fields.alloc_size) for e in _below([event]) if _allocates(e)]
            found[event.name] = _peak(size for _, size in sorted(sizes, key=lambda pair: pair[0]))
    return [found[f"work {number}"] for number in range(len(works))]


def _below(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def _allocates(event: Any) -> bool:
    return bool(event.tag == _EventType.Allocation)


def _peak(sizes: Iterable[int]) -> int:
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return peak


def standing(model: nn.Module, optimizer: torch.optim.Optimizer, *others: Tensor) -> int:
    """Bytes of all storages of parameters, buffers and optimizer state, each once."""
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    tensors = (*model.parameters(), *model.buffers(), *state, *others)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
