"""What two models' weights say of their distance, by hand and by law."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparing.seeds import stream
from sparing.valley.forecast.predict import FEATURES, TASK_FEATURES, features_of, matrices_of


def drawn(label: str) -> dict[str, torch.Tensor]:
    generator = stream(0, "test-features", label)
    return {name: torch.randn(30, 40, generator=generator).double() for name in ("x", "y")} | {"b": torch.ones(40)}


def test_equal_models_are_at_zero():
    model = drawn("a")
    found = features_of(model, model, {name: value / 2 for name, value in model.items()})
    assert set(found) == {*FEATURES, *TASK_FEATURES}
    zero = {name: value for name, value in found.items() if name != "update"}
    assert zero == pytest.approx(dict.fromkeys(zero, 0.0), abs=1e-12)  # roots and quotients in float64
    assert found["update"] == pytest.approx(1.0)


def test_hand_computed_distances():
    """a = (3, 4), b = (3, −4): ‖a − b‖ = 8 over 5; their middle (3, 0) is 3 long where each is 5; of the magnitudes
    6 + 8 the 8 flip."""
    a, b = {"w": torch.tensor([[3.0, 4.0]])}, {"w": torch.tensor([[3.0, -4.0]])}
    found = features_of(a, b)
    assert found["distance"] == pytest.approx(8 / 5)
    assert found["shrinkage"] == pytest.approx(1 - 3 / 5)
    assert found["flips"] == pytest.approx(8 / 14)


def test_hand_computed_task_vectors():
    """Base (1, 1)·√½…: τ = (1, 0) and (0, 2) are at right angles, and 1.5 long on average where the base is 2."""
    base = {"w": torch.tensor([[0.0, 2.0]])}
    found = features_of({"w": torch.tensor([[1.0, 2.0]])}, {"w": torch.tensor([[0.0, 4.0]])}, base)
    assert found["task_angle"] == pytest.approx(1.0)
    assert found["update"] == pytest.approx(1.5 / 2)


def test_strangers_are_near_one():
    """Within 4 errors of sign counts over 2400 and 1200 elements."""
    found = features_of(drawn("a"), drawn("b"))
    assert found["disagreement"] == pytest.approx(1.0, abs=4 / math.sqrt(2400))
    assert found["worst"] == pytest.approx(1.0, abs=5 / math.sqrt(1200))
    assert found["distance"] == pytest.approx(math.sqrt(2), abs=0.05)


def test_every_number_grows_with_distance_and_is_symmetric():
    a, noise = drawn("a"), drawn("noise")
    near, far = ({name: value + size * noise[name] for name, value in a.items()} for size in (0.2, 0.8))
    small, large = features_of(a, near), features_of(a, far)
    assert all(small[name] < large[name] for name in FEATURES)
    assert features_of(far, a) == pytest.approx(large, rel=1e-12)


def test_scales_of_norms_do_not_count_where_there_are_matrices():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert list(matrices_of(dict(model.named_parameters()))) == ["0.weight"]
    assert list(matrices_of({"scale": torch.ones(3)})) == ["scale"]


def test_what_is_not_defined_is_nan():
    zero, one = {"w": torch.zeros(2, 2)}, {"w": torch.ones(2, 2)}
    found = features_of(one, one, one)
    assert math.isnan(found["task_angle"])
    assert math.isnan(features_of(zero, zero)["distance"])
    assert math.isnan(features_of(one, one)["disagreement"])  # all positive: chance alone makes them agree
