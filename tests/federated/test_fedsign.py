"""FedSign: its gradient against autograd of Equation 1, for every reduction and temperature."""

from __future__ import annotations

import pytest
import torch

from sparing.errors import UserError
from sparing.federated.fedsign import FedSign
from sparing.federated.methods import Sent
from sparing.seeds import stream

REDUCTIONS = ["tensor_mean", "sum", "mean"]


def models() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A global model with a quarter of exact zeros, and a client's some way off, on both sides of zero."""
    generator = stream(0, "fedsign")
    shapes = {"body.w": (4, 6), "body.b": (4,), "head.w": (3, 4), "head.b": (3,)}
    g = {name: 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    g["body.w"][0] = 0
    g["head.b"][:] = 0
    x = {n: v + 0.2 * torch.randn(v.shape, generator=generator, dtype=torch.float64) for n, v in g.items()}
    return g, x


def added(method: FedSign, g: dict[str, torch.Tensor], x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    grads = {name: torch.zeros_like(value) for name, value in x.items()}
    method.begin(Sent(g), {}).add_(x, grads, 0.1)
    return grads


def equation_1(g: dict[str, torch.Tensor], x: dict[str, torch.Tensor], reduction: str, temperature: float | str):
    """−γ (sgp(g) · σ(x) + sgp(−g) · σ(−x)), as published: sgp is 1 above zero and else 0; γ = 0.3."""
    parts = []
    for name, value in x.items():
        rms = float((g[name] ** 2).mean()) ** 0.5
        tau = 0.5 * rms if temperature == "scale-aware" else temperature
        if tau == 0:
            continue
        part = (g[name] > 0) * torch.sigmoid(value / tau) + (g[name] < 0) * torch.sigmoid(-value / tau)
        part = part * (rms if temperature == "scale-aware" else 1.0)
        parts.append(part.mean() if reduction == "mean" else part.sum())
    return -0.3 * sum(parts) / (1 if reduction == "sum" else len(x))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.05, "scale-aware"])
def test_golden_gradient(reduction: str, temperature: float | str):
    g, x = models()
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    loss = equation_1(g, leaves, reduction, temperature)
    wanted = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    found = added(FedSign(gamma=0.3, reduction=reduction, temperature=temperature), g, x)
    for grad, name in zip(wanted, x, strict=True):
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-15)
    assert sum(float(grad.abs().sum()) for grad in wanted) > 0


def test_zeros_of_the_global_model_feel_nothing():
    g, x = models()
    found = added(FedSign(gamma=0.3), g, x)
    assert not found["body.w"][0].any()
    assert not found["head.b"].any()
    assert found["body.w"][1:].all()


def test_signs_are_those_of_the_start_of_the_round():
    """A weight that crossed zero is still pushed to the global sign."""
    found = added(FedSign(reduction="sum"), {"w": torch.tensor([1.0, -1.0])}, {"w": torch.tensor([-2.0, 2.0])})
    assert found["w"][0] < 0  # descent moves it up again
    assert found["w"][1] > 0


@pytest.mark.parametrize(("reduction", "each"), [("tensor_mean", 0.2 / 2), ("sum", 0.2), ("mean", 0.2 / 2 / 4)])
def test_force_by_hand(reduction: str, each: float):
    """Two tensors of four elements, γ = 0.2: c/4, and the gradient at θ = 0 is just that."""
    g = {"w": torch.ones(2, 2, dtype=torch.float64), "b": -torch.ones(4, dtype=torch.float64)}
    method = FedSign(gamma=0.2, reduction=reduction)
    assert method.force(g) == pytest.approx(each / 4, rel=1e-12)
    found = added(method, g, {name: torch.zeros_like(value) for name, value in g.items()})
    assert found["w"].flatten().tolist() == pytest.approx([-each / 4] * 4, rel=1e-12)
    assert found["b"].tolist() == pytest.approx([each / 4] * 4, rel=1e-12)


def test_temperature_divides_the_force_and_scale_aware_levels_it():
    g = {"w": torch.full((4,), 0.02), "b": torch.full((2,), 3.0)}
    assert FedSign(gamma=0.2, temperature=0.1).force(g) == pytest.approx(0.2 / 2 / 4 / 0.1)
    aware = FedSign(gamma=0.2, temperature="scale-aware")
    assert aware.force(g) == pytest.approx(0.2 / 2 / 2)
    found = added(aware, g, {name: torch.zeros_like(value) for name, value in g.items()})
    assert found["w"][0].item() == pytest.approx(found["b"][0].item()) == pytest.approx(-0.05)


def test_scale_aware_is_quiet_on_a_tensor_of_zeros():
    g = {"w": torch.ones(4), "b": torch.zeros(4)}
    found = added(FedSign(gamma=0.2, temperature="scale-aware"), g, {"w": torch.ones(4), "b": torch.ones(4)})
    assert not found["b"].any()
    assert found["w"].isfinite().all()


def test_only_restricts_the_force_and_the_count():
    g, x = models()
    found = added(FedSign(gamma=0.3, only=("body",)), g, x)
    assert not found["head.w"].any()
    torch.testing.assert_close(found["body.b"], added(FedSign(gamma=0.3 / 2, reduction="sum"), g, x)["body.b"])
    assert not added(FedSign(only=("head.b", "body.b")), g, x)["body.w"].any()
    with pytest.raises(UserError, match=r"only: got .*bod.*pass names such as 'body\.w'"):
        added(FedSign(only=("bod",)), g, x)


def test_what_is_no_setting_is_refused():
    with pytest.raises(UserError, match="fedsign gamma: got -1"):
        FedSign(gamma=-1)
    with pytest.raises(UserError, match="reduction: got 'median'"):
        FedSign(reduction="median")
    for temperature in (0.0, "warm", float("nan")):
        with pytest.raises(UserError, match=r"FedSign\.temperature"):
            FedSign(temperature=temperature)
