"""Line searches on functions whose best step is known, judged on rows that were not searched."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import UserError
from sparing.seeds import stream
from sparing.valley.apply import state_digests
from sparing.valley.scans.steer import STEPS, steer, steering_direction


class Bowl:
    """Squared distance of the weights from a target; ``shift`` moves the target for other rows."""

    def __init__(self, target: list[float], shift: float = 0.0) -> None:
        self.target = torch.tensor(target, dtype=torch.float64) + shift

    def __call__(self, model: nn.Module) -> dict[str, float]:
        theta = nn.utils.parameters_to_vector(model.parameters())
        return {"loss": float((theta - self.target).square().sum())}


def weights(*values: float) -> nn.Linear:
    model = nn.Linear(len(values), 1, bias=False).double()
    model.weight.data.copy_(torch.tensor([values]))
    return model


def test_directions_have_the_length_of_the_weights():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    size = nn.utils.parameters_to_vector(model.parameters()).norm().item()
    for along in ("sign", "difference", "self"):
        vector = steering_direction(model, along, other)
        assert math.sqrt(sum(float(value.square().sum()) for value in vector.values())) == pytest.approx(
            size, rel=1e-12
        )


def test_sign_direction_by_hand():
    """θ = (3, −4, 0): root mean square √(25/3), signs (+, −, 0); scaled to ‖θ‖ = 5 it is 5 (1, −1, 0)/√2."""
    found = steering_direction(weights(3.0, -4.0, 0.0), "sign")["weight"].flatten().tolist()
    assert found == pytest.approx([5 / math.sqrt(2), -5 / math.sqrt(2), 0.0], rel=1e-12)


def test_signs_keep_each_tensors_own_size():
    """Two tensors of root mean square 1 and 10 keep that ratio; here all magnitudes are equal, so nothing changes."""
    model = nn.Linear(4, 1).double()
    model.weight.data.fill_(-1.0)
    model.bias.data.fill_(10.0)
    found = steering_direction(model, "sign")
    torch.testing.assert_close(found["weight"], model.weight.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found["bias"], model.bias.detach(), rtol=1e-12, atol=0)


def test_difference_leads_away_from_the_member():
    """(3, 4) − (3, 0) = (0, 4), scaled to ‖(3, 4)‖ = 5."""
    found = steering_direction(weights(3.0, 4.0), "difference", weights(3.0, 0.0))
    assert found["weight"].flatten().tolist() == pytest.approx([0.0, 5.0])


def test_best_step_of_a_bowl_and_its_gain_on_other_rows():
    """θ = (3, −4) along signs d = (5, −5)/√2, target θ + 0.2 d: the step is 0.2 exactly. Test rows have their target
    at θ + 0.2 d + s: the gain is |0.2 d + s|² − |s|²."""
    d = 5 / math.sqrt(2)
    target, shift = [3 + 0.2 * d, -4 - 0.2 * d], 0.3
    found = steer(weights(3.0, -4.0), Bowl(target), test=Bowl(target, shift))
    assert found.path.step == 0.2
    expected = (0.2 * d + shift) ** 2 + (-0.2 * d + shift) ** 2 - 2 * shift**2
    assert found.path.gain["loss"] == pytest.approx(expected, rel=1e-12)
    assert found.path.searched["loss"][STEPS.index(0.2)] == pytest.approx(0.0, abs=1e-24)
    assert found.state["weight"].flatten().tolist() == pytest.approx(target, rel=1e-12)
    # Plain scaling θ (1 + l): the best l is ⟨target − θ, θ⟩/25 = 0.2 · 5/√2 · 7/25 = 0.198, on the grid 0.2
    assert found.scaling.step == 0.2
    scaled = [3 * 1.2, -4 * 1.2]
    after = sum((at - (goal + shift)) ** 2 for at, goal in zip(scaled, target, strict=True))
    before = (0.2 * d + shift) ** 2 + (-0.2 * d + shift) ** 2
    assert found.scaling.gain["loss"] == pytest.approx(before - after, rel=1e-12)
    assert found.beyond["loss"] == pytest.approx(found.path.gain["loss"] - found.scaling.gain["loss"], rel=1e-15)


def test_gain_can_be_negative_where_the_rows_disagree():
    found = steer(weights(3.0, 4.0), Bowl([3.6, 4.8]), test=Bowl([3.0, 4.0]), along="self")
    assert found.path.step == 0.2
    assert found.path.gain["loss"] == pytest.approx(-1.0, rel=1e-12)  # |0.2 θ|² = 1
    assert found.scaling is found.path


def test_of_equal_values_the_shortest_step():
    class Flat(Bowl):
        def __call__(self, model: nn.Module) -> dict[str, float]:
            return {"loss": 1.0}

    assert steer(weights(1.0), Flat([0.0]), test=Bowl([0.0]), steps=(0.3, -0.1, 0.2)).path.step == 0.0


def test_not_a_number_is_never_chosen():
    class Torn(Bowl):
        def __call__(self, model: nn.Module) -> dict[str, float]:
            value = float(model.weight.item())
            return {"loss": value if value <= 1.0 else math.nan}

    assert steer(weights(1.0), Torn([0.0]), test=Bowl([0.0]), steps=(0.2, -0.2)).path.step == -0.2


def test_frozen_parameters_stay():
    model = nn.Linear(2, 2).double()
    model.bias.requires_grad_(False)
    assert list(steering_direction(model, "sign")) == ["weight"]
    assert list(steering_direction(model, "difference", nn.Linear(2, 2).double())) == ["weight"]
    model.weight.requires_grad_(False)
    refused("no trainable parameters", steering_direction, model, "sign")


def test_batch_norm_is_refreshed_and_the_model_restored():
    generator = stream(0, "test-steer")
    rows = torch.randn(20, 3, generator=generator)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        hidden = model[0](rows)
        seen.append(torch.allclose(model[1].running_mean, hidden.mean(0), atol=1e-5))  # float32
        return {"loss": float(model(rows).square().mean())}

    before = state_digests(model)
    found = steer(model, evaluate, test=lambda model: evaluate(model), calibrate=[rows])
    assert state_digests(model) == before
    assert all(seen)
    hidden = nn.functional.linear(rows, found.state["0.weight"], found.state["0.bias"])
    torch.testing.assert_close(found.state["1.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-5)  # float32


def test_rows_name_the_chosen_step_of_both_paths():
    rows = steer(weights(3.0, -4.0), Bowl([4.0, -5.0]), test=Bowl([4.0, -5.0], 0.1), steps=(0.1,)).rows_of()
    assert [(row["along"], row["step"], row["chosen"]) for row in rows] == [
        ("sign", 0.0, False), ("sign", 0.1, True), ("self", 0.0, False), ("self", 0.1, True),
    ]  # fmt: skip


def test_refusals():
    model, bowl = weights(1.0), Bowl([2.0])
    refused("a gain on the searched rows is partly luck", steer, model, bowl, test=bowl)
    refused("lengths are finite", steer, model, bowl, test=Bowl([2.0]), steps=(float("inf"),))
    with pytest.raises(UserError, match="no such direction"):
        steer(model, bowl, test=Bowl([2.0]), along="up")  # type: ignore[arg-type]
    refused("a difference needs two models", steer, model, bowl, test=Bowl([2.0]), along="difference")
    refused("the same weights", steer, model, bowl, test=Bowl([2.0]), along="difference", other=weights(1.0))
    refused("measured were loss", steer, model, bowl, test=Bowl([2.0]), metric="accuracy")
    refused("statistics must follow", steer, nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), bowl, test=Bowl([2.0]))
