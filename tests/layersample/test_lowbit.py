"""Frozen blocks in 4 and 8 bits, against dense layers that hold the dequantised weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import zoo
from sparing.layersample.lowbit import dequantise, quantise, rest_, round_, wake_
from sparing.seeds import stream

FORMS = ("nf4", "int8")


def at_rest(form: str = "nf4", kind: type[nn.Module] = nn.Linear, *, dtype=torch.float64) -> nn.Module:
    layer = zoo.redraw_((nn.Linear(48, 40) if kind is nn.Linear else Conv1D(40, 48)).to(dtype))
    rest_(layer, form, exact=False)
    layer.weight.requires_grad_(False)
    return layer


def rounded(weight: Tensor, form: str) -> Tensor:
    return dequantise(quantise(weight, form), weight.shape, weight.dtype)


def dense(layer: nn.Module) -> nn.Module:
    """A copy of a layer at rest that holds the dequantised weight."""
    twin = copy.deepcopy(layer)
    wake_(twin)
    return twin


# ---- number formats


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_error_is_at_most_half_a_gap(form: str, dtype: torch.dtype) -> None:
    """Evenly spaced levels are 1/127 of the scale apart, the widest gap of NF4 (from -1 to -0.696) is 0.304 of it."""
    weight = torch.randn(33, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    back = rounded(weight, form)
    groups = nn.functional.pad(weight.double().flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scales = groups.abs().amax(1).repeat_interleave(64)[: weight.numel()].view_as(weight)
    # beside half a gap: the kernel of 8 bits finds the nearest level to 1 %, and the result is rounded to its own type
    allowed = scales * ({"nf4": 0.3039, "int8": 1.01 / 127}[form] / 2 + max(torch.finfo(dtype).eps, 1e-6))
    assert back.dtype == dtype
    assert bool(((back - weight).double().abs() <= allowed).all())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_was_dequantised_is_quantised_to_itself(form: str, dtype: torch.dtype) -> None:
    """So a model may be saved with ordinary weights, loaded and quantised again; negative extremes included."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    weight[:, 3], weight[5] = -9.0, 0.0
    once = rounded(weight, form)
    assert torch.equal(rounded(once, form), once)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_random_rounding_keeps_the_mean_and_is_stored_as_it_is(form: str, dtype: torch.dtype) -> None:
    """Each of n draws is one of two values g apart, so their mean is within 5 g / 2√n of the weight."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    weight[0] = 0.0
    draws, n = torch.zeros(16, 64, dtype=torch.float64), 400
    for seed in range(n):
        one = weight.clone()
        round_(one, form, stream(seed))
        assert torch.equal(rounded(one, form), one)
        draws += one.double() / n
    gap = {"nf4": 0.3039, "int8": 1 / 127}[form] * weight.double().abs().amax()
    # and the rounding of each value to 16 bits
    assert float((draws - weight.double()).abs().max()) < 2.5 * gap / n**0.5 + float(torch.finfo(dtype).eps) * 4


def test_scales_of_16_bit_weights_take_16_bits() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert sum(t.nbytes for t in quantise(weight, "nf4")) * 8 == 4.25 * weight.numel()
    codes, scales, levels = quantise(weight, "int8")
    assert (codes.nbytes + scales.nbytes) * 8 == 8.25 * weight.numel()
    assert levels.nbytes == 1024


# ---- one layer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_layer_at_rest_is_the_dense_layer_of_its_dequantised_weight(kind: type[nn.Module], form: str) -> None:
    layer = at_rest(form, kind)
    twin, x = dense(layer), torch.randn(2, 3, 48, dtype=torch.float64, requires_grad=True)
    outs, grads = [], []
    for one in (layer, twin):
        out = one(x)
        grads.append(torch.autograd.grad((out**2).sum(), [x, one.bias]))
        outs.append(out)
    # Conv1D adds its bias in another order than Linear: a unit in the last place
    assert torch.allclose(outs[0], outs[1], rtol=1e-14, atol=1e-16)
    assert all(torch.allclose(a, b, rtol=1e-13, atol=1e-14) for a, b in zip(*grads, strict=True))
    assert torch.autograd.gradcheck(layer, (x[:, :1].detach().requires_grad_(),))


def test_nothing_of_the_weight_lives_from_forward_to_backward() -> None:
    layer, kept, x = at_rest(), [], torch.randn(2, 48, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert {t.untyped_storage().data_ptr() for t in kept} == {t.untyped_storage().data_ptr() for t in layer.stored()}


def test_autocast_gets_gradients_of_the_inputs_own_type() -> None:
    layer, x = at_rest("int8", dtype=torch.float32), torch.randn(2, 48, requires_grad=True)
    grads = []
    for one in (layer, dense(layer)):
        with torch.autocast("cpu", torch.bfloat16):
            out = one(x)
        grads.append(torch.autograd.grad(out.float().sum(), x)[0])
    assert out.dtype is torch.bfloat16
    assert grads[0].dtype is torch.float32
    assert torch.equal(*grads)


def test_who_reads_the_weight_past_the_layer_sees_nan_and_cannot_write() -> None:
    layer = at_rest()
    assert layer.weight.shape == (40, 48)
    assert layer.weight.untyped_storage().nbytes() == 8
    assert bool(nn.functional.linear(torch.ones(1, 48, dtype=torch.float64), layer.weight).isnan().all())
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        layer.weight.add_(1.0)
