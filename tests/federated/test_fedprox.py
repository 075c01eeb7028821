"""FedProx: its gradient against autograd of the published loss."""

from __future__ import annotations

import pytest
import torch

from sparing.errors import UserError
from sparing.federated.fedprox import FedProx
from sparing.federated.methods import Sent
from sparing.seeds import stream


def test_golden_gradient():
    """CE + (μ/2) Σ ‖x − g‖² over all parameters, in float64."""
    generator = stream(0, "fedprox")
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    g = {"w": draw(3, 4), "b": draw(3)}
    x = {name: (value + draw(*value.shape)).requires_grad_() for name, value in g.items()}
    inputs, targets = draw(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = torch.nn.functional.cross_entropy(inputs @ x["w"].T + x["b"], targets)
    plain = torch.autograd.grad(loss, list(x.values()), retain_graph=True)
    wanted = torch.autograd.grad(loss + 0.35 * sum(((x[n] - g[n]) ** 2).sum() for n in g), list(x.values()))
    grads = {name: grad.clone() for name, grad in zip(x, plain, strict=True)}
    FedProx(mu=0.7).begin(Sent(g), {}).add_({n: v.detach() for n, v in x.items()}, grads, 0.1)
    for name, grad in zip(x, wanted, strict=True):
        torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-12)


def test_only_the_gradients_given_are_changed():
    g = {"w": torch.zeros(2), "frozen": torch.zeros(2)}
    grads = {"w": torch.zeros(2)}
    FedProx(mu=2.0).begin(Sent(g), {}).add_({"w": torch.ones(2), "frozen": torch.ones(2)}, grads, 0.1)
    assert grads["w"].tolist() == [2, 2]


def test_a_spring_that_pushes_is_refused():
    with pytest.raises(UserError, match=r"FedProx\.mu: got -0\.1; .*pass mu >= 0"):
        FedProx(mu=-0.1)
