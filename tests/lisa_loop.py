"""The plain training loop that the layer-sampling tests drive, and comparisons to the last bit."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import zoo
from sparing.layersample import LayerSampling, Sampler

AdamW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=False)


def setup(settings: LayerSampling | None = None, *, seed: int = 0, make=zoo.llama, optimizer=AdamW, **changes):
    """Model, optimizer and sampler, fresh and always the same."""
    model = make(**changes)
    built = optimizer(model.parameters())
    return model, built, Sampler(model, built, settings or LayerSampling(active=2, period=3), seed=seed)


def train(
    model: nn.Module, optimizer, sampler=None, *, steps=range(6), accumulate: int = 1, batch: int = 2
) -> list[float]:
    """Run the loop of the README over the given steps; the batch of a step depends on the step alone."""
    losses = []
    for step in steps:
        if sampler is not None:
            sampler.begin_step(step)
        whole = zoo.tokens(batch=batch, seed=step)
        parts = zip(*(value.chunk(accumulate) for value in whole.values()), strict=True)
        losses.append(0.0)
        for part in parts:
            loss = model(**dict(zip(whole, part, strict=True))).loss / accumulate
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    """Names of the parameters that differ in any bit."""
    return {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_same_state(a, b) -> None:
    """Optimizer states, by position: same parameters have state, and every value is equal."""
    first, second = a.state_dict()["state"], b.state_dict()["state"]
    assert first.keys() == second.keys()
    for index, values in first.items():
        assert values.keys() == second[index].keys()
        assert all(torch.equal(v, second[index][k]) for k, v in values.items()), index


def state_bytes(optimizer) -> int:
    """Bytes of all tensors in an optimizer's state, counted by element."""
    tensors = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


def block_of(name: str) -> int | None:
    """Index of the Llama layer that a parameter belongs to, None outside."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None
