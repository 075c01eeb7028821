"""What a notebook brings: NumPy rows, one row, bfloat16, methods around methods, a checkpoint of other data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from idioms.federated.cells import USERS
from idioms.federated.test_honest import equals_the_reference
from idioms.federated.worlds import CLIENTS, MODEL, SCHEDULE, client, normed, perceptron, require_same
from refusals import refused
from sparing.federated import Client, FedAvg, Private, flower, simulate
from sparing.federated.client.population import Population
from sparing.federated.methods.controls import NormMatched
from sparing.federated.methods.secure import SecureSum
from sparing.federated.metrics import Accuracy
from sparing.federated.server.robust import Median

ONE = [client(1, at) for at in range(4)]
ARRAYS = [Client(one.inputs.numpy(), one.targets.numpy()) for one in CLIENTS]
PLAN = replace(SCHEDULE, rounds=1)
PRIVATE = Private(FedAvg(), noise=1.0, clip=1.0, per_round=len(CLIENTS))


def around(method):
    """What adds nothing to a method, and would take its clipping, noise or masks away."""
    return lambda: refused(
        "wrap it last", simulate, perceptron, CLIENTS, NormMatched(method, [{}]), replace(PLAN, weight_decay=0.0)
    )


def half_precision():
    """The mean is made in float64 and rounded once."""
    seen = {}

    def watch(update, params):
        seen[update.client] = update.params
        return update

    rows = [Client(one.inputs.bfloat16(), one.targets) for one in CLIENTS]
    run = simulate(lambda: perceptron().bfloat16(), rows, FedAvg(), PLAN, engine="loop", tamper=watch)
    mean = {name: torch.stack([seen[at][name].double() for at in range(6)]).mean(0) for name in run.params}
    require_same(run.params, {name: value.bfloat16() for name, value in mean.items()})


def lonely_row():
    run = simulate(normed, [*CLIENTS, client(1, 9)], FedAvg(), PLAN)
    assert run.record[0]["left_out"].startswith("client 6: crash (ValueError: Expected more than 1 value per channel")
    require_same(run.params, simulate(normed, CLIENTS, FedAvg(), PLAN, engine="loop").params)


def made_when_drawn():
    everyone = Population(lambda at: ARRAYS[at] if at == 3 else CLIENTS[at], torch.tensor([8, 10, 9, 8, 11, 8]))
    told = simulate(perceptron, everyone, FedAvg(), PLAN).record[0]["left_out"]
    assert told.startswith("client 3: crash (client 3: got ndarray and ndarray; rows are tensors; pass Client(")
    assert "; client" not in told


def on_a_node():
    pytest.importorskip("flwr", reason="needs the extra [flower]")
    run = flower.run_in_process(perceptron, [*CLIENTS[:3], ARRAYS[3]], FedAvg(), PLAN)
    assert [fault.client for fault in run.rounds[0].faults] == [3]
    assert "got ndarray and ndarray; rows are tensors" in str(run.rounds[0].faults[0])


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 3)).double()


def resumed(what, *, clients=CLIENTS, **changed):
    """A second round under something else than the first."""

    def check(tmp_path):
        file = tmp_path / "run"
        simulate(normed, CLIENTS, FedAvg(), PLAN, checkpoint=file)
        again = {"checkpoint": file, "resume": True, **changed}
        refused(f"it differs in {what}", simulate, normed, clients, FedAvg(), SCHEDULE, **again)

    return check


def from_an_earlier_release(tmp_path, monkeypatch):
    whole, file = simulate(normed, CLIENTS, FedAvg(), SCHEDULE), tmp_path / "run"
    with monkeypatch.context() as earlier:
        earlier.setattr("sparing.federated.embedded.describe_data", lambda *_: {})
        simulate(normed, CLIENTS, FedAvg(), PLAN, checkpoint=file)
    require_same(simulate(normed, CLIENTS, FedAvg(), SCHEDULE, checkpoint=file, resume=True).params, whole.params)


def numpy_proxy():
    plan = replace(PLAN, batch_norm="recalibrate")
    refused("proxy: got ndarray; rows are tensors", simulate, normed, CLIENTS, FedAvg(), plan, proxy=ARRAYS[0].inputs)


OTHER = [Client(one.inputs + 1.0, one.targets) for one in CLIENTS]
CHECKS = (
    lambda: equals_the_reference("FedProx", MODEL["tied weights"], engine="batched"),
    lambda: equals_the_reference("FedAvg", clients=ONE), lambda: equals_the_reference("SCAFFOLD", clients=ONE),
    lonely_row, half_precision,
    lambda: refused("without a shape; .* run the model on a row", simulate, lazy, CLIENTS, FedAvg(), PLAN),
    lambda: refused("client 0: got ndarray and ndarray; rows are", simulate, perceptron, ARRAYS, FedAvg(), PLAN),
    made_when_drawn, on_a_node,
    lambda: refused("Accuracy: got ndarray and ndarray", Accuracy, ARRAYS[0].inputs, ARRAYS[0].targets), numpy_proxy,
    around(PRIVATE), around(SecureSum(FedAvg())),
    lambda: refused(r"pass combine=Mean\(\)", replace, PRIVATE, method=FedAvg(combine=Median())),
    lambda: refused(r"pass combine=Mean\(\)", SecureSum, FedAvg(combine=Median())),
    lambda: refused("pass the method alone", SecureSum, PRIVATE),
    resumed("rows", clients=OTHER), resumed("loss", loss=nn.MultiMarginLoss()), resumed("mixture", mixture=True),
    from_an_earlier_release,
)  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "check"), list(zip(USERS, CHECKS, strict=True)), ids=lambda one: getattr(one, "name", "")
)
def test_what_a_notebook_brings(cell, check, tmp_path, monkeypatch):
    names = check.__code__.co_varnames[: check.__code__.co_argcount]
    check(
        **{name: value for name, value in {"tmp_path": tmp_path, "monkeypatch": monkeypatch}.items() if name in names}
    )
