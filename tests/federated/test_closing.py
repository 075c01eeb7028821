"""Rounds that close before all have answered: by hand, in whole runs, and on Flower."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from federated.worlds import equal, failing_loss, make_clients, perceptron
from refusals import refused
from sparing.errors import RunError
from sparing.federated import FedAvg, Private, Schedule, simulate
from sparing.federated.methods.secure import SecureSum
from sparing.federated.server.closing import OpenRound, arrivals, ranks
from sparing.federated.settings import sample_clients

CLIENTS = make_clients((7, 12, 5, 9, 6, 8, 10, 4))
ALL = Schedule(rounds=3, participation=1.0, local_epochs=1, batch_size=4, lr=0.3)
HALF = replace(ALL, participation=0.5, spare=1.0)


def test_a_schedule_asks_more_than_it_needs():
    assert [replace(HALF, spare=spare).asked(8) for spare in (0.0, 0.1, 0.25, 1.0, 9.0)] == [4, 5, 5, 8, 8]
    assert replace(HALF, participation=0.1, spare=0.1).asked(100) == 11
    some, more = (sample_clients(replace(HALF, spare=spare), 8, 2, seed=5) for spare in (0.0, 0.5))
    assert set(some) < set(more)
    assert len(more) == 6


def test_a_round_closes_by_hand():
    """Three of five are enough; 4 was absent, so with an error of 2 and nothing of 4 there is nobody to wait for."""
    one = OpenRound((0, 1, 2, 3, 4), 3, frozenset({4, 9}))
    for client, update in ((0, True), (2, False), (1, True)):
        one.take(client, update=update)
    assert (one.closed, one.hopeful, one.absent_after) == (False, {0, 1, 2, 3}, {3, 4, 9})
    assert one.unneeded == ()
    other = OpenRound((0, 1, 2, 3, 4), 3, frozenset({4, 9}), {0, 1, 2}, 2)
    one.take(3, update=True)
    other.take(4, update=True)
    assert (one.enough, one.absent_after, one.unneeded) == (True, {4, 9}, ())
    assert (other.enough, other.absent_after, other.unneeded) == (True, {9}, (3,))
    assert OpenRound((4,), 1, frozenset({4})).hopeful == {4}  # all are absent: they are waited for


def test_arrivals_are_those_of_a_clock():
    """Against a loop over instants, for all absences of four clients."""
    times, rank = {0: 3.0, 1: 1.0, 2: math.inf, 3: 1.0}, {0: 0, 1: 3, 2: 1, 3: 2}
    for count in range(5):
        for absent in itertools.combinations(times, count):
            order, end = arrivals(times, absent, 5.0, rank)
            waiting, came = OpenRound((0, 1, 2, 3), 9, frozenset(absent)), []
            clock = 0.0
            while not waiting.closed and clock < 5.0:
                clock += 0.5
                for client in sorted((k for k in times if times[k] == clock), key=rank.__getitem__):
                    waiting.take(client, update=True)
                    came.append(client)
            assert (order, end) == (came, clock)


def table(*rows):
    return lambda client, number: rows[min(number, len(rows) - 1)][client]


def test_the_first_to_answer_are_the_round():
    """Of eight asked the four fastest count; the rest has no fault. The run is that in which the others crash."""
    slow = [5.0, 1.0, 7.0, 2.0, 3.0, 8.0, 0.5, 9.0]
    run = simulate(perceptron, CLIENTS, FedAvg(), replace(HALF, rounds=1), delays=table(slow))
    row = run.record[0]
    assert [row[name] for name in ("asked", "answered", "waited", "absent", "left_out")] == [8, 4, 3.0, "", ""]
    fast = {1, 3, 4, 6}
    rest = simulate(
        perceptron, CLIENTS, FedAvg(), replace(ALL, rounds=1), tamper=lambda u, g: u if u.client in fast else 0
    )
    assert equal(run.params, rest.params)

    # Who fails makes room for the next: client 6, which was the fastest.
    hit = [*CLIENTS[:6], replace(CLIENTS[6], targets=torch.full_like(CLIENTS[6].targets, 2)), CLIENTS[7]]
    whole = replace(HALF, rounds=1, batch_size=16)
    run = simulate(perceptron, hit, FedAvg(), whole, delays=table(slow), loss=failing_loss)
    assert [run.record[0][name] for name in ("answered", "waited", "absent")] == [4, 5.0, ""]
    assert run.record[0]["left_out"].startswith("client 6: crash (ArithmeticError")


def test_who_is_gone_costs_patience_once():
    """Client 2 is gone for three rounds and then back: waited for once, not at all, not at all, and counted again."""
    steady = [1.0] * 8
    gone = [*steady[:2], math.inf, *steady[3:]]
    back = [*steady[:2], 0.5, *steady[3:]]
    run = simulate(
        perceptron,
        CLIENTS,
        FedAvg(),
        replace(ALL, rounds=6),
        delays=table(gone, gone, gone, back, gone, gone),
        patience=30.0,
    )
    assert [row["waited"] for row in run.record] == [30.0, 1.0, 1.0, 1.0, 30.0, 1.0]
    assert [row["answered"] for row in run.record] == [7, 7, 7, 8, 7, 7]
    assert [row["absent"] for row in run.record] == ["2", "2", "2", "", "2", "2"]
    assert run.record[0]["left_out"] == "client 2: absent (no answer in 30 s)"
    assert run.record[1]["left_out"] == "client 2: absent (not waited for, since it was absent before)"
    with pytest.raises(RunError, match="0 clients left"):
        simulate(perceptron, CLIENTS, FedAvg(), ALL, delays=lambda client, number: math.inf)


@pytest.mark.parametrize("method", [FedAvg(), SecureSum(FedAvg(), threshold=0.3)], ids=lambda m: m.name)
def test_flower_and_a_resumed_run_have_the_same_bits(method, tmp_path):
    """Without delays all answer at once: a draw decides who is first, the same everywhere."""
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    pytest.importorskip("cryptography", reason="cryptography, of sparing[secure]")
    schedule = replace(HALF, participation=0.4, spare=0.5)
    run = simulate(perceptron, CLIENTS, method, schedule, engine="loop")
    assert [(row["asked"], row["answered"]) for row in run.record] == [(5, 3)] * 3
    firsts = [min(ranks(range(8), 0, seed), key=ranks(range(8), 0, seed).get) for seed in range(40)]
    assert len(set(firsts)) == 8  # not always the lowest numbers
    other = flower.run_in_process(perceptron, CLIENTS, method, schedule)
    assert equal(run.params, other.params)
    assert [len(one.unneeded) for one in other.rounds] == [2] * 3
    late = table([1.0, 2.0, 99.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    same = {"engine": "loop", "delays": late, "patience": 20.0}
    whole = simulate(perceptron, CLIENTS, method, schedule, **same)
    at = tmp_path / "run.safetensors"
    simulate(perceptron, CLIENTS, method, replace(schedule, rounds=1), checkpoint=at, **same)
    again = simulate(perceptron, CLIENTS, method, schedule, checkpoint=at, resume=True, **same)
    assert equal(whole.params, again.params)
    assert [row["absent"] for row in whole.record] == [row["absent"] for row in again.record]


def test_on_flower_patience_is_spent_once(monkeypatch, tmp_path):
    """A node that never replies, and one that is offline: one wait each, then none; another ServerApp remembers."""
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    from sparing.federated.flower import nodes, waiting
    from sparing.federated.flower.client import client_app

    class Silent(flower.InProcessGrid):
        silent, waits = frozenset({3}), 0

        def push_messages(self, messages):
            names = super().push_messages(messages)
            self._replies = {k: v for k, v in self._replies.items() if v.metadata.src_node_id not in self.silent}
            return names

        def send_and_receive(self, messages, *, timeout=None):
            sent = list(messages)
            replies = list(super().send_and_receive(sent, timeout=timeout))
            self.waits += len(replies) < len(sent)
            return replies

    slept = []
    monkeypatch.setattr(nodes.time, "sleep", slept.append)
    monkeypatch.setattr(waiting, "_POLL", 0.0)
    schedule = replace(ALL, rounds=6)
    grid = Silent(client_app(FedAvg(), perceptron, CLIENTS.__getitem__, schedule), 8)
    grid._online.remove(6)
    registry = {node: node - 1 for node in range(1, 9)}
    more = {"patience": 0.05, "nodes": registry, "checkpoint": tmp_path / "server.safetensors"}
    server = flower.strategy(FedAvg(), schedule, perceptron, 8, **more)
    server.start(grid, server.initial_arrays(), 3, timeout=0.01)
    assert grid.waits == 1
    first = len(slept)
    assert first > 0
    assert [one.received for one in server.rounds] == [(0, 1, 3, 4, 6, 7)] * 3
    assert {one.absent for one in server.rounds} == {(2, 5)}
    grid.silent = frozenset()
    resumed = flower.strategy(FedAvg(), schedule, perceptron, 8, resume=True, **more)
    resumed.start(grid, resumed.initial_arrays(), 2, timeout=0.01)
    assert (grid.waits, len(slept)) == (1, first)
    assert [one.absent for one in resumed.rounds[3:]] == [(5,), (5,)]
    assert 2 in resumed.rounds[4].received


def test_a_masked_sum_waits_once_for_who_is_silent_in_it(monkeypatch):
    """Client 1 never publishes keys, client 4 never helps to unmask: a wait each, and none in later rounds."""
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    pytest.importorskip("cryptography", reason="cryptography, of sparing[secure]")
    from sparing.federated.flower import secure, waiting
    from sparing.federated.flower.client import client_app

    class Silent(flower.InProcessGrid):
        def push_messages(self, messages):
            sent = list(messages)
            for message in sent:
                stage = message.content.config_records.get("secure", {}).get("stage")
                if (message.metadata.dst_node_id, stage) in {(2, "keys"), (5, "shares to unmask")}:
                    self._online.remove(message.metadata.dst_node_id)
            names = super().push_messages(sent)
            self._online = sorted(set(self._online) | {2, 5})
            return names

    waits, clock, real = [], itertools.count(), waiting.collect

    def counted(grid, messages, timeout, round_, clients, rank):
        replies = real(grid, messages, timeout, round_, clients, rank)
        waits.append(not round_.closed)
        return replies

    monkeypatch.setattr(secure, "collect", counted)
    monkeypatch.setattr(waiting, "_POLL", 0.0)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: float(next(clock)))
    method, schedule = SecureSum(FedAvg(), threshold=0.3), replace(ALL, rounds=3)
    grid = Silent(client_app(method, perceptron, CLIENTS.__getitem__, schedule), 8)
    server = flower.strategy(method, schedule, perceptron, 8, patience=0.0, nodes={k + 1: k for k in range(8)})
    server.start(grid, server.initial_arrays(), 3, timeout=5.0)
    assert waits == [True, False, True] + [False] * 6
    assert {one.received for one in server.rounds} == {(0, 2, 3, 4, 5, 6, 7)}
    assert {one.absent for one in server.rounds} == {(1, 4)}


def test_what_cannot_be_is_refused():
    for wrong in (-0.1, math.inf, math.nan):
        refused("pass a finite number >= 0", lambda wrong=wrong: replace(HALF, spare=wrong))
    refused("pass spare=0", lambda: replace(HALF, sampling="poisson"))
    refused(
        "among the first is none",
        simulate,
        perceptron,
        CLIENTS,
        Private(FedAvg(), noise=1.0, clip=1.0, per_round=4),
        HALF,
    )
    refused("pass patience > 0", simulate, perceptron, CLIENTS, FedAvg(), ALL, patience=0.0)
    for wrong in (-1.0, math.nan):
        refused(
            "pass seconds >= 0", simulate, perceptron, CLIENTS, FedAvg(), ALL, delays=lambda k, n, wrong=wrong: wrong
        )
