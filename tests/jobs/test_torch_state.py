"""What is done to a live model for a while comes back as it was."""

from __future__ import annotations

import torch

import zoo
from sparing.jobs.torch_state import measuring, seeded


def test_modes_and_gradients_come_back() -> None:
    model = zoo.llama().train()
    model.model.layers[1].eval()
    with measuring(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert model.training
    assert not model.model.layers[1].training
    assert torch.is_grad_enabled()


def test_the_global_generators_come_back() -> None:
    before = torch.get_rng_state()
    with seeded(3, "dropout", 7, device=torch.device("cpu")):
        first = torch.rand(4)
    with seeded(3, "dropout", 8, device=torch.device("cpu")):
        other = torch.rand(4)
    with seeded(3, "dropout", 7, device=torch.device("cpu")):
        again = torch.rand(4)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
