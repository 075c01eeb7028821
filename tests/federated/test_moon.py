"""MOON: its loss and gradient against the published formula, with and without batch norm."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from refusals import refused
from sparing.errors import UserError
from sparing.federated.methods.interface import Sent
from sparing.federated.methods.moon import MOON
from sparing.seeds import stream


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)  # registered first: what counts is which linear layer runs last
        self.body = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def z(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.body(inputs)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.z(inputs))


def made(norm: bool, label: str) -> Net:
    """A net whose parameters and statistics belong to a label, float64, training."""
    net, generator = Net(norm).double(), stream(0, "moon", label)
    with torch.no_grad():
        for value in [*net.parameters(), *net.buffers()]:
            if value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 0.6)
        if norm:
            net.norm.running_var.abs_().add_(0.5)
    return net


def parts(net: Net) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return (
        {name: value.detach().clone() for name, value in net.named_parameters()},
        {name: value.clone() for name, value in net.named_buffers()},
    )


def by_hand(z: torch.Tensor, near: torch.Tensor, far: torch.Tensor, mu: float, tau: float) -> torch.Tensor:
    """Row by row as Equation 3 has it."""
    total = torch.zeros((), dtype=z.dtype)
    for a, b, c in zip(z, near, far, strict=True):
        close = torch.exp(a @ b / (a.norm() * b.norm()) / tau)
        apart = torch.exp(a @ c / (a.norm() * c.norm()) / tau)
        total = total - torch.log(close / (close + apart))
    return mu * total / len(z)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_golden_loss_and_gradient(norm: bool):
    local, received, last = made(norm, "local"), made(norm, "global"), made(norm, "last")
    inputs = 0.5 + torch.rand(8, 5, generator=stream(0, "rows"), dtype=torch.float64)
    method = MOON(mu=0.7, temperature=0.3)
    sent = Sent(parts(received)[0], buffers=parts(received)[1])
    state, extras = method.finish(sent, parts(last)[0], method.client_state(sent.params), 5, 0.1, parts(last)[1])
    assert extras == {}
    twin = copy.deepcopy(local)
    with torch.no_grad():
        near, far = received.eval().z(inputs), last.eval().z(inputs)
    wanted = by_hand(twin.z(inputs), near, far, 0.7, 0.3)  # the client's own model in training mode
    outputs = local(inputs)
    found = method.begin(sent, state).loss(local, inputs, outputs)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    golden = torch.autograd.grad(wanted, list(twin.parameters()), allow_unused=True, materialize_grads=True)
    grads = torch.autograd.grad(found, list(local.parameters()), allow_unused=True, materialize_grads=True)
    for a, b in zip(grads, golden, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert max(float(grad.abs().max()) for grad in golden) > 1e-3
    for a, b in zip(local.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)  # the batch counted once, in the pass that made the outputs
    assert all(module.training for module in local.modules())


def test_at_a_first_visit_in_the_first_round_near_and_far_are_the_same():
    """Global and initial model are one, the loss is μ log 2, and its gradient zero."""
    net, inputs = made(True, "local"), torch.rand(6, 5, generator=stream(1, "rows"), dtype=torch.float64)
    params, buffers = parts(made(True, "global"))
    method = MOON(mu=3.0)
    loss = method.begin(Sent(params, buffers=buffers), method.client_state(params)).loss(net, inputs, net(inputs))
    assert loss.item() == pytest.approx(3 * math.log(2), rel=1e-12)
    grads = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True)
    assert all(float(grad.abs().max()) < 1e-12 for grad in grads)


def test_state_is_a_copy_and_untrained_blocks_are_those_received():
    sent = Sent({"a": torch.zeros(1), "b": torch.ones(1)})
    x = torch.full((1,), 5.0)
    state, _ = MOON().finish(sent, {"a": x}, {"previous": sent.params}, 3, 0.1)
    x.fill_(9.0)
    assert [state["previous"][name].item() for name in "ab"] == [5, 1]


def test_a_named_module_gives_the_representation():
    net, inputs = made(False, "local"), torch.rand(6, 5, generator=stream(1, "rows"), dtype=torch.float64)
    received, last = made(False, "global"), made(False, "last")
    state = {"previous": parts(last)[0]}
    found = MOON(mu=1.0, features="head").begin(Sent(parts(received)[0]), state).loss(net, inputs, net(inputs))
    wanted = by_hand(net(inputs), received(inputs).detach(), last(inputs).detach(), 1.0, 0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_what_has_no_representation_is_refused():
    sent, inputs = Sent({}), torch.zeros(2, 3)
    with pytest.raises(UserError, match="no linear layer receives a representation"):
        MOON().begin(sent, {"previous": {}}).loss(nn.ReLU(), inputs, inputs)
    with pytest.raises(UserError, match=r"MOON\.features: got 'pool'; the model has no module of that path"):
        MOON(features="pool").begin(sent, {"previous": {}}).loss(nn.Linear(3, 3), inputs, inputs)
    refused(r"MOON\.mu", MOON, mu=-1)
    refused(r"MOON\.temperature", MOON, temperature=0)
