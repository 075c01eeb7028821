"""Batch-norm statistics against what the definition gives by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.errors import UserError
from sparing.valley.scans.batch_norm import Refresher, batch_norms, refresh_
from valley import walks


def normalised(x, gain, bias, mean, variance, eps):
    shape = (1, -1, *([1] * (x.ndim - 2)))
    return (x - mean.view(shape)) / (variance.view(shape) + eps).sqrt() * gain.view(shape) + bias.view(shape)


def one_pass(model, train, test, *, unbiased):
    """Train and test rows together through the net, each batch norm with the statistics of the train rows alone."""
    x, n = torch.cat([train, test]), len(train)
    for layer in model:
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            rows = x[:n].transpose(0, 1).flatten(1)
            mean, variance = rows.mean(1), rows.var(1, unbiased=unbiased)
            x = normalised(x, layer.weight, layer.bias, mean, variance, layer.eps)
        elif not isinstance(layer, nn.Dropout):
            x = layer(x)
    return x[n:]


def test_exact_is_one_pass_over_all_calibration_rows():
    """By hand, layer by layer: statistics of all rows at once, which normalise themselves by the biased variance."""
    model = walks.normed()
    train, test = walks.images(12, "train"), walks.images(5, "test")
    refresher = Refresher(model, [train[:7], train[7:]], "exact")
    with torch.no_grad(), refresher.at_point():
        x = train
        for layer in model:
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                rows = x.transpose(0, 1).flatten(1)
                # float64 sums in another order: some ulps
                torch.testing.assert_close(layer.running_mean, rows.mean(1), rtol=0, atol=1e-14)
                torch.testing.assert_close(layer.running_var, rows.var(1, unbiased=True), rtol=0, atol=1e-14)
                mean, variance = rows.mean(1), rows.var(1, unbiased=False)
                x = normalised(x, layer.weight, layer.bias, mean, variance, layer.eps)
            elif not isinstance(layer, nn.Dropout):
                x = layer(x)
        assert model(test).shape == (5, 3)


def test_exact_is_the_evaluator_that_joins_train_and_test_rows():
    """They differ by the factor n / (n − 1) of a variance alone: exactly for the first, and 1/n less for many rows."""
    model = walks.normed()
    single = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()
    train, test = walks.images(9, "train"), walks.images(5, "test")
    with torch.no_grad(), Refresher(single.eval(), [train], "exact").at_point():
        oracle = one_pass(single, train, test, unbiased=True)
        torch.testing.assert_close(single(test), oracle, rtol=0, atol=1e-13)
    gaps = []
    for rows in (100, 800):
        train = walks.images(rows, "many")
        with torch.no_grad(), Refresher(model, [train], "exact").at_point():
            gaps.append(float((model(test) - one_pass(model, train, test, unbiased=False)).abs().max()))
    # half of 1/rows of outputs of size 1, in two layers; the second has `rows` values a channel
    assert gaps[0] < 2 / 100
    assert gaps[0] / gaps[1] == pytest.approx(8, rel=0.3)


@pytest.mark.parametrize("statistics", ["exact", "cumulative"])
def test_instance_norm_holds_the_mean_over_instances_and_batches(statistics):
    """torch counts nothing of a cumulative mean there: its statistics would stay 0 and 1, and the layer do nothing."""
    layer = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    model = nn.Sequential(layer, nn.Flatten()).double().eval()
    batches = [torch.rand(rows, 3, 4, 4, dtype=torch.float64) + 2 for rows in (4, 9, 5)]
    refresh_(model, batches, statistics)
    parts = [torch.cat(batches)] if statistics == "exact" else batches
    mean = torch.stack([x.flatten(2).mean(2).mean(0) for x in parts]).mean(0)
    variance = torch.stack([x.flatten(2).var(2).mean(0) for x in parts]).mean(0)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(layer.running_var, variance, rtol=1e-12, atol=0)
    assert layer.momentum == 0.1
    assert not layer._forward_pre_hooks


def test_cumulative_is_the_mean_over_batches():
    model = walks.normed()
    batches = [walks.images(rows, rows) for rows in (4, 9, 5)]
    with Refresher(model, batches, "cumulative").at_point(), torch.no_grad():
        found = [model[0](x).transpose(0, 1).flatten(1) for x in batches]
        mean = torch.stack([rows.mean(1) for rows in found]).mean(0)
        variance = torch.stack([rows.var(1) for rows in found]).mean(0)
        torch.testing.assert_close(model[1].running_mean, mean, rtol=0, atol=1e-14)
        torch.testing.assert_close(model[1].running_var, variance, rtol=0, atol=1e-14)
        assert model[1].num_batches_tracked == 3


def test_cumulative_misses_the_variance_between_batches():
    """Two constant batches at −1 and +1: variance 0 by batches, 4/3 by the set of 2 · 2 values."""
    model = nn.Sequential(nn.BatchNorm1d(1)).eval()
    batches = [torch.full((2, 1), -1.0), torch.full((2, 1), 1.0)]
    refresh_(model, batches, "cumulative")
    assert model[0].running_var.item() == 0
    refresh_(model, batches)
    assert model[0].running_var.item() == pytest.approx(4 / 3, rel=1e-6)


@pytest.mark.parametrize("statistics", ["stale", "batch"])
def test_stale_and_batch_leave_buffers_alone(statistics):
    model = walks.normed()
    refresh_(model, [walks.images(9)])
    before = walks.state(model)
    with Refresher(model, None, statistics).at_point():
        model(walks.images(6))
    assert walks.same(before, walks.state(model))


def test_batch_normalises_each_evaluated_batch_by_itself():
    model = walks.normed()
    x = walks.images(6)
    with torch.no_grad(), Refresher(model, None, "batch").at_point():
        model.eval()
        oracle = one_pass(model, x, x, unbiased=False)
        torch.testing.assert_close(model(x), oracle, rtol=0, atol=1e-13)


def test_batch_normalises_each_instance_by_itself_under_instance_norm():
    """The values of each channel of a row by hand, variance without Bessel's correction; the layer is as before."""
    layer = nn.InstanceNorm2d(3, track_running_stats=True)
    model = layer.double().eval()
    x = torch.rand(4, 3, 5, 5, dtype=torch.float64)
    before = walks.state(model)
    with Refresher(model, None, "batch").at_point():
        found = model(x)
    variance, mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(found, (x - mean) / (variance + layer.eps).sqrt(), rtol=0, atol=1e-13)
    assert layer.track_running_stats
    assert walks.same(before, walks.state(model))
    torch.testing.assert_close(model(x), x / (1 + layer.eps) ** 0.5)  # by statistics that are still 0 and 1


def test_what_refresh_leaves_alone():
    """Flags, momenta, parameters and torch's random state; dropout is silent; gradients are off."""
    model = walks.normed()
    model[3].train()
    momenta, state = [one.momentum for one in batch_norms(model)], torch.get_rng_state()
    flags = [m.training for m in model.modules()]
    refresh_(model, [walks.images(8)])
    first = [one.running_var.clone() for one in batch_norms(model)]
    refresh_(model, [walks.images(8)])
    assert all(torch.equal(a, one.running_var) for a, one in zip(first, batch_norms(model), strict=True))
    assert [one.momentum for one in batch_norms(model)] == momenta == [0.1, 0.3]
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(one.running_mean.requires_grad for one in batch_norms(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("statistics", ["exact", "cumulative", "batch"])
def test_the_network_that_is_all_zero(dtype, statistics):
    """At λ = −1 along the weights themselves no channel varies: logits are zero, not NaN."""
    model = walks.normed(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with Refresher(model, [walks.images(6, dtype=dtype)], statistics).at_point(), torch.no_grad():
        assert torch.equal(model(walks.images(3, "test", dtype=dtype)), torch.zeros(3, 3, dtype=dtype))


def test_old_statistics_that_are_not_numbers_are_forgotten():
    model = walks.normed()
    refresh_(model, [walks.images(8)])
    good = model[1].running_var.clone()
    model[1].running_var.fill_(float("nan"))
    refresh_(model, [walks.images(8)])
    assert torch.equal(model[1].running_var, good)


def test_layers_that_are_found():
    model = nn.Sequential(
        nn.BatchNorm1d(2), nn.BatchNorm2d(2, track_running_stats=False), nn.GroupNorm(1, 2), nn.LayerNorm(2),
        nn.InstanceNorm1d(2), nn.InstanceNorm2d(2, track_running_stats=True),
    )  # fmt: skip
    assert batch_norms(model) == [model[0], model[5]]


def test_batches_of_pairs_and_of_keywords():
    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, values, scale):
            return self.norm(values * scale)

    model, x = Keywords(), torch.arange(12.0).view(4, 3)
    refresh_(model, [{"values": x[:3], "scale": 2.0}, {"values": x[3:], "scale": 2.0}])
    torch.testing.assert_close(model.norm.running_mean, 2 * x.mean(0))
    plain = nn.Sequential(nn.BatchNorm1d(3))
    refresh_(plain, [(x[:2], torch.zeros(2)), [x[2:], torch.zeros(2)]])
    torch.testing.assert_close(plain[0].running_var, x.var(0))


@pytest.mark.parametrize(
    ("calibrate", "statistics", "match"),
    [
        (None, "exact", "2 batch norms"),
        (torch.zeros(3, 1, 4, 4), "exact", "sequence of batches"),
        (iter([torch.zeros(3, 1, 4, 4)]), "exact", "iterated once"),
        ([], "exact", "no batch"),
        ([], "cumulative", "no batch"),
        (["text"], "exact", "str"),
        ([torch.zeros(3, 1, 4, 4), torch.zeros(3, 1, 5, 5)], "exact", "one shape"),
        ([torch.zeros(1, 1, 4, 4, dtype=torch.float64)], "exact", "two values a channel"),
        ([torch.zeros(3, 1, 4, 4)], "fresh", "no such way"),
    ],
)
def test_refusals(calibrate, statistics, match):
    with pytest.raises(UserError, match=match):
        refresh_(walks.normed(), calibrate, statistics)


def test_without_batch_norm_nothing_is_asked_for():
    with Refresher(walks.plain(), None, "exact").at_point():
        pass


def test_momentum_and_flags_come_back_after_a_failure():
    model = walks.normed()
    flags = [m.training for m in model.modules()]
    with pytest.raises(RuntimeError):
        refresh_(model, [torch.zeros(3, 2, 4, 4, dtype=torch.float64)])
    assert [one.momentum for one in batch_norms(model)] == [0.1, 0.3]
    assert [m.training for m in model.modules()] == flags
