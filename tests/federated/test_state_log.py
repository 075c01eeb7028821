"""Clients' states on disk: killed anywhere a run goes on to the same bits, and a checkpoint costs what was visited."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarks.federated.million import measured

from federated import worlds
from refusals import refused
from sparing.errors import UserError
from sparing.federated import embedded, state_log
from sparing.federated.checkpoint import RunState, read, write
from sparing.federated.client.population import Population
from sparing.federated.embedded import simulate
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.scaffold import SCAFFOLD
from sparing.federated.packing import unpack
from sparing.federated.settings import Schedule, sample_clients
from sparing.federated.state_log import LOCAL_BN, STATE, ClientTrees, Ending, StateLog
from sparing.seeds import stream

SCHEDULE = Schedule(rounds=8, participation=0.5, local_epochs=1, batch_size=4, lr=0.1, momentum=0.0)
LOCAL = dataclasses.replace(SCHEDULE, batch_norm="local")


def go(path=None, method=None, make=worlds.perceptron, schedule=SCHEDULE, **options):
    clients = worlds.make_clients()
    return simulate(
        make, clients, method or SCAFFOLD(), schedule, seed=2, checkpoint=path, checkpoint_every=1, **options
    )


def same(run, other):
    states = [{client: dict(one.state.clients[client]) for client in one.state.clients} for one in (run, other)]
    assert states[0].keys() == states[1].keys()
    for client, state in states[0].items():
        assert all(worlds.equal(vector, states[1][client][key]) for key, vector in state.items())
    return worlds.equal(run.params, other.params)


@pytest.mark.parametrize("slack", [0, 1 << 20], ids=["renewed", "grown"])
@pytest.mark.parametrize(
    ("method", "make", "schedule"),
    [(SCAFFOLD(), worlds.perceptron, SCHEDULE), (FedDyn(alpha=0.1), worlds.normed, LOCAL)],
    ids=["scaffold", "local batch norm"],
)
def test_killed_anywhere_a_run_goes_on_to_the_same_bits(tmp_path, monkeypatch, method, make, schedule, slack):
    """What a kill leaves: the last checkpoint, and files that the next one had begun, cut at a byte that is drawn."""
    monkeypatch.setattr(state_log, "_SLACK", slack)
    whole, kept = go(method=method, make=make, schedule=schedule), []
    real, path = embedded.write, tmp_path / "live" / "run.safetensors"

    def spy(*given):
        after = real(*given)
        kept.append({file.name: file.read_bytes() for file in path.parent.iterdir()})
        return after

    monkeypatch.setattr(embedded, "write", spy)
    go(path, method=method, make=make, schedule=schedule)
    monkeypatch.setattr(embedded, "write", real)
    source = stream(0, "kills")
    for number in range(0, len(kept) - 1, 3):
        # This checkpoint, and the states as the next one had them, cut anywhere beyond what this one names.
        files, own = {**kept[number], **kept[number + 1]}, unpack(kept[number][path.name])[1]["log"]
        place = tmp_path / f"killed-{number}"
        place.mkdir()
        for name, data in files.items():
            least = own["length"] if own["name"] == name else 0
            cut = int(torch.randint(least, len(data) + 1, (1,), generator=source))
            (place / name).write_bytes(kept[number][name] if name == path.name else data[:cut])
        resumed = go(place / "run.safetensors", method=method, make=make, schedule=schedule, resume=True)
        assert len(resumed.record) == schedule.rounds
        assert same(whole, resumed)
        assert len(list(place.iterdir())) == 2


def test_an_interrupted_checkpoint_is_written_again(tmp_path, monkeypatch):
    """The rename fails once, after the states were appended; the last attempt of the run writes all."""
    path, left = tmp_path / "run", [3]
    real = embedded.write

    def failing(*given):
        left[0] -= 1
        if left[0] == 0:
            monkeypatch.setattr("sparing.federated.checkpoint.write_whole", interrupted)
            try:
                return real(*given)
            finally:
                monkeypatch.undo()
        return real(*given)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        go(path)
    assert same(go(), go(path, resume=True))


def test_a_checkpoint_grows_by_the_clients_that_were_visited(tmp_path):
    """A thousand clients, ten a round: each checkpoint appends ten records and a row, whatever there was before."""
    rows = [worlds.client(4, at) for at in range(7)]
    everyone = Population(lambda client: rows[client % 7], torch.full((1000,), 4))
    schedule = dataclasses.replace(SCHEDULE, rounds=6, participation=0.01)
    sizes, real, path = [], embedded.write, tmp_path / "run"

    def spy(*given):
        after = real(*given)
        (log,) = tmp_path.glob("run.states-*")
        sizes.append((log.stat().st_size, path.stat().st_size))
        assert not after.clients.fresh
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "write", spy)
        run = simulate(worlds.perceptron, everyone, SCAFFOLD(), schedule, seed=1, checkpoint=path, checkpoint_every=1)
    grown = [after - before for (before, _), (after, _) in pairwise(sizes)]
    # numbers of a row in decimal differ in length
    assert max(grown) - min(grown) < 200
    assert max(main for _, main in sizes) - min(main for _, main in sizes) < 50
    drawn = {client for number in range(6) for client in sample_clients(schedule, 1000, number, 1)}
    assert set(run.state.clients) == drawn
    assert len(run.state.clients) == len(drawn)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_the_benchmark_of_a_million_reads_memory_and_files():
    """At three thousand clients and three rounds; states grow by the round, the checkpoint does not."""
    row = measured(clients=3000, cohort=20, rounds=3, every=1)
    assert row["engine"] == "batched"
    assert row["visited"] <= 60
    before, after = row["states"][1:]
    assert 20 * 3304 < after - before < 20 * 4500  # 826 weights of 4 bytes, a header, names and hash, and a row
    assert row["checkpoint"][1] == pytest.approx(row["checkpoint"][2], abs=50)
    assert min(row["resident"]) > 0


def _filled(path, count=4):
    log = StateLog(path, count)
    trees = {client: {"control": {"w": torch.full((2,), float(client))}} for client in range(count)}
    state = RunState(params={"w": torch.ones(2)}, buffers={}, clients=ClientTrees(trees), rows=[{"round": 1}])
    return write(state, path, {}, log)


def test_states_come_back_and_unvisited_clients_have_none(tmp_path):
    path = tmp_path / "run"
    after = _filled(path)
    for state in (after, read(path, {}, 4)[0]):
        assert torch.equal(state.clients[2]["control"]["w"], torch.full((2,), 2.0))
        assert 9 not in state.clients
        assert "2" not in state.clients
        assert state.rows == [{"round": 1}]
        assert dict(state.local_bn) == {}
    with pytest.raises(KeyError):
        after.clients[9]


@pytest.mark.parametrize("damage", ["shorter", "header", "body", "gone"])
def test_damaged_states_are_refused(tmp_path, damage):
    path = tmp_path / "run"
    _filled(path)
    (log,) = tmp_path.glob("run.states-*")
    data = bytearray(log.read_bytes())
    data[20 if damage == "header" else 60] ^= 1
    if damage == "gone":
        log.unlink()
    else:
        log.write_bytes(data[:-1] if damage == "shorter" else data)
    if damage == "body":
        state, _ = read(path, {}, 4)
        with pytest.raises(UserError, match="changed since it was written"):
            state.clients[0]
    else:
        refused("begin anew", read, path, {}, 4)


def test_endings_of_other_files_are_refused(tmp_path):
    log = StateLog(tmp_path / "run", 3)
    ending = log.append({STATE: {0: {"w": torch.ones(1)}}, LOCAL_BN: {}}, [])
    with pytest.raises(ValueError, match="changed"):
        StateLog.reopened(tmp_path / "run", 3, Ending(ending.name, ending.length, "00"))
    with pytest.raises(ValueError, match="no record"):
        StateLog.reopened(tmp_path / "run", 0, ending)
