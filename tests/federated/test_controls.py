"""The controls of FedSign: gradients against autograd, whose sign counts, norms held."""

from __future__ import annotations

import pytest
import torch

from sparing.errors import UserError
from sparing.federated.controls import Hinge, NormMatched, OwnSign, scaled_to, tensor_norms
from sparing.federated.fedavg import FedAvg
from sparing.federated.fedsign import FedSign
from sparing.federated.methods import Method, Sent, Update
from sparing.federated.scaffold import SCAFFOLD
from sparing.federated.servers import FedAvgM
from sparing.federated.settings import Schedule
from sparing.seeds import stream

Vector = dict[str, torch.Tensor]


def models() -> tuple[Vector, Vector]:
    generator = stream(0, "controls")
    g = {n: 0.2 * torch.randn(s, generator=generator, dtype=torch.float64) for n, s in (("w", (5, 6)), ("b", (7,)))}
    g["w"][0] = 0
    return g, {n: v + 0.3 * torch.randn(v.shape, generator=generator, dtype=torch.float64) for n, v in g.items()}


def added(method: Method, g: Vector, x: Vector) -> Vector:
    grads = {name: torch.zeros_like(value) for name, value in x.items()}
    method.begin(Sent(g), {}).add_(x, grads, 0.1)
    return grads


@pytest.mark.parametrize("reduction", ["tensor_mean", "sum", "mean"])
@pytest.mark.parametrize("temperature", [1.0, 0.1, "scale-aware"])
def test_own_sign_golden_gradient(reduction: str, temperature: float | str):
    """−c σ(|θ|/τ), the global model giving nothing but sizes and scales."""
    g, x = models()
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    parts = []
    for name, value in leaves.items():
        rms = float((g[name] ** 2).mean()) ** 0.5
        tau, factor = (0.5 * rms, rms) if temperature == "scale-aware" else (temperature, 1.0)
        part = factor * torch.sigmoid(value.abs() / tau)
        parts.append(part.mean() if reduction == "mean" else part.sum())
    loss = -0.3 * sum(parts) / (1 if reduction == "sum" else 2)
    found = added(OwnSign(gamma=0.3, reduction=reduction, temperature=temperature), g, x)
    for grad, name in zip(torch.autograd.grad(loss, list(leaves.values())), x, strict=True):
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-15)


def test_own_sign_uses_the_sign_of_the_weight_itself():
    g, x = {"w": torch.tensor([1.0, -1.0, 0.0, 5.0])}, {"w": torch.tensor([-2.0, 2.0, 3.0, 0.0])}
    found = added(OwnSign(reduction="sum", gamma=1.0), g, x)["w"]
    assert torch.sign(found).tolist() == [1, -1, -1, 0]  # outwards under descent, also where g is 0
    agree = {"w": torch.tensor([2.0, -3.0])}
    same = {"w": torch.tensor([1.0, -1.0])}
    torch.testing.assert_close(added(OwnSign(), same, agree), added(FedSign(), same, agree))


@pytest.mark.parametrize(("reduction", "scale"), [("tensor_mean", 1 / 2), ("sum", 1.0), ("mean", None)])
def test_hinge_golden_gradient(reduction: str, scale: float | None):
    """c Σ max(0, −s θ)."""
    g, x = models()
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    terms = {name: torch.relu(-torch.sign(g[name]) * value) for name, value in leaves.items()}
    loss = 0.3 * sum(t.mean() / 2 if scale is None else scale * t.sum() for t in terms.values())
    found = added(Hinge(gamma=0.3, reduction=reduction), g, x)
    for grad, name in zip(torch.autograd.grad(loss, list(leaves.values())), x, strict=True):
        torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-15)


def test_hinge_acts_on_flips_alone():
    g, x = {"w": torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0])}, {"w": torch.tensor([2.0, -2.0, -0.1, 0.1, 3.0, 0.0])}
    method = Hinge(gamma=0.5, reduction="sum")
    assert added(method, g, x)["w"].tolist() == [0, 0, -0.5, 0.5, 0, 0]
    assert method.force(g) == 0.5
    two = {"w": torch.ones(4), "b": torch.ones(4)}
    assert Hinge(gamma=0.5, only=("b",)).force(two) == 0.25
    assert not added(Hinge(only=("b",)), two, {name: -value for name, value in two.items()})["w"].any()


def test_norms_are_held_round_by_round():
    norms = [{"w": 10.0, "b": 2.0}, {"w": 1.0}]
    method = NormMatched(FedSign(), norms)
    g, state = {"w": torch.zeros(2), "b": torch.zeros(1), "dead": torch.zeros(2)}, None
    state = method.server_state(g)
    answer = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([-1.0]), "dead": torch.zeros(2)}
    g, state, _ = method.aggregate(g, [Update(0, answer)], state, 1)
    assert [g["w"].tolist(), g["b"].tolist(), g["dead"].tolist()] == [[6, 8], [-2], [0, 0]]
    assert tensor_norms(g) == pytest.approx({"w": 10.0, "b": 2.0, "dead": 0.0})
    g, state, _ = method.aggregate(g, [Update(0, answer)], state, 1)
    assert g["w"].tolist() == pytest.approx([0.6, 0.8])
    assert g["b"].tolist() == [-1]  # no norm was given
    with pytest.raises(UserError, match=r"NormMatched\.norms: got those of 2 rounds; the run has 3 rounds"):
        method.aggregate(g, [Update(0, answer)], state, 1)


def test_norm_matching_passes_everything_on():
    inner = SCAFFOLD(server=FedAvgM())
    method = NormMatched(inner, [{}] * 5)
    params = {"w": torch.ones(2)}
    sent, state = Sent(params, {"control": {"w": torch.ones(2)}}), method.client_state(params)
    assert (method.name, method.stackable, list(state)) == ("norm-matched-scaffold", True, ["control"])
    x = {"w": torch.zeros(2)}
    new, extras = method.finish(sent, x, state, 5, 0.1)
    torch.testing.assert_close(new, inner.finish(sent, x, state, 5, 0.1)[0])
    server = method.server_state(params)
    found = method.aggregate(params, [Update(0, x, extras=extras)], server, 2)
    wanted = inner.aggregate(params, [Update(0, x, extras=extras)], inner.server_state(params), 2)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[2], wanted[2])
    assert found[1].keys() == wanted[1].keys() | {"matched"}
    assert "matched" not in found[2]
    with pytest.raises(UserError, match=r"Schedule\.momentum"):
        method.check(Schedule(rounds=5, momentum=0.5))
    with pytest.raises(UserError, match="record the other run for as many rounds"):
        NormMatched(FedAvg(), []).check(Schedule(rounds=1))
    buffers = [Update(0, {}, buffers={"m": torch.ones(1)})]
    assert method.buffers({"m": torch.zeros(1)}, buffers)["m"].item() == 1


def test_scaling_keeps_direction_and_dtype():
    value = torch.tensor([3.0, -4.0], dtype=torch.float16)
    assert scaled_to(value, 10.0).tolist() == [6, -8]
    assert scaled_to(value, 10.0).dtype == torch.float16
    assert scaled_to(torch.zeros(2), 5.0).tolist() == [0, 0]


def test_what_is_no_setting_is_refused():
    with pytest.raises(UserError, match="own-sign gamma"):
        OwnSign(gamma=-1)
    with pytest.raises(UserError, match="hinge reduction"):
        Hinge(reduction="max")
