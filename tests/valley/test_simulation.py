"""The simulated unit against its closed form, and the confusion of a real network's units against counting by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import UserError
from sparing.valley.theory.simulation import activation_confusion, expected_shift, simulate_unit


def test_expected_shift_is_a_gaussian_integral() -> None:
    """E[sign(a h + δ)] = 2 Φ(a h) − 1, by the error function of the standard library."""
    h = torch.tensor([0.5, -2.0, 0.0])
    wanted = sum(abs(v) * (2 * (0.5 * (1 + math.erf(0.3 * abs(v) / math.sqrt(2)))) - 1) for v in (0.5, -2.0, 0.0))
    assert expected_shift(h, 0.3) == pytest.approx(wanted, rel=1e-12)
    assert expected_shift(h, 50.0) == pytest.approx(2.5)  # w has the signs of h: ‖h‖₁


def test_the_simulation_agrees_with_the_formula_within_two_percent() -> None:
    """10,000 draws: the mean is known to deviation / 100, which is 0.7 % of the largest mean and 3 % of the least."""
    moves = {move.step: move for move in simulate_unit()}
    for step in (0.0, 0.5, 1.0):
        assert moves[step].mean == pytest.approx(moves[step].expected, rel=0.02)
    for move in moves.values():
        assert abs(move.mean - move.expected) < 3.5 * move.error
        assert move.error == pytest.approx(move.deviation / 100)
    shift = (moves[1.0].mean - moves[-1.0].mean) / 2  # the same draws: δᵀh cancels
    assert shift == pytest.approx((moves[1.0].expected - moves[-1.0].expected) / 2, rel=0.02)
    assert moves[0.0].agreement == 1
    for step in (0.5, 1.0):
        assert moves[step].agreement > moves[-step].agreement
    # An earlier run with another h: 8.10 a unit, .651 and .938
    assert shift == pytest.approx(8.1, rel=0.15)
    assert (moves[-1.0].agreement, moves[1.0].agreement) == pytest.approx((0.651, 0.938), abs=0.03)
    assert simulate_unit(seed=1)[0] != moves[-1.0]
    refused("a deviation needs two draws", simulate_unit, draws=1)


def test_confusion_is_what_one_counts_by_hand() -> None:
    """Two units, two rows: pre-activations (1, −2), (3, −6); along the step (−2 x, +3 x) each."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU()).train()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-2.0]]))
    batches = [torch.tensor([[1.0]]), torch.tensor([[3.0]])]
    step = {"0.weight": torch.tensor([[-2.0], [3.0]])}
    small, middle, one, back = activation_confusion(model, batches, step, [0.25, 0.625, 1.0, -1.0])
    assert (small.kept, small.lost, small.gained, small.silent) == (0.5, 0, 0, 0.5)
    assert (middle.kept, middle.lost, middle.gained, middle.silent) == (0, 0.5, 0, 0.5)
    assert (one.kept, one.lost, one.gained, one.silent) == (0, 0.5, 0.5, 0)
    assert (small.agreement, one.agreement, back.agreement) == (1, 0, 1)
    assert model[0].weight.flatten().tolist() == [1, -2]
    assert all(module.training for module in model.modules())
    assert not model[1]._forward_hooks


def test_along_the_signs_units_stay_active_on_the_positive_side() -> None:
    """Inputs are positive, as after a ReLU, and weights lean towards active units: diag(+λ) > diag(−λ)."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 200, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(200, 50, generator=generator) + 0.2)
    rows = [torch.rand(40, 50, generator=generator)]
    weight = model[0].weight.detach()
    direction = {"0.weight": torch.randn(weight.shape, generator=generator).abs() * weight.sign()}
    tables = {table.step: table for table in activation_confusion(model, rows, direction)}
    for step in (0.2, 0.4, 0.6, 0.8, 1.0):
        assert tables[step].agreement > tables[-step].agreement
        assert sum((tables[step].kept, tables[step].lost, tables[step].gained, tables[step].silent)) == pytest.approx(1)


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(UserError, match="no module of these types ran"):
        activation_confusion(nn.Linear(1, 1), [torch.ones(1, 1)], {"weight": torch.ones(1, 1)})
    refused("no module of these types ran", activation_confusion, nn.ReLU(), [], {})
