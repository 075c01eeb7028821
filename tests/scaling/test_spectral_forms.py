"""The spectral rule where a layer multiplies its input by a number of its own, and where it is cut into groups."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_grouped_convolution_moves_as_the_map_of_all_its_channels(kind):
    """The matrix of a 1 × 1 layer from what it makes of each channel alone: 16 inputs to 32 outputs."""
    layers = [nn.Conv2d(3, 16, 1), kind(16, 32, 1, groups=4, bias=False), nn.Conv2d(32, 5, 1)]
    model = models.seeded(lambda: nn.Sequential(*layers)).double()
    chosen = plan(model, inputs=draw(4, 3, 3, 3))
    optimizer = Spectral(torch.optim.SGD(chosen.groups(model, lr=0.01)), model, chosen, iterations=300)
    channels = torch.eye(16, dtype=torch.float64)[:, :, None, None]
    before = model[1](channels).detach().flatten(1).t()
    model(draw(4, 3, 3, 3)).square().sum().backward()
    optimizer.step()
    moved = model[1](channels).detach().flatten(1).t() - before
    assert moved.shape == (32, 16)
    assert true_norm(moved) == pytest.approx(0.01 * math.sqrt(32 / 16), rel=1e-3)
