"""The spectral rule where a layer multiplies its input by a number of its own."""

from __future__ import annotations

import math

import pytest
import torch

from scaling import models
from scaling.test_spectral import draw, true_norm
from sparing.scaling.apply import apply_
from sparing.scaling.model.multipliers import factor_of
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SuPar
from sparing.scaling.spectral import Spectral


@pytest.mark.parametrize("form", ["rescaled", "shifted"])
@pytest.mark.parametrize("density", [1.0, 1 / 16])
def test_both_forms_change_the_layer_by_the_same_norm(form, density):
    """What counts is the product of the layer's own number and its weights: lr · √(out/in) at any width and density."""
    model = models.constant_mlp(128, std=0.3).double()
    chosen = plan(model, base=lambda: models.constant_mlp(32, std=0.3).double(), density=density, rule=SuPar(form=form))
    masks = apply_(model, chosen)
    optimizer = Spectral(torch.optim.AdamW(chosen.groups(model, lr=0.01, weight_decay=0.0)), model, chosen, masks,
                         iterations=300)  # fmt: skip
    names = [name for name, entry in chosen.entries.items() if entry.role == "hidden"]
    before = {name: model.get_parameter(name).detach().clone() for name in names}
    model(draw(16, 8)).square().sum().backward()
    optimizer.step()
    scales = []
    for name in names:
        change = model.get_parameter(name).detach() - before[name]
        scales.append(factor_of(model.get_submodule(name.rpartition(".")[0]), "forward_scale"))
        wanted = 0.01 * math.sqrt(change.shape[0] / change.shape[1])
        assert scales[-1] * true_norm(change) == pytest.approx(wanted, rel=1e-3)
        assert optimizer.norms()[name] > 0
    assert (set(scales) == {1.0}) == (form == "rescaled")
