"""What every method adds to a client's gradient, against autograd of its published loss, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from refusals import refused
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.controls import Hinge, OwnSign
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.interface import Method, Sent
from sparing.seeds import stream

Vector = dict[str, Tensor]
SHAPES = {"body.w": (4, 6), "body.b": (4,), "head.w": (3, 4), "head.b": (3,)}
REDUCTIONS, TEMPERATURES = ("tensor_mean", "sum", "mean"), (1.0, 0.05, "scale-aware")


def drawn(label: str, size: float) -> Vector:
    generator = stream(0, "terms", label)
    return {name: size * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def fedprox(method: FedProx, g: Vector, x: Vector, lam: Vector) -> Tensor:
    """(μ/2) ‖x − g‖²."""
    return method.mu / 2 * sum(((x[name] - g[name]) ** 2).sum() for name in x)


def feddyn(method: FedDyn, g: Vector, x: Vector, lam: Vector) -> Tensor:
    """−⟨λ, x⟩ + (α/2) ‖x − g‖²."""
    return sum(method.alpha / 2 * ((x[n] - g[n]) ** 2).sum() - (lam[n] * x[n]).sum() for n in x)


def reduced(method: FedSign | Hinge, parts: Vector) -> Tensor:
    """γ Σ over elements and tensors; the mean over tensors; or over the elements of each tensor too."""
    sums = [part.mean() if method.reduction == "mean" else part.sum() for part in parts.values()]
    return method.gamma * sum(sums) / (1 if method.reduction == "sum" else len(SHAPES))


def signs(method: FedSign, g: Vector, x: Vector, lam: Vector) -> Tensor:
    """Equation 1 as published, −γ (sgp(g) · σ(x/τ) + sgp(−g) · σ(−x/τ)), or −γ σ(|x|/τ) for own signs."""
    parts = {}
    for name, value in x.items():
        rms = float((g[name] ** 2).mean()) ** 0.5
        tau, factor = (rms / 2, rms) if method.temperature == "scale-aware" else (method.temperature, 1.0)
        if tau and isinstance(method, OwnSign):
            parts[name] = -factor * torch.sigmoid(value.abs() / tau)
        elif tau:
            up, down = torch.sigmoid(value / tau), torch.sigmoid(-value / tau)
            parts[name] = -factor * ((g[name] > 0) * up + (g[name] < 0) * down)
    return reduced(method, parts)


def hinge(method: Hinge, g: Vector, x: Vector, lam: Vector) -> Tensor:
    """γ max(0, −s x)."""
    return reduced(method, {name: torch.relu(-torch.sign(g[name]) * value) for name, value in x.items()})


CASES = [(FedProx(mu=0.7), fedprox), (FedDyn(alpha=0.3), feddyn)]
CASES += [(Hinge(gamma=0.3, reduction=reduction), hinge) for reduction in REDUCTIONS]
CASES += [
    (kind(gamma=0.3, reduction=reduction, temperature=temperature), signs)
    for kind, reduction, temperature in itertools.product((FedSign, OwnSign), REDUCTIONS, TEMPERATURES)
]


@pytest.mark.parametrize(("method", "loss"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_the_gradient_is_that_of_the_published_loss(method: Method, loss):
    """The global model has zeros, and the client's is some way off, on both sides of zero."""
    g, lam = drawn("global", 0.1), drawn("lam", 1.0)
    g["body.w"][0], g["head.b"][:] = 0, 0
    x = {name: (g[name] + value).requires_grad_() for name, value in drawn("client", 0.2).items()}
    wanted = torch.autograd.grad(loss(method, g, x, lam), list(x.values()), allow_unused=True, materialize_grads=True)
    grads = {name: torch.zeros_like(value) for name, value in g.items()}
    method.begin(Sent(g), {"lam": lam}).add_({name: value.detach() for name, value in x.items()}, grads, 0.1)
    for grad, name in zip(wanted, x, strict=True):
        torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-15)
    assert sum(float(grad.abs().sum()) for grad in wanted) > 0


def test_only_the_gradients_given_are_changed():
    g = {"w": torch.zeros(2), "frozen": torch.zeros(2)}
    grads = {"w": torch.zeros(2)}
    FedProx(mu=2.0).begin(Sent(g), {}).add_({"w": torch.ones(2), "frozen": torch.ones(2)}, grads, 0.1)
    assert grads["w"].tolist() == [2, 2]


def test_a_spring_that_pushes_is_refused():
    refused(r"FedProx\.mu: got -0\.1; .*pass mu >= 0", FedProx, mu=-0.1)
