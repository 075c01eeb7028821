"""The controls of FedSign: gradients against autograd, whose sign counts, norms held."""

from __future__ import annotations

import pytest
import torch

from refusals import refused
from sparing.errors import UserError
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.controls import Hinge, NormMatched, OwnSign, scaled_to, tensor_norms
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.interface import Method, Sent, Update
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.server.optimizers import FedAvgM
from sparing.federated.settings import Schedule

Vector = dict[str, torch.Tensor]


def added(method: Method, g: Vector, x: Vector) -> Vector:
    grads = {name: torch.zeros_like(value) for name, value in x.items()}
    method.begin(Sent(g), {}).add_(x, grads, 0.1)
    return grads


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
    refused(r"Schedule\.momentum", method.check, Schedule(rounds=5, momentum=0.5))
    refused("record the other run for as many rounds", NormMatched(FedAvg(), []).check, Schedule(rounds=1))
    buffers = [Update(0, {}, buffers={"m": torch.ones(1)})]
    assert method.buffers({"m": torch.zeros(1)}, buffers)["m"].item() == 1


def test_scaling_keeps_direction_and_dtype():
    value = torch.tensor([3.0, -4.0], dtype=torch.float16)
    assert scaled_to(value, 10.0).tolist() == [6, -8]
    assert scaled_to(value, 10.0).dtype == torch.float16
    assert scaled_to(torch.zeros(2), 5.0).tolist() == [0, 0]


def test_what_is_no_setting_is_refused():
    refused("own-sign gamma", OwnSign, gamma=-1)
    refused("hinge reduction", Hinge, reduction="max")
