"""The three sizes of a layer against the same ones computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.scaling.check.probe import Probe, rms


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_root_mean_square_is_over_all_entries():
    assert rms([torch.tensor([3.0]), torch.tensor([[4.0, 0.0]])]) == pytest.approx((25 / 3) ** 0.5)
    assert rms([]) is None


def test_output_gradient_and_change_are_those_of_the_layer():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, before = numbers(6, 5), [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with Probe(model) as probe:
        model(x).square().mean().backward()
        optimizer.step()
        found = probe.statistics()

    w0, b0, w2, b2 = before
    hidden = torch.tanh(x @ w0.T + b0)
    y = hidden @ w2.T + b2
    dy = 2 * y / y.numel()
    assert found["2"]["forward"] == pytest.approx(rms([y]))
    assert found["2"]["gradient"] == pytest.approx(rms([dy @ w2]))
    assert found["2"]["update"] == pytest.approx(rms([0.1 * hidden @ (dy.T @ hidden).T]))  # the bias moved, ΔW counts
    assert found["0"]["gradient"] is None
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_shared_input_gives_each_layer_its_own_gradient():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.b = (nn.Linear(3, 3, bias=False).double() for _ in range(3))

        def forward(self, x):
            x = self.stem(x)
            return self.a(x) + 5 * self.b(x)

    model = Fork()
    with Probe(model) as probe:
        model(numbers(4, 3)).sum().backward()
        found = probe.statistics()

    ones = torch.ones(4, 3, dtype=torch.float64)
    assert found["a"]["gradient"] == pytest.approx(rms([ones @ model.a.weight]))
    assert found["b"]["gradient"] == pytest.approx(rms([5 * ones @ model.b.weight]))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(2, 3, 3, padding=1), nn.Conv1d(2, 3, 2, stride=2), nn.ConvTranspose2d(2, 3, 2), nn.Linear(4, 3)]
)
def test_change_is_the_difference_of_outputs_at_one_bias(layer):
    layer = layer.double()
    x = numbers(2, 2, 4, 4) if layer.weight.ndim == 4 else numbers(2, 2, 4)
    with Probe(layer) as probe:
        before = layer(x).detach()
        with torch.no_grad():
            layer.weight.add_(numbers(*layer.weight.shape, seed=1))
            after = layer(x)
        found = probe.statistics()[""]
    assert found["update"] == pytest.approx(rms([after - before]))


def test_an_embedding_and_its_tied_readout_are_two_layers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model = Tied().double()
    with Probe(model) as probe:
        model(torch.tensor([[1, 2]])).sum().backward()
    assert {name: (seen.owner, seen.readout) for name, seen in probe.seen.items()} == {
        "embed": ("embed.weight", False),
        "head": ("embed.weight", True),
    }


def test_a_layer_called_twice_counts_with_both_calls():
    layer = nn.Linear(3, 3, bias=False).double()
    x = numbers(2, 3)
    with Probe(layer) as probe:
        y = layer(x)
        z = layer(y)
    assert probe.statistics()[""]["forward"] == pytest.approx(rms([y, z]))


@pytest.mark.parametrize("layer", [nn.Linear(3, 4, bias=False), nn.Conv1d(3, 4, 1, bias=False)])
def test_changes_count_at_the_positions_from_which_a_gradient_comes_back(layer):
    """Two rows of six, and two places of five: the rest of a projected table is never read."""
    layer = layer.double()
    x = numbers(6, 3) if isinstance(layer, nn.Linear) else numbers(2, 3, 5)
    read = (slice(0, 2),) if isinstance(layer, nn.Linear) else (slice(None), slice(None), slice(0, 2))
    with Probe(layer) as probe:
        before = layer(x)
        before[read].square().sum().backward()
        with torch.no_grad():
            layer.weight.add_(numbers(*layer.weight.shape, seed=1))
            after = layer(x)
        found = probe.statistics()[""]
    assert found["update"] == pytest.approx(rms([(after - before)[read]]))


def test_a_layer_is_run_again_with_all_it_was_called_with():
    """As BART looks positions up: the numbers of its rows come by a keyword."""

    class Positions(nn.Embedding):
        def forward(self, ids, rows=None):
            return super().forward(ids if rows is None else rows)

    table = Positions(6, 4).double()
    with Probe(table) as probe:
        before = table(torch.tensor([[0, 1], [2, 3]]), rows=torch.tensor([[4, 5]]))
        before.sum().backward()
        with torch.no_grad():
            table.weight.add_(numbers(6, 4))
        found = probe.statistics()[""]
    assert found["update"] == pytest.approx(rms([numbers(6, 4)[4:]]))
