"""Frozen blocks in 4 bits, family by family, against a model whose frozen blocks were rounded by hand."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from idioms.layersample.cells import LOW_BIT_CELLS
from idioms.layersample.families import FAMILIES
from idioms.layersample.reference import apart
from idioms.table import Cell
from refusals import refused
from sparing.layersample import LayerSampling, Sampler
from sparing.layersample.lowbit import dequantise, quantise

ONE = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)
ROUNDING = 1e-11
"""Products of transposed views add up in another order, and eight steps of 1e-2 stand between first and last."""


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return dequantise(quantise(weight, "nf4"), weight.shape, weight.dtype)


@pytest.mark.parametrize("cell", LOW_BIT_CELLS, ids=lambda cell: cell.name)
def test_frozen_blocks_are_rounded_and_nothing_else_changes(cell: Cell) -> None:
    family = FAMILIES[cell.subject]
    model = family.make()
    if cell.outcome == "refused":
        settings = LayerSampling(active=1, frozen="nf4")
        refused(
            r"^LayerSampling\.frozen: got a model with .*; .*; omit", Sampler, model, ONE(model.parameters()), settings
        )
        return
    twin = copy.deepcopy(model)
    matrices = {
        f"{name}.weight"
        for name, module in twin.named_modules()
        if type(module) in {nn.Linear, Conv1D} and any(name.startswith(f"{path}.") for path in family.lists)
    }
    assert matrices
    runs = []
    for one, frozen in ((model, "nf4"), (twin, None)):
        one.train()
        optimizer = ONE(one.parameters())
        runs.append((one, optimizer, Sampler(one, optimizer, LayerSampling(active=1, period=2, frozen=frozen))))
    exact = {name: p.detach().clone() for name, p in twin.named_parameters() if name in matrices}
    for step in range(8):
        for one, optimizer, sampler in runs:
            sampler.begin_step(step)
            if one is twin:
                with torch.no_grad():
                    for name in matrices:
                        p = twin.get_parameter(name)
                        p.copy_(exact[name] if p.requires_grad else rounded(exact[name]))
            one(**family.batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        exact |= {name: p.detach().clone() for name in matrices if (p := twin.get_parameter(name)).requires_grad}
    for *_, sampler in runs:
        sampler.close()
    with torch.no_grad():
        for name in matrices:
            twin.get_parameter(name).copy_(exact[name])
    assert apart(model, twin) < ROUNDING
