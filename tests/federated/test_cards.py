"""A model on an accelerator and clients whose rows lie on the host: the bits of the same run on the CPU.

No accelerator is here: ``cards`` stands in for one, so operators, dtypes and streams are those of the CPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from federated import cards, worlds
from sparing.errors import UserError
from sparing.federated.client.population import Population
from sparing.federated.client.train import Client
from sparing.federated.embedded import simulate
from sparing.federated.engines.interface import Loop
from sparing.federated.fedsign import FedSign
from sparing.federated.methods.controls import Hinge, NormMatched, OwnSign
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.fedpan import FedPAN
from sparing.federated.methods.fedprox import FedProx
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.private import Private
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.methods.secure import SecureSum
from sparing.federated.metrics import Accuracy
from sparing.federated.placement import seeded
from sparing.federated.server.collusion import Collusion
from sparing.federated.server.defences import Bucketing, Bulyan, CenteredClipping, GeometricMedian
from sparing.federated.server.faults import Guard, Sabotage
from sparing.federated.server.optimizers import FedAdam, FedAvgM
from sparing.federated.server.robust import Clipped, Krum, Median, TrimmedMean
from sparing.federated.server.trust import FLTrust
from sparing.federated.settings import Schedule

PLAIN = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=4, lr=0.1, momentum=0.0)
SIZES = (7, 12, 5, 9, 8, 6, 4)


def placed(make, device):
    return make().to(device)


def both(method, schedule=PLAIN, make=worlds.normed, clients=None, **options):
    """The run on the CPU, and the one whose model is on a card."""
    clients = worlds.make_clients(SIZES) if clients is None else clients
    rows = worlds.client(11, 9)
    options = {"evaluate": Accuracy(rows.inputs, rows.targets), "seed": 2, **options}
    host = simulate(partial(placed, make, "cpu"), clients, method, schedule, **options)
    with cards.there():
        return host, simulate(partial(placed, make, cards.FIRST), clients, method, schedule, **options)


def assert_same(host, card):
    """Equal bits, nobody left out, the global model still on its card, and what clients keep on the host."""
    with cards.there():
        assert {str(value.device) for value in (*card.params.values(), *card.buffers.values())} == {cards.FIRST}
        assert worlds.equal(host.params, {name: value.cpu() for name, value in card.params.items()})
        assert worlds.equal(host.buffers, {name: value.cpu() for name, value in card.buffers.items()})
        kept = [
            value for state in card.state.clients.values() for vector in state.values() for value in vector.values()
        ]
        assert {value.device.type for value in kept} <= {"cpu"}
    timed = {"seconds", "clients_per_second"}
    for one, other in zip(host.record, card.record, strict=True):
        # as text, in which NaN equals NaN
        assert str({key: value for key, value in one.items() if key not in timed}) == str(
            {key: value for key, value in other.items() if key not in timed}
        )
    assert host.engine == card.engine


METHODS = {
    "fedavg": FedAvg(), "fedprox": FedProx(), "moon": MOON(), "feddyn": FedDyn(weights="size"), "fedpan": FedPAN(),
    "scaffold": SCAFFOLD(), "fednova": FedNova(), "ditto": Ditto(), "fedsign": FedSign(temperature="scale-aware"),
    "own sign": OwnSign(), "hinge": Hinge(), "norm-matched": NormMatched(FedAvg(), [{"0.weight": 2.0}] * 2),
    "median": FedAvg(combine=Median()), "trimmed": FedAvg(combine=TrimmedMean()), "krum": FedAvg(combine=Krum()),
    "bulyan": FedAvg(combine=Bulyan()), "geometric": FedAvg(combine=GeometricMedian()),
    "centered": FedAvg(combine=CenteredClipping(radius=0.1)), "clipped": FedAvg(combine=Clipped(norm=0.1)),
    "buckets": FedAvg(combine=Bucketing(Median())), "adam": FedAvg(server=FedAdam()),
    "momentum": SCAFFOLD(server=FedAvgM()),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_every_method_one_client_after_another(name):
    host, card = both(METHODS[name], engine="loop")
    assert_same(host, card)
    assert not any(row["left_out"] for row in card.record)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.stackable])
def test_every_method_stacked(name, monkeypatch):
    """Where a stacked round raises the loop does it in silence: here it may not."""
    monkeypatch.setattr(Loop, "train_clients", lambda *args: pytest.fail("the loop trained"))
    assert_same(*both(METHODS[name], engine="batched", make=worlds.perceptron if name == "fedpan" else worlds.normed))


def test_stacked_by_vmap(monkeypatch):
    monkeypatch.setattr(Loop, "train_clients", lambda *args: pytest.fail("the loop trained"))
    assert_same(*both(FedProx(), make=worlds.residual, engine="batched"))


UNIFORM = replace(PLAIN, batch_norm="recalibrate")
ROOT = worlds.client(6, 8)
OTHERS = {
    "noise of the server": (Private(FedAvg(), noise=0.5, clip=0.3, per_round=7), UNIFORM),
    "noise of clients": (Private(FedAvg(), noise=0.5, clip=0.3, per_round=7, at_clients=True), UNIFORM),
    "adaptive norm": (Private(FedAvg(), noise=0.3, clip=0.3, per_round=7, quantile=0.5), UNIFORM),
    "masked sum": (SecureSum(FedAvg()), UNIFORM),
    "signed sum": (SecureSum(FedAvg(), signed=True), UNIFORM),
    "local statistics": (SCAFFOLD(), replace(PLAIN, batch_norm="local")),
    "blocks": (FedAvg(), replace(PLAIN, blocks=1)),
    "adamw, clipped, by rows": (FedAvg(), replace(PLAIN, optimizer="adamw", lr=0.01, momentum=0.9, clip=0.1,
                                                  weights="size")),
    "spare": (FedAvg(), replace(PLAIN, participation=0.5, spare=0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_noise_sums_and_schedules(name):
    method, schedule = OTHERS[name]
    make = worlds.deep if name == "blocks" else worlds.normed
    assert_same(*both(method, schedule, make, engine="loop", proxy=worlds.client(20, 7).inputs))


RUNS = {
    "the server's own rows": (FedAvg(combine=FLTrust()), {"root": ROOT}),
    "colluding": (SCAFFOLD(), {"tamper": Collusion(kind="alie", share=0.3), "guard": Guard(huge=None)}),
    "huge": (FedAvg(), {"tamper": Sabotage(kind="huge", share=0.3)}),
    "mixture": (FedAvg(), {"mixture": True}),
    "times": (FedAvg(), {"delays": lambda client, number: float(client), "patience": 3.5}),
    "made when drawn": (Ditto(), {"clients": Population(worlds.make_clients(SIZES).__getitem__, torch.tensor(SIZES))}),
    "dropout": (MOON(), {"make": worlds.dropping}),
}


@pytest.mark.parametrize("name", RUNS)
def test_attacks_delays_and_rows_of_the_server(name):
    method, options = RUNS[name]
    assert_same(*both(method, engine="loop", **options))


def test_lora():
    from federated.test_lora import EXACT, adapted

    for method in EXACT:
        assert_same(*both(method, replace(PLAIN, weights="size"), adapted, engine="loop"))


def test_rows_on_the_card_and_on_the_host_side_by_side():
    clients = worlds.make_clients(SIZES)
    host = simulate(worlds.normed, clients, FedAvg(), PLAIN, engine="loop", seed=2)
    with cards.there():
        some = [Client(one.inputs.to(cards.FIRST), one.targets.to(cards.FIRST)) if at % 2 else one
                for at, one in enumerate(clients)]  # fmt: skip
        assert_same(
            host, simulate(partial(placed, worlds.normed, cards.FIRST), some, FedAvg(), PLAIN, engine="loop", seed=2)
        )


def test_an_update_that_comes_back_from_elsewhere():
    """A ``tamper`` of a user's may well answer from host memory."""

    def through_a_file(update, params):
        return replace(update, params={name: value.cpu() for name, value in update.params.items()})

    assert_same(*both(FedAvg(), engine="loop", tamper=through_a_file))


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("method", [SCAFFOLD(server=FedAvgM()), Ditto()], ids=["scaffold", "ditto"])
def test_a_resumed_run_goes_on_on_its_card(method, engine, tmp_path):
    clients, file = worlds.make_clients(SIZES), tmp_path / "run.safetensors"
    options = {"engine": engine, "seed": 2}
    whole = simulate(worlds.normed, clients, method, replace(PLAIN, rounds=4), **options)
    options |= {"checkpoint": file, "checkpoint_every": 1}
    make = partial(placed, worlds.normed, cards.FIRST)
    with cards.there():
        simulate(make, clients, method, PLAIN, **options)
        assert_same(whole, simulate(make, clients, method, replace(PLAIN, rounds=4), resume=True, **options))
    with pytest.raises(UserError, match="engine"):  # another kind of device has other bits
        simulate(worlds.normed, clients, method, replace(PLAIN, rounds=4), resume=True, **options)


@pytest.mark.processes
def test_processes_take_devices_in_turn():
    clients = worlds.make_clients((30,) * 6)
    schedule = Schedule(rounds=1, participation=1.0, local_epochs=20, batch_size=2, lr=0.1)
    seen = {}

    def note(update, params):
        seen[update.client] = int(update.buffers["card"]) - 1
        return update

    with cards.there():
        options = {"engine": "workers", "workers": 2, "tamper": note, "seed": 2}
        run = simulate(cards.net, clients, FedAvg(), schedule, devices=[cards.SECOND, "lazy:3"], **options)
        assert {str(value.device) for value in run.params.values()} == {cards.FIRST}
    assert set(seen.values()) == {1, 3}
    host = simulate(partial(placed, worlds.perceptron, "cpu"), clients, FedAvg(), schedule, engine="loop", seed=2)
    assert host.record[0]["steps"] == run.record[0]["steps"]


def test_no_processes_share_a_card_unless_they_are_asked_for():
    clients = [worlds.client(rows, at, (1, 3)) for at, rows in enumerate((7, 5))]
    make = partial(placed, partial(worlds.hooked, worlds.convolutional), cards.FIRST)
    with cards.there():
        assert simulate(make, clients, FedAvg(), PLAIN).engine == "loop"


def torn():
    model = worlds.perceptron()
    model[0].to(cards.SECOND)
    return model


def test_generators_of_devices_come_back_too(monkeypatch):
    """CUDA's generators are fakes here: dropout on a device draws from them, not from the CPU's."""
    states = {0: 10, 1: 11}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.__setitem__(device, state))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: states.update(dict.fromkeys(states, seed)))
    before = torch.get_rng_state()
    with seeded(5):
        assert states == {0: 5, 1: 5}
        drawn = torch.rand(())
    assert states == {0: 10, 1: 11}
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn == torch.rand((), generator=torch.Generator().manual_seed(5))


def test_what_cannot_be_had_is_refused():
    clients = worlds.make_clients(SIZES)
    with cards.there(), pytest.raises(UserError, match=r"on lazy:1 and cpu.*put it on one"):
        simulate(torn, clients, FedAvg(), PLAIN)
    with pytest.raises(UserError, match="on meta"):
        simulate(partial(placed, worlds.perceptron, "meta"), clients, FedAvg(), PLAIN)
    with pytest.raises(UserError, match="only processes take devices"):
        simulate(worlds.perceptron, clients, FedAvg(), PLAIN, engine="loop", devices=["cpu"])
    with pytest.raises(UserError, match="a process needs one"):
        simulate(worlds.perceptron, clients, FedAvg(), PLAIN, engine="workers", devices=[])


@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD(server=FedAvgM()), MOON(), SecureSum(FedAvg(), signed=True)],
                         ids=["fedavg", "scaffold", "moon", "signed sum"])  # fmt: skip
def test_flower(method):
    pytest.importorskip("flwr")
    from sparing.federated import flower

    clients, rows = worlds.make_clients(SIZES), worlds.client(20, 7)
    options = {"evaluate": Accuracy(rows.inputs, rows.targets), "held": clients, "seed": 2, "proxy": rows.inputs}
    host = flower.run_in_process(worlds.normed, clients, method, UNIFORM, **options)
    with cards.there():
        card = flower.run_in_process(partial(placed, worlds.normed, cards.FIRST), clients, method, UNIFORM, **options)
        assert worlds.equal(host.params, {name: value.cpu() for name, value in card.params.items()})
        assert {value.device.type for value in card.params.values()} == {"lazy"}
    assert host.metrics == card.metrics
    assert not any(one.faults for one in card.rounds)


def test_devices_that_no_process_takes_are_refused() -> None:
    """One process trains where the model lies, also where "auto" chose it."""
    with pytest.raises(UserError, match='pass engine="workers", or devices=None'):
        simulate(lambda: nn.Linear(2, 2), [Client(torch.randn(4, 2), torch.arange(4) % 2)], FedAvg(),
            Schedule(rounds=1), devices=("cuda:7",))  # fmt: skip


def test_rows_of_any_dtype_need_no_checkpoint(tmp_path: Path) -> None:
    """What identifies a run is asked for where there is a file, and takes complex rows too."""

    class Size(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x.abs())

    clients = [Client(torch.randn(4, 2, dtype=torch.complex64), torch.arange(4) % 2)]
    plain = simulate(Size, clients, FedAvg(), Schedule(rounds=1))
    kept = simulate(Size, clients, FedAvg(), Schedule(rounds=1), checkpoint=tmp_path / "run")
    assert all(torch.equal(plain.params[name], kept.params[name]) for name in plain.params)
