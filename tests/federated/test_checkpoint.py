"""A run that was paused, interrupted or killed goes on to the same bits; other runs' files are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from federated import worlds
from refusals import refused
from sparing.errors import UserError
from sparing.federated.checkpoint import RunState, describe_run, read, write
from sparing.federated.embedded import simulate
from sparing.federated.methods.controls import NormMatched
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.moon import MOON
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.server.optimizers import FedAdam, FedYogi
from sparing.federated.settings import Schedule

SCHEDULE = Schedule(rounds=6, participation=0.5, local_epochs=1, batch_size=4, lr=0.2, momentum=0.0)
LOCAL = dataclasses.replace(SCHEDULE, batch_norm="local")
BLOCKS = dataclasses.replace(SCHEDULE, blocks=2, lr=0.02)
TIMES = {"seconds", "clients_per_second"}


def go(method, schedule, make, path=None, **options):
    return simulate(make, worlds.make_clients(), method, schedule, seed=2, checkpoint=path, engine="loop", **options)


def rows_of(run):
    return [{name: repr(value) for name, value in row.items() if name not in TIMES} for row in run.record]


@pytest.mark.parametrize(
    ("method", "schedule", "make"),
    [
        (FedAvg(server=FedAdam(lr=0.1)), SCHEDULE, worlds.perceptron),
        (FedDyn(alpha=0.1), SCHEDULE, worlds.normed),
        (FedDyn(alpha=0.1, weights="size"), SCHEDULE, worlds.perceptron),
        (FedNova(server=FedYogi(lr=0.1)), SCHEDULE, worlds.perceptron),
        (Ditto(), SCHEDULE, worlds.normed),
        (SCAFFOLD(), SCHEDULE, worlds.perceptron),
        (MOON(mu=1.0), SCHEDULE, worlds.normed),
        (FedAvg(), LOCAL, worlds.normed),
        (FedAvg(), BLOCKS, worlds.deep),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", "")),
)
def test_resumed_to_the_same_bits(tmp_path, method, schedule, make):
    whole = go(method, schedule, make)
    path = tmp_path / "run.safetensors"
    first = go(method, dataclasses.replace(schedule, rounds=2), make, path)
    assert first.state.rounds == 2
    second = go(method, schedule, make, path, resume=True)
    assert worlds.equal(whole.params, second.params)
    assert worlds.equal(whole.buffers, second.buffers)
    assert rows_of(whole) == rows_of(second)
    assert whole.state.clients.keys() == second.state.clients.keys()
    for client, state in whole.state.clients.items():
        assert all(worlds.equal(vector, second.state.clients[client][key]) for key, vector in state.items())


class Stop:
    """Interrupts the evaluation of the n-th round."""

    def __init__(self, at, error):
        self.left, self.error = at, error

    def __call__(self, model):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return {"zero": 0.0}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_interrupted_runs_keep_the_last_whole_round(tmp_path, error):
    path = tmp_path / "run.safetensors"
    with pytest.raises(type(error)):
        go(FedAvg(), SCHEDULE, worlds.perceptron, path, evaluate=Stop(4, error), members=False)
    run = go(FedAvg(), SCHEDULE, worlds.perceptron, path, resume=True)
    assert [("zero" in row) for row in run.record] == [True] * 3 + [False] * 3
    assert worlds.equal(run.params, go(FedAvg(), SCHEDULE, worlds.perceptron).params)


def test_killed_runs_keep_the_last_written_round(tmp_path, monkeypatch):
    """What a kill leaves is what was written before it: here after two rounds of five."""
    path, kept = tmp_path / "run.safetensors", []
    real = write

    def spy(run_state, *rest):
        after = real(run_state, *rest)
        kept.append((run_state.rounds, path.read_bytes()))
        return after

    monkeypatch.setattr("sparing.federated.embedded.write", spy)
    go(FedAvg(), dataclasses.replace(SCHEDULE, rounds=5), worlds.perceptron, path, checkpoint_every=2)
    assert [rounds for rounds, _ in kept] == [2, 4, 5]
    path.write_bytes(kept[0][1])
    resumed = go(FedAvg(), SCHEDULE, worlds.perceptron, path, resume=True)
    assert worlds.equal(resumed.params, go(FedAvg(), SCHEDULE, worlds.perceptron).params)


def test_a_longer_run_does_not_pass_for_a_shorter_one(tmp_path):
    path = tmp_path / "run.safetensors"
    go(FedAvg(), SCHEDULE, worlds.perceptron, path)
    refused(
        "checkpoint: got 6 rounds done; the schedule has 4",
        go, FedAvg(), dataclasses.replace(SCHEDULE, rounds=4), worlds.perceptron, path, resume=True,
    )  # fmt: skip


def test_norms_of_another_run_are_another_method(tmp_path):
    path, names = tmp_path / "run.safetensors", list(worlds.perceptron().state_dict())
    one, other = ([dict.fromkeys(names, size)] * 6 for size in (1.0, 2.0))
    go(NormMatched(FedAvg(), one[:2]), dataclasses.replace(SCHEDULE, rounds=2), worlds.perceptron, path)
    refused("method", go, NormMatched(FedAvg(), other), SCHEDULE, worlds.perceptron, path, resume=True)
    assert go(NormMatched(FedAvg(), one), SCHEDULE, worlds.perceptron, path, resume=True).state.rounds == 6


def test_without_resume_a_run_begins_anew(tmp_path):
    path = tmp_path / "run.safetensors"
    go(FedAvg(), SCHEDULE, worlds.perceptron, path)
    again = go(FedAvg(), dataclasses.replace(SCHEDULE, lr=0.1), worlds.perceptron, path)
    assert len(again.record) == 6


def test_sums_in_another_order_are_another_run(tmp_path):
    """Stacked clients differ in last bits."""
    path = tmp_path / "run.safetensors"
    go(FedAvg(), dataclasses.replace(SCHEDULE, rounds=2), worlds.perceptron, path)
    with pytest.raises(UserError, match="it differs in engine"):
        simulate(worlds.perceptron, worlds.make_clients(), FedAvg(), SCHEDULE, seed=2, checkpoint=path, resume=True)


def run_of(**changes):
    given = {"schedule": SCHEDULE, "method": FedAvg(), "seed": 1, "sizes": [3, 4], "params": {"w": torch.ones(2)}}
    return describe_run(**given | changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"schedule": dataclasses.replace(SCHEDULE, lr=0.1)}, "schedule"),
        ({"method": FedDyn(alpha=0.1)}, "method"),
        ({"seed": 2}, "seed"),
        ({"sizes": [4, 3]}, "clients"),
        ({"params": {"w": torch.zeros(2)}}, "initial model"),
    ],
)
def test_files_of_other_runs_are_refused(tmp_path, changes, what):
    path = tmp_path / "run"
    write(RunState(params={}, buffers={}), path, run_of())
    assert read(path, run_of())[0].rounds == 0
    refused(f"it differs in {what}; pass the same settings", read, path, run_of(**changes))


def test_a_run_is_prolonged_only_where_its_rates_stay():
    longer = dataclasses.replace(SCHEDULE, rounds=99)
    assert run_of(schedule=longer) == run_of()
    assert run_of(schedule=dataclasses.replace(longer, decay="cosine")) != run_of(
        schedule=dataclasses.replace(SCHEDULE, decay="cosine")
    )


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "run"
    write(RunState(params={"w": torch.ones(9)}, buffers={}), path, run_of())
    path.write_bytes(path.read_bytes()[:-3])
    refused("not a whole safetensors file", read, path, run_of())
    refused("cannot be read", read, tmp_path / "none", run_of())
