"""One node replies on Flower with what nobody can use: it is named, and the model is that of the other nodes."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from idioms.federated.cells import ON_FLOWER
from idioms.federated.worlds import CLIENTS, METHOD, SCHEDULE, normed, require_same

pytest.importorskip("flwr", reason="needs the extra [flower]")

from sparing.federated import flower

ATTACKER, NODES = 1, CLIENTS[:4]


def array(value):
    from flwr.app import Array

    return Array(value.numpy())


def change(content, name, value):
    content.array_records["arrays"].update({name: array(value)})


def bytes_of_nothing(content):
    from flwr.app import Array

    content["arrays"].update({"0.bias": Array("float64", (5,), "numpy.ndarray", b"nothing at all")})


def crash(content):
    raise RuntimeError("gone")


WIRE = {
    "parameters NaN": (lambda c: change(c, "0.bias", torch.full((5,), math.nan).double()), "not finite (0.bias)"),
    "running_var 10¹²": (lambda c: change(c, "1.running_var", torch.full((5,), 1e12).double()), "1.running_var)"),
    "a tensor missing": (lambda c: c["arrays"].pop("0.bias"), "0.bias is only on one side"),
    "a tensor too many": (lambda c: change(c, "x", torch.zeros(1)), "x is no tensor of the model"),
    "a tensor of another shape": (lambda c: change(c, "0.bias", torch.zeros(6).double()), "0.bias is (6,) float64"),
    "complex parameters": (
        lambda c: change(c, "0.bias", torch.zeros(5, dtype=torch.complex128)),
        "['0.bias']: got complex; the model's is real",
    ),
    "no arrays": (lambda c: c.pop("arrays"), "unreadable reply"),
    "no metrics": (lambda c: c.pop("metrics"), "no metrics"),
    "weight 10¹²": (lambda c: c["metrics"].update({"one": 1e12}), "weight (claims 1e+12 and counts 1)"),
    "weight as a list": (lambda c: c["metrics"].update({"one": [1.0, 1.0]}), "unreadable reply"),
    "weight NaN": (lambda c: c["metrics"].update({"one": math.nan}), "not finite (weight nan)"),
    "bytes that are no array": (bytes_of_nothing, "unreadable reply"),
}


def train(method, spoil):
    def mod(message, context, call_next):
        reply = call_next(message, context)
        if context.node_config["partition-id"] == ATTACKER and reply.content.array_records:
            spoil(reply.content)
        return reply

    return flower.run_in_process(normed, NODES, METHOD[method], SCHEDULE, mods=[mod])


@functools.cache
def without_the_attacker(method):
    return train(method, crash)


@pytest.mark.parametrize("cell", ON_FLOWER, ids=lambda cell: cell.name)
def test_it_is_named_and_the_round_goes_on_without_it(cell):
    spoil, says = WIRE[cell.idiom.removeprefix("one node replies with ")]
    run, expected = train(cell.subject, spoil), without_the_attacker(cell.subject)
    for one in run.rounds:
        assert one.received == (0, 2, 3)
        assert [fault.client for fault in one.faults] == [ATTACKER]
        assert says in str(one.faults[0])
    require_same(run.params, expected.params)
    require_same(run.buffers, expected.buffers)
    for name, vector in expected.state.items():
        require_same(run.state[name], vector)
