"""Training flags and momenta come back one by one, also after an error."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from sparing.blocks.modes import estimating, evaluating


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=0.3), nn.Dropout())
    made[1].eval()
    return made


def test_flags_come_back_one_by_one():
    model, during = net(), []
    with suppress(ValueError), evaluating(model):
        during += [module.training for module in model.modules()]
        raise ValueError
    assert not any(during)
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_statistics_are_the_plain_mean_of_the_batches():
    model, norm = net(), net()[1]
    model[1], batches = norm, [torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows)) for rows in (4, 9)]
    with estimating(model, [norm]):
        hidden = [model[0](batch) for batch in batches]
        for batch in batches:
            model(batch)
    assert (norm.momentum, norm.training) == (0.3, False)
    expected = torch.stack([one.mean(0) for one in hidden]).mean(0)
    torch.testing.assert_close(norm.running_mean, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(norm.running_var, torch.stack([one.var(0) for one in hidden]).mean(0))
