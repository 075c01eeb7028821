"""Server optimizers against steps worked out by hand and against torch's own on the gradient −Δ."""

from __future__ import annotations

import math

import pytest
import torch

from refusals import refused
from sparing.federated.server.optimizers import FedAdam, FedAvgM, FedYogi, Replace


def vector(*values: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(values, dtype=torch.float64)}


def test_replace_by_hand():
    assert Replace().step(vector(1), vector(3), {})[0]["x"].item() == 3
    assert Replace(lr=0.25).step(vector(1), vector(3), {})[0]["x"].item() == 1.5


def test_momentum_by_hand():
    """β = 0.5, η = 2: v = 2, g = 1 + 4 = 5; then Δ = 6 − 5 = 1, v = 1 + 1 = 2, g = 5 + 4 = 9."""
    server = FedAvgM(lr=2.0, momentum=0.5)
    g, state = server.step(vector(1), vector(3), server.state(vector(1)))
    assert [g["x"].item(), state["velocity"]["x"].item()] == [5, 2]
    g, state = server.step(g, vector(6), state)
    assert [g["x"].item(), state["velocity"]["x"].item()] == [9, 2]


def test_momentum_is_torchs_sgd_on_minus_delta():
    server, steps = FedAvgM(lr=0.7, momentum=0.9), [2.0, -1.0, 0.5, 3.0]
    x = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.7, momentum=0.9)
    g, state = vector(1), server.state(vector(1))
    for step in steps:
        g, state = server.step(g, {"x": g["x"] + step}, state)
        x.grad = torch.tensor([-step], dtype=torch.float64)
        optimizer.step()
    assert g["x"].item() == pytest.approx(x.item(), rel=1e-12)


def test_adam_by_hand():
    """τ = 0.1, β₁ = 0.5, β₂ = 0.75, η = 1; Δ = 2: m = 1, v = 0.75 · 0.01 + 0.25 · 4; no correction of the start."""
    server = FedAdam(lr=1.0, beta1=0.5, beta2=0.75, tau=0.1)
    g, state = server.step(vector(1), vector(3), server.state(vector(1)))
    v = 0.0075 + 1.0
    assert g["x"].item() == pytest.approx(1 + 1 / (math.sqrt(v) + 0.1), rel=1e-14)
    before = g["x"].item()
    g, state = server.step(g, {"x": g["x"] - 4}, state)
    m, v = 0.5 * 1 + 0.5 * -4, 0.75 * v + 0.25 * 16
    assert g["x"].item() == pytest.approx(before + m / (math.sqrt(v) + 0.1), rel=1e-14)
    assert [state["mean"]["x"].item(), state["square"]["x"].item()] == pytest.approx([m, v])


def test_yogi_by_hand():
    """As Adam but for v: 0.01 + 0.25 · 4 after Δ² = 4, and 1.01 − 0.25 · 0.04 after Δ² = 0.04."""
    server = FedYogi(lr=1.0, beta1=0.5, beta2=0.75, tau=0.1)
    g, state = server.step(vector(1), vector(3), server.state(vector(1)))
    assert g["x"].item() == pytest.approx(1 + 1 / (math.sqrt(1.01) + 0.1), rel=1e-14)
    before = g["x"].item()
    g, state = server.step(g, {"x": g["x"] + 0.2}, state)
    assert state["square"]["x"].item() == pytest.approx(1.0, rel=1e-14)
    assert g["x"].item() == pytest.approx(before + 0.6 / 1.1, rel=1e-14)


@pytest.mark.parametrize("server", [FedAvgM(lr=0.5), FedAdam(), FedYogi()], ids=["momentum", "adam", "yogi"])
def test_no_step_no_move_and_dtypes_stay(server: FedAvgM | FedAdam):
    g = {"x": torch.ones(3, dtype=torch.float32)}
    moved, state = server.step(g, g, server.state(g))
    assert torch.equal(moved["x"], g["x"])
    assert moved["x"].dtype == torch.float32
    assert g["x"].tolist() == [1, 1, 1]
    assert all(value["x"].dtype == torch.float32 for value in state.values())


def test_what_cannot_work_is_refused():
    for wrong in (lambda: Replace(lr=0), lambda: FedAvgM(lr=-1), lambda: FedAdam(lr=0)):
        refused("pass lr > 0", wrong)
    for wrong in (lambda: FedAvgM(momentum=1), lambda: FedAdam(beta1=1), lambda: FedAdam(beta2=-0.1)):
        refused("pass a number in", wrong)
    refused(r"FedAdam\.tau", FedAdam, tau=0)
    refused(r"FedYogi\.tau", FedYogi, tau=0)
