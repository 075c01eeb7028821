"""Masks that change on sparse layers: the path of dense ones, in a third of their memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.memory.ledger import Ledger
from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import SET, RigL
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.plans.planning import plan
from sparing.scaling.sparse.backends import convert_, sparse_layers

METHODS = {"rigl": RigL(every=2, share=0.5), "set": SET(every=2, share=0.5)}


def net(width: int, depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 4)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


class Run:
    """A model whose masks change, every masked layer dense or sparse."""

    def __init__(self, method: str, backend: str, width: int, density: float, dtype: torch.dtype, depth: int = 3):
        self.model, self.dtype = net(width, depth).to(dtype), dtype
        chosen = plan(self.model, base=lambda: net(width // 2, depth), density=density)
        self.masks = apply_(self.model, chosen, seed=0)
        self.optimizer = torch.optim.AdamW(chosen.groups(self.model, lr=1e-2, weight_decay=0.1))
        self.evolution = Evolution(self.model, self.masks, self.optimizer, METHODS[method], steps=12, scale="energy")
        convert_(self.model, self.masks, backend=backend, optimizer=self.optimizer)

    def step(self, step: int) -> float:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(self.dtype)
        loss: Tensor = F.mse_loss(self.model(x), (x[:, :4] * x[:, 4:]).tanh())
        loss.backward()
        self.optimizer.step()
        self.evolution.step(step)
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_updates_are_those_of_dense_layers(method, dtype):
    dense, sparse = (Run(method, backend, 32, 0.25, dtype) for backend in ("dense", "csr"))
    losses = [[run.step(step) for step in range(9)] for run in (dense, sparse)]
    assert len(sparse_layers(sparse.model)) == 3
    assert sum(row["grown"] for row in sparse.evolution.history) > 100
    # rounding of 1e-16 and 6e-8, grown by nine steps of Adam; equal scores of growth would part the masks
    assert losses[1] == pytest.approx(losses[0], rel={torch.float64: 1e-10, torch.float32: 1e-4}[dtype])
    if dtype is torch.float64:
        assert sparse.evolution.history == dense.evolution.history
        assert sparse.masks.digest() == dense.masks.digest()
        for layer in sparse_layers(sparse.model).values():
            held = sparse.optimizer.state[layer.weight]
            assert held["exp_avg_sq"].shape == layer.weight.shape
            assert not layer._recorded


def test_one_layer_alone_is_dense_during_an_update():
    """Bytes of tensors at the peak over an update at 1/16, gradients of all places among them: a third of dense."""
    peaks = {}
    for backend in ("dense", "csr"):
        run = Run("rigl", backend, 256, 1 / 16, torch.float32, depth=12)
        with Ledger(run.model, run.optimizer) as ledger:
            for step in range(4):
                run.step(step)
            peaks[backend] = ledger.peak.total
    assert len(run.evolution.history) == 1
    assert peaks["csr"] <= peaks["dense"] / 3
