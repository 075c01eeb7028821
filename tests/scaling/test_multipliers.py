"""Hooked multipliers against the same product written out; in copies, state dicts, other dtypes and compiled code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparing.errors import UserError
from sparing.scaling.model.multipliers import active_slots, attach_, detach_, factor_of, set_factor_


def linear(width_in: int = 5, width_out: int = 6, dtype=torch.float64) -> nn.Linear:
    layer = nn.Linear(width_in, width_out, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return layer


X = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
W, B = linear().weight.detach(), linear().bias.detach()
THIRD = torch.tensor([0.25, 0.25, 1, 1, 1, 1], dtype=torch.float64)

CASES = {
    ("forward_scale", "input"): 0.25 * X @ W.T + B,
    ("forward_scale", "output"): 0.25 * (X @ W.T + B),
    ("branch_scale", "output"): 0.25 * (X @ W.T + B),
    ("query_scale", "output"): 0.25 * (X @ W.T + B),
    ("query_scale", "query_rows"): (X @ W.T + B) * THIRD,
}


@pytest.mark.parametrize(("slot", "where"), CASES)
@pytest.mark.parametrize("by_name", [False, True])
def test_it_multiplies_what_it_says(slot, where, by_name):
    layer = linear()
    attach_(layer, slot, 0.25, where=where)
    out = layer(input=X) if by_name else layer(X)
    # a quarter is a power of two: it commutes with rounding, so only the order of the sums can differ
    torch.testing.assert_close(out, CASES[slot, where], rtol=1e-14, atol=1e-14)
    assert active_slots(layer) == {slot: where}
    assert factor_of(layer, slot) == 0.25


def test_two_slots_multiply_both_and_leave_one_by_one():
    layer = linear()
    attach_(layer, "forward_scale", 0.5, where="input")
    attach_(layer, "branch_scale", 4.0, where="output")
    torch.testing.assert_close(layer(X), 4 * (0.5 * X @ W.T + B), rtol=1e-14, atol=1e-14)
    detach_(layer, "forward_scale")
    torch.testing.assert_close(layer(X), 4 * (X @ W.T + B), rtol=1e-14, atol=1e-14)
    detach_(layer, "branch_scale")
    assert torch.equal(layer(X), linear()(X))
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks
    assert not layer._forward_pre_hooks_with_kwargs
    detach_(layer, "branch_scale")  # nothing there: nothing happens
    assert "_sparing_scale_handles" not in layer.__dict__


def test_the_number_is_saved_and_loaded():
    layer, other = linear(), linear()
    attach_(layer, "forward_scale", 0.3, where="input")
    attach_(other, "forward_scale", 1.0, where="input")
    other.load_state_dict(layer.state_dict())
    assert factor_of(other, "forward_scale") == 0.3
    assert torch.equal(other(X), layer(X))


def test_a_copy_has_its_own_number():
    layer = linear()
    attach_(layer, "forward_scale", 0.5, where="input")
    twin = copy.deepcopy(layer)
    set_factor_(twin, "forward_scale", 2.0)
    assert factor_of(layer, "forward_scale") == 0.5
    torch.testing.assert_close(twin(X), 2 * X @ W.T + B, rtol=1e-14, atol=1e-14)
    detach_(twin, "forward_scale")
    assert torch.equal(twin(X), linear()(X))
    torch.testing.assert_close(layer(X), 0.5 * X @ W.T + B, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_outputs_keep_their_dtype_and_the_number_is_not_rounded_to_a_half(dtype):
    layer = linear(dtype=dtype)
    attach_(layer, "forward_scale", 1.0951835, where="input")
    assert layer(X.to(dtype)).dtype == dtype
    assert factor_of(layer, "forward_scale") == pytest.approx(1.0951835, rel=1e-7)


def test_attention_that_packs_its_weights_gets_scaled_logits_biases_included():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        attention.in_proj_bias.normal_()  # zero at first, but it trains
    expected = copy.deepcopy(attention)
    with torch.no_grad():
        expected.in_proj_weight[:8] *= 0.5
        expected.in_proj_bias[:8] *= 0.5
    attach_(attention, "query_scale", 0.5, where="key_input")
    for out in (attention(x, x, x)[0], attention(query=x, key=x, value=x)[0]):
        torch.testing.assert_close(out, expected(x, x, x)[0], rtol=1e-13, atol=1e-14)


@pytest.mark.slow
def test_compiled_equals_eager():
    """The compiler takes about six seconds."""
    layer = linear(dtype=torch.float32)
    attach_(layer, "forward_scale", 0.3, where="input")
    compiled = torch.compile(layer, backend="aot_eager")
    x = X.float()
    torch.testing.assert_close(compiled(x), layer(x))
    set_factor_(layer, "forward_scale", 3.0)
    torch.testing.assert_close(compiled(x), layer(x))


def test_refusals():
    layer = linear()
    attach_(layer, "forward_scale", 0.5, where="input")
    with pytest.raises(UserError, match="scale each model once"):
        attach_(layer, "forward_scale", 0.5, where="input")
    with pytest.raises(UserError, match="never calls it"):
        attach_(nn.MultiheadAttention(4, 2).out_proj, "forward_scale", 0.5, where="input")
