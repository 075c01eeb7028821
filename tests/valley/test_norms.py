"""Lengths: what each norm keeps and what it sets, by hand and as laws."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.seeds import stream
from sparing.valley.directions.norms import Layout, filter_norms, filtered, grouped, scaled
from sparing.vectors import norm

SHAPES = {"conv": (6, 4, 3, 3), "bias": (6,), "matrix": (5, 6), "scale": ()}
EXACT = 1e-12  # float64, a few roundings


def vector(label: str, dtype=torch.float64) -> dict[str, torch.Tensor]:
    return {n: torch.randn(s, generator=stream(0, label, n), dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def test_norm_scaling_by_hand():
    found = scaled(
        {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(4.0)}, {"a": torch.zeros(2), "b": torch.tensor(10.0)}
    )
    assert found["a"].tolist() == [6.0, 0.0]
    assert found["b"].item() == 8.0


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float64, EXACT), (torch.float32, 2**-23), (torch.bfloat16, 2**-8)],  # one unit in the last place
)
def test_norm_scaling_sets_the_length_and_keeps_the_direction(dtype, rounding):
    epsilon, theta = vector("e", dtype), vector("t", dtype)
    found = scaled(epsilon, theta)
    assert float(norm(found)) == pytest.approx(float(norm(theta)), rel=rounding)
    ratio = float(norm(theta)) / float(norm(epsilon))
    for name, value in found.items():
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), epsilon[name].double() * ratio, rtol=rounding, atol=0)


def test_what_has_no_length_is_refused():
    theta, zero = vector("t"), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    refused("leads nowhere", scaled, zero, theta)
    refused('norm="raw"', scaled, theta, zero)


def test_filter_norms_by_hand():
    epsilon = {"w": torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])}
    theta = {"w": torch.tensor([[0.0, 10.0], [3.0, 4.0], [1.0, 1.0]])}
    found = filtered(epsilon, theta, one_d="tensor", layouts={})
    assert found["w"].tolist() == [[6.0, 8.0], [0.0, 5.0], [0.0, 0.0]]


def test_filter_norms_of_inputs_first_by_hand():
    """The columns are the filters: (3, 4) -> length 10, (0, 2) -> length 5."""
    epsilon, theta = torch.tensor([[3.0, 0.0], [4.0, 2.0]]), torch.tensor([[0.0, 3.0], [10.0, 4.0]])
    found = filtered({"w": epsilon}, {"w": theta}, one_d="tensor", layouts={"w": Layout(transposed=True)})
    assert found["w"].tolist() == [[6.0, 0.0], [8.0, 5.0]]


@pytest.mark.parametrize(("one_d", "expected"), [("tensor", [6.0, 8.0]), ("abs", [0.0, 40.0]), ("zero", [0.0, 0.0])])
def test_policies_for_vectors_by_hand(one_d, expected):
    epsilon, theta = {"b": torch.tensor([3.0, 4.0])}, {"b": torch.tensor([0.0, -10.0])}
    assert filtered(epsilon, theta, one_d=one_d, layouts={})["b"].tolist() == expected


@pytest.mark.parametrize(("one_d", "expected"), [("tensor", -5.0), ("abs", -10.0), ("zero", 0.0)])
def test_policies_for_scalars_by_hand(one_d, expected):
    epsilon, theta = {"s": torch.tensor(-2.0)}, {"s": torch.tensor(-5.0)}
    assert filtered(epsilon, theta, one_d=one_d, layouts={})["s"].item() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_filter_has_the_norm_of_its_weights_and_its_own_direction(dtype):
    epsilon, theta = vector("e", dtype), vector("t", dtype)
    found = filtered(epsilon, theta, one_d="tensor", layouts={})
    rounding = EXACT if dtype == torch.float64 else 2**-22  # two roundings: the factor and the product
    for name in ("conv", "matrix"):
        for row, weights, noise in zip(found[name], theta[name], epsilon[name], strict=True):
            assert row.norm().item() == pytest.approx(weights.norm().item(), rel=4 * rounding)
            torch.testing.assert_close(row / row.norm(), noise / noise.norm(), rtol=4 * rounding, atol=0)


@pytest.mark.parametrize("factor", [1e-3, 7.0])
def test_the_filter_direction_rescales_with_the_filter(factor):
    """ReLU and batch norm let a filter be scaled without a change of the function; the direction follows."""
    epsilon, theta = vector("e"), vector("t")
    scales = torch.tensor([factor, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64).view(6, 1, 1, 1)
    before = filtered(epsilon, theta, one_d="tensor", layouts={})["conv"]
    after = filtered(epsilon, theta | {"conv": theta["conv"] * scales}, one_d="tensor", layouts={})["conv"]
    torch.testing.assert_close(after, before * scales, rtol=EXACT, atol=0)


def test_a_net_whose_filters_are_rescaled_has_the_same_filter_normalised_curve():
    """Li et al.'s reason for it: conv + batch norm + ReLU, filters times 0.2, 3 and 10, at several steps."""
    x = torch.randn(32, 2, 6, 6, generator=stream(0, "x"), dtype=torch.float64)
    theta, factors = torch.randn(3, 2, 3, 3, generator=stream(0, "w"), dtype=torch.float64), torch.tensor([0.2, 3, 10])
    epsilon = {"w": torch.randn(3, 2, 3, 3, generator=stream(0, "e"), dtype=torch.float64)}

    def values(weights, method):
        step = method(epsilon, {"w": weights})["w"]
        bn = nn.BatchNorm2d(3, eps=1e-14).double()
        return torch.stack(
            [bn(nn.functional.conv2d(x, weights + t * step)).relu().square().mean() for t in (-0.7, 0.4)]
        )

    other = theta * factors.double().view(3, 1, 1, 1)
    by_filter = [values(w, lambda e, t: filtered(e, t, one_d="tensor", layouts={})) for w in (theta, other)]
    torch.testing.assert_close(by_filter[0], by_filter[1], rtol=1e-10, atol=0)  # convolutions sum a few hundred terms
    whole = [values(w, scaled) for w in (theta, other)]
    assert (whole[0] / whole[1] - 1).abs().max() > 1e-4  # so that the equality above can fail


@pytest.mark.parametrize("groups", [1, 2])
def test_filters_of_a_transposed_convolution_are_what_one_output_reads(groups):
    """An output channel is linear in its filter: scaling the norm of one scales that channel alone."""
    layer = nn.ConvTranspose2d(4, 6, 2, groups=groups, bias=False).double()
    weight = torch.randn(layer.weight.shape, generator=stream(0, "w"), dtype=torch.float64)
    x = torch.randn(2, 4, 3, 3, generator=stream(0, "x"), dtype=torch.float64)
    layout = Layout(transposed=True, groups=groups)
    noise = {"w": torch.randn(weight.shape, generator=stream(0, "e"), dtype=torch.float64)}
    plain = filtered(noise, {"w": weight}, one_d="tensor", layouts={"w": layout})["w"]
    sizes = filter_norms(weight, layout)
    assert sizes.numel() == 6
    for channel in range(6):
        kept = torch.zeros(6, dtype=torch.float64).index_fill(0, torch.tensor(channel), 1.0)
        mask = kept.view(groups, 1, -1, 1, 1).expand(groups, 4 // groups, -1, 2, 2).reshape(weight.shape)
        out = nn.functional.conv_transpose2d(x, weight * mask, groups=groups)
        assert out[:, channel].abs().min() > 0
        assert out.sum((0, 2, 3)).count_nonzero() == 1
        assert (plain * mask).norm().item() == pytest.approx((weight * mask).norm().item(), rel=EXACT)


def test_every_block_has_the_norm_of_its_weights():
    parts = {"conv": "one", "bias": "one", "matrix": "two", "scale": "two"}
    epsilon, theta = vector("e"), vector("t")
    found = grouped(epsilon, theta, parts)
    for names in (("conv", "bias"), ("matrix", "scale")):
        part, own, noise = ({n: x[n] for n in names} for x in (found, theta, epsilon))
        assert float(norm(part)) == pytest.approx(float(norm(own)), rel=EXACT)
        for name, value in scaled(noise, own).items():
            torch.testing.assert_close(part[name], value, rtol=EXACT, atol=0)
    assert list(found) == list(epsilon)


def test_one_block_is_norm_scaling_and_an_empty_block_is_zero():
    epsilon, theta = vector("e"), vector("t")
    whole = grouped(epsilon, theta, dict.fromkeys(SHAPES, "all"))
    for name, value in scaled(epsilon, theta).items():
        torch.testing.assert_close(whole[name], value, rtol=EXACT, atol=0)
    found = grouped(
        {"a": torch.zeros(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.zeros(2)}, {"a": "x", "b": "y"}
    )
    assert [value.tolist() for value in found.values()] == [[0, 0], [0, 0]]
