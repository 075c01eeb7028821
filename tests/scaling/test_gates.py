"""One gate on one layer: its gradient, its copies, its removal, and the layers that share a weight."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.scaling.masks.gates import Gate

MASK = torch.tensor([[True, False, True], [False, True, True]])


def gated() -> tuple[nn.Linear, Gate]:
    layer = nn.Linear(3, 2, dtype=torch.float64)
    gate = Gate(layer, "weight", MASK.clone())
    gate.zero_()
    return layer, gate


def test_gradients_are_zero_off_the_mask_even_where_they_are_not_numbers():
    layer, gate = gated()
    x = torch.tensor([[1.0, 2.0, float("inf")]], dtype=torch.float64)
    layer(x).backward(torch.ones(1, 2, dtype=torch.float64))
    assert layer.weight.grad[0].tolist() == [1.0, 0.0, float("inf")]
    assert layer.weight.grad[1, 0] == 0
    layer.weight.grad.fill_(1.0)
    gate.zero_()
    assert torch.equal(layer.weight.grad, MASK.double())


def test_the_graph_of_a_gradient_goes_through_the_mask():
    """Second derivatives: Σ over live entries of 2 x² for a squared output."""
    layer, _ = gated()
    x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), layer.weight)
    # row sums of live x: 1 + 3 and 2 + 3; ∂/∂w_ij Σ_live 2 y_i x_j = 2 x_j Σ_live x, masked as it arrives
    expected = 2 * torch.tensor([[4.0], [5.0]], dtype=torch.float64) * x * MASK
    torch.testing.assert_close(second, expected)


def test_leaks_holds_set_and_rehook():
    layer, gate = gated()
    assert not gate.leaks()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert gate.leaks()
    gate.set_(torch.ones(2, 3, dtype=torch.bool))
    assert not gate.leaks()
    gate.set_(MASK)
    assert torch.equal(layer.weight.detach(), MASK.double())
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert not gate.is_current
    gate.rehook_()
    assert gate.is_current
    layer(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(layer.weight.grad, MASK.double())


@pytest.mark.parametrize("keep", [False, True])
def test_the_dense_gradient_is_collected_and_the_masked_one_passed_on(keep):
    layer, gate = gated()
    gate.keep = keep
    for _ in range(2):
        layer(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(layer.weight.grad, 2 * MASK.double())
    assert (gate.dense is None) == (not keep)
    if keep:
        assert torch.equal(gate.dense, torch.full((2, 3), 2.0, dtype=torch.float64))
