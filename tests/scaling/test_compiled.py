"""Scaled models under ``torch.compile``: outputs and masked gradients as without."""

from __future__ import annotations

import copy

import pytest
import torch

from scaling import models
from sparing.scaling.apply import apply_
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SuPar


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_a_compiled_model_trains_like_an_eager_one(copied):
    """Tracing takes about five seconds; the copy is compiled without ever having run."""
    model = models.constant_mlp(32)
    rule = SuPar(input=2.0, output=3.0, form="shifted")
    apply_(model, plan(model, base=models.constant_mlp(16), density=0.25, rule=rule, init={"*": "constant"}))
    twin = copy.deepcopy(model) if copied else model
    compiled = torch.compile(twin, backend="aot_eager")
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    compiled(x).square().mean().backward()
    got = {name: p.grad.clone() for name, p in twin.named_parameters()}
    twin.zero_grad()
    model(x).square().mean().backward()
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-7)  # float32, the same products
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-5, atol=1e-7)
    for name, mask in masks_of(compiled).items():
        assert not got[name][~mask].any()
        assert got[name][mask].any()
