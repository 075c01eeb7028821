"""The net is the paper's: its size to the parameter, its arithmetic as torch's own modules do it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparing.jobs.condense.net import Shape, init_weights, logits, penalty
from sparing.seeds import stream


@pytest.mark.parametrize(
    ("channels", "side", "classes", "count"),
    [(1, 28, 10, 308_746), (3, 32, 10, 320_010), (3, 32, 100, 504_420)],  # the paper's M
)
def test_the_paper_counts_the_same_parameters(channels: int, side: int, classes: int, count: int) -> None:
    shape = Shape(channels=channels, side=side, classes=classes, width=128)
    assert sum(weight.numel() for weight in init_weights(shape, stream(0)).values()) == count


def by_modules(weights: dict[str, torch.Tensor], width: int, depth: int) -> nn.Sequential:
    """The same net from torch's modules."""
    layers: list[nn.Module] = []
    for block in range(depth):
        part = f"block{block}."
        convolution = nn.Conv2d(weights[part + "weight"].shape[1], width, 3, padding="same").double()
        norm = nn.InstanceNorm2d(width, affine=True).double()
        convolution.load_state_dict({"weight": weights[part + "weight"], "bias": weights[part + "bias"]})
        norm.load_state_dict({"weight": weights[part + "scale"], "bias": weights[part + "shift"]})
        layers += [convolution, nn.ReLU(), norm, nn.AvgPool2d(2)]
    linear = nn.Linear(*weights["linear.weight"].shape[::-1]).double()
    linear.load_state_dict({"weight": weights["linear.weight"], "bias": weights["linear.bias"]})
    return nn.Sequential(*layers, nn.Flatten(), linear)


@pytest.mark.parametrize("side", [16, 28])
def test_it_computes_what_the_modules_compute(side: int) -> None:
    shape = Shape(channels=3, side=side, classes=5, width=6)
    generator = stream(0, "net")
    weights = {name: weight.double() for name, weight in init_weights(shape, generator).items()}
    weights |= {name: torch.randn(weight.shape, generator=generator).double() for name, weight in weights.items()}
    images = torch.rand(7, 3, side, side, generator=generator).double()
    expected = by_modules(weights, 6, 3)(4 * images - 2)
    # float64, a few hundred sums: agreement to a thousand units in the last place
    torch.testing.assert_close(logits(weights, images), expected, rtol=1e-12, atol=1e-12)


def test_the_start_belongs_to_its_generator_and_has_unit_variance_per_input() -> None:
    shape = Shape(channels=1, side=28, classes=10, width=32)
    one, same, other = (init_weights(shape, stream(0, "net", step)) for step in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["block1.weight"], other["block1.weight"])
    # 9,216 draws: the variance is known to 1.5 %; 6 standard errors
    assert one["block1.weight"].var().item() * 32 * 9 == pytest.approx(1, rel=0.09)
    assert one["block0.scale"].eq(1).all()
    assert not one["block0.shift"].any()


def test_the_penalty_has_no_half() -> None:
    weights = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[2.0]])}
    assert penalty(weights).item() == 29
