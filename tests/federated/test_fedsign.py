"""FedSign: its gradient against autograd of Equation 1, for every reduction and temperature."""

from __future__ import annotations

import pytest
import torch

from refusals import refused
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.controls import Hinge, NormMatched, OwnSign
from sparing.federated.methods.interface import Sent
from sparing.federated.settings import Schedule
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
    refused(r"only: got .*bod.*pass names such as 'body\.w'", added, FedSign(only=("bod",)), g, x)


def test_what_is_no_setting_is_refused():
    refused("fedsign gamma: got -1", FedSign, gamma=-1)
    refused("reduction: got 'median'", FedSign, reduction="median")
    for temperature in (0.0, "warm", float("nan")):
        refused(r"FedSign\.temperature", FedSign, temperature=temperature)


@pytest.mark.parametrize("method", [FedSign(), OwnSign(), Hinge(), NormMatched(FedSign(), [{}])])
def test_adamw_would_change_what_gamma_is(method):
    refused(r"Schedule\.optimizer: got adamw; .*no longer γ's", method.check, Schedule(rounds=1, optimizer="adamw"))
