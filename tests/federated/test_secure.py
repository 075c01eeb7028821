"""Runs whose server sees sums alone: against the mean of rounded updates by hand, engines, bytes, refusals."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from federated.worlds import equal, make_clients, normed, perceptron
from refusals import refused
from sparing.errors import RunError
from sparing.federated import SCAFFOLD, FedAvg, FedDyn, FedSign, Private, Schedule, simulate
from sparing.federated.methods.interface import Update
from sparing.federated.methods.secure import SecureSum
from sparing.federated.secure.cost import Answers, bytes_down, bytes_up
from sparing.federated.server.defences import GeometricMedian
from sparing.federated.server.faults import Guard, Sabotage
from sparing.federated.server.optimizers import FedAdam
from sparing.federated.server.trust import FLTrust
from sparing.jobs.federate.tables import price

pytest.importorskip("cryptography", reason="cryptography, of sparing[secure]")
CLIENTS = make_clients((7, 12, 5, 9, 6, 8, 10, 4))
SCHEDULE = Schedule(rounds=3, participation=0.75, local_epochs=1, batch_size=4, lr=0.3)
SIZE = 38


def flat(params):
    return [float(v) for value in params.values() for v in value.flatten()]


def rounded_mean(start, models, step):
    """g + Σ of whole steps / n, in fractions until the last sum."""
    pairs = [[Fraction(x - g) / Fraction(step) for x, g in zip(model, start, strict=True)] for model in models]
    moves = [list(map(round, each)) for each in pairs]
    return [g + float(sum(column) * Fraction(step)) / len(models) for g, *column in zip(start, *moves, strict=True)]


def trained(seed):
    """First round of a run: the model before it, and every client's model after it."""
    seen = {}

    def watch(update, params):
        seen[update.client] = flat({name: update.params[name] for name in params})
        seen["start"] = flat(params)
        return update

    one = replace(SCHEDULE, rounds=1)
    simulate(perceptron, CLIENTS, FedAvg(), one, seed=seed, engine="loop", tamper=watch)
    return seen.pop("start"), seen


@pytest.mark.parametrize("step", [2.0**-20, 2.0**-6])
def test_a_round_is_the_mean_of_rounded_updates(step):
    start, models = trained(seed=2)
    run = simulate(
        perceptron, CLIENTS, SecureSum(FedAvg(), step=step), replace(SCHEDULE, rounds=1), seed=2, engine="loop"
    )
    assert len(models) == 6
    assert flat(run.params) == pytest.approx(rounded_mean(start, list(models.values()), step), rel=1e-15, abs=1e-15)


def test_who_leaves_is_not_in_the_mean_and_is_named(tmp_path):
    """Some leave before each exchange; of six it takes two. The run goes on to the same bits after an interruption."""
    start, models = trained(seed=2)
    method = SecureSum(FedAvg(), threshold=0.2, dropout=0.15, seed=1)
    one = simulate(perceptron, CLIENTS, method, replace(SCHEDULE, rounds=1), seed=2, engine="loop")
    row = one.record[0]
    gone = [who for who in models if f"client {who}: absent (left before it sent its vector)" in row["left_out"]]
    assert 0 < len(gone) < 6
    assert row["answered"] == 6 - len(gone)
    left = [model for who, model in models.items() if who not in gone]
    assert flat(one.params) == pytest.approx(rounded_mean(start, left, method.step), rel=1e-15, abs=1e-15)
    whole = simulate(perceptron, CLIENTS, method, SCHEDULE, seed=2, engine="loop")
    at = tmp_path / "run.safetensors"
    simulate(perceptron, CLIENTS, method, replace(SCHEDULE, rounds=2), seed=2, engine="loop", checkpoint=at)
    again = simulate(perceptron, CLIENTS, method, SCHEDULE, seed=2, engine="loop", checkpoint=at, resume=True)
    assert equal(whole.params, again.params)


def test_bytes_are_those_predicted():
    method = SecureSum(FedAvg(), bits=40, threshold=0.2)
    run = simulate(perceptron, CLIENTS, method, SCHEDULE)
    known = price(perceptron, method, SCHEDULE, [len(one) for one in CLIENTS], seed=0)
    assert [row["bytes_up"] for row in run.record] == list(known.up)
    assert [row["bytes_down"] for row in run.record] == list(known.down)
    assert known.up[0] == 6 * (64 + 32 + 5 * 86 + SIZE * 5 + 6 * 37)
    assert known.down[0] == 6 * (SIZE * 8 + 6 * 68 + 5 * 86 + 6 * 4)
    more = replace(SCHEDULE, participation=0.5, spare=0.5)
    run = simulate(perceptron, CLIENTS, method, more)
    known = price(perceptron, method, more, [len(one) for one in CLIENTS], seed=0)
    assert (
        [row["bytes_up"] for row in run.record] == list(known.up) == [6 * (64 + 32 + 5 * 86) + 4 * (190 + 6 * 37)] * 3
    )
    assert [row["bytes_down"] for row in run.record] == list(known.down)
    crash = Sabotage(kind="crash", share=0.3, seed=2)
    run = simulate(perceptron, CLIENTS, method, SCHEDULE, tamper=crash)
    for row in run.record:
        left = row["answered"]
        answers = Answers(6, 6, left, left)  # who fails in training has sent keys and shares before
        assert row["bytes_up"] == bytes_up(answers, SIZE, 40)
        assert row["bytes_down"] == 6 * SIZE * 8 + bytes_down(answers)
    assert min(row["answered"] for row in run.record) < 6


@pytest.mark.parametrize("inner", [FedSign(gamma=0.1), FedDyn(alpha=0.1), FedAvg(server=FedAdam(lr=0.1))])
def test_methods_go_as_without_it_but_for_rounding(inner):
    """Steps of 2^-40: three rounds multiply what rounding adds by no more than a few thousand."""
    fine = SecureSum(inner, step=2.0**-40, bits=56)
    masked, plain = (simulate(perceptron, CLIENTS, method, SCHEDULE, engine="loop") for method in (fine, inner))
    assert flat(masked.params) == pytest.approx(flat(plain.params), abs=1e-8)
    assert flat(masked.params) != flat(plain.params)


class Leaving:
    """Clients of Flower's in-process grid that do not answer from some exchange on."""

    def __init__(self, gone):
        self.gone, self.seen = gone, []

    def wrap(self, grid_class):
        outer = self

        class Grid(grid_class):
            def _answer(self, message):
                record = message.content.config_records.get("secure")
                client = message.metadata.dst_node_id - 1
                from flwr.app import Error, Message

                if record is not None and record["stage"] in outer.gone.get(client, ()):
                    return Message(Error(1, "gone"), reply_to=message)
                reply = super()._answer(message)
                outer.seen.append((client, None if reply.has_error() else reply.content))
                return reply

        return Grid


@pytest.mark.parametrize("method", [SecureSum(FedAvg()), SecureSum(FedDyn(alpha=0.1))], ids=lambda m: m.name)
def test_flower_has_the_same_bits_and_bytes_and_sees_no_update(method, monkeypatch):
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    from sparing.federated.flower import grid

    run = simulate(perceptron, CLIENTS, method, SCHEDULE, engine="loop")
    leaving = Leaving({})
    monkeypatch.setattr(grid, "InProcessGrid", leaving.wrap(grid.InProcessGrid))
    other = flower.run_in_process(perceptron, CLIENTS, method, SCHEDULE, mods=[flower.sign_telemetry])
    assert equal(run.params, other.params)
    assert [one.bytes_up for one in other.rounds] == [row["bytes_up"] for row in run.record]
    secret = [content for _, content in leaving.seen if content is not None and "secure" in content]
    assert len(secret) == 3 * 6 * 4
    for content in secret:
        assert not content.array_records
        assert all(set(record) == {"one"} for record in content.metric_records.values())


def test_flower_goes_on_without_who_left_and_refuses_below_the_threshold(monkeypatch):
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    from sparing.federated.flower import grid

    stages = ("keys", "shares", "masked vectors", "shares to unmask")
    first = replace(SCHEDULE, rounds=1, participation=1.0)
    leaving = Leaving({client: (stage,) for client, stage in enumerate(stages)})
    monkeypatch.setattr(grid, "InProcessGrid", leaving.wrap(grid.InProcessGrid))
    run = flower.run_in_process(perceptron, CLIENTS, SecureSum(FedAvg(), threshold=0.3), first, seed=2)
    assert run.rounds[0].received == (3, 4, 5, 6, 7)

    def only_late(update, params):
        return update if update.client > 2 else None

    fair = simulate(perceptron, CLIENTS, FedAvg(), first, seed=2, engine="loop", tamper=only_late)
    assert flat(run.params) == pytest.approx(flat(fair.params), abs=2**-21)
    with pytest.raises(RunError, match="round 1: secure sum: 4 of 8 clients sent shares to unmask, and it takes 5"):
        flower.run_in_process(perceptron, CLIENTS, SecureSum(FedAvg()), first, seed=2)


def test_why_flowers_own_is_not_used():
    """Facts of 1.41 that the decisions rest on: 32 bits of a key count, values are cut off, both shares are told."""
    np = pytest.importorskip("numpy")
    flower = pytest.importorskip("flwr.common.secure_aggregation.secaggplus_utils", reason="flower")
    from importlib import import_module

    key = bytes(range(32))
    other = key[4:8] + key[:4] + key[8:]
    one, same = (flower.pseudo_rand_gen(each, 2**32, [(9,)])[0].tolist() for each in (key, other))
    assert one == same
    assert max(flower.pseudo_rand_gen(key, 4, [(1000,)])[0]) == 2  # of 0 to 3
    quantize = import_module("flwr.common.secure_aggregation.quantization").quantize
    assert quantize([np.array([9.0, 100.0])], 8.0, 2**22)[0].tolist() == [2**22, 2**22]
    mod = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
    state = mod.SecAggPlusState()
    state.threshold, state.rd_seed_share_dict, state.sk1_share_dict = 2, {1: b"b1", 2: b"b2"}, {1: b"k1"}
    asked = {mod.Key.ACTIVE_NODE_ID_LIST: [1, 2], mod.Key.DEAD_NODE_ID_LIST: [1]}
    assert mod._unmask(state, asked)[mod.Key.SHARE_LIST] == [b"b1", b"b2", b"k1"]
    workflow = import_module("flwr.server.workflow").SecAggPlusWorkflow
    with pytest.raises(TypeError, match="LegacyContext"):
        workflow(0.5, 0.5)(None, object())


def test_engines_agree_and_batch_norm_stays_with_clients():
    method, local = SecureSum(FedAvg()), replace(SCHEDULE, batch_norm="local")
    one, other = (simulate(perceptron, CLIENTS, method, SCHEDULE, engine=engine) for engine in ("loop", "batched"))
    assert flat(one.params) == pytest.approx(flat(other.params), abs=2e-6)  # two steps: rounding may differ at halves
    run = simulate(normed, CLIENTS, method, local)
    assert float(run.buffers["1.running_mean"].abs().max()) == 0


def test_too_few_or_too_far():
    """Of six at a half it takes four."""
    hit = Sabotage(kind="crash", share=0.6, seed=2)
    with pytest.raises(
        RunError, match=r"round 1: secure sum: . of 6 clients sent masked vectors, and it takes 4; nothing"
    ):
        simulate(perceptron, CLIENTS, SecureSum(FedAvg()), SCHEDULE, tamper=hit)
    run = simulate(perceptron, CLIENTS, SecureSum(FedAvg()), SCHEDULE, tamper=Sabotage(kind="huge", share=0.2, seed=2))
    assert "beyond the bound 8)" in run.record[0]["left_out"]


def test_what_makes_no_sense_is_refused():
    for wrong in (FedAvg(combine=GeometricMedian()), FedAvg(combine=FLTrust())):
        refused("needs single updates; pass combine=Mean()", SecureSum, wrong)
    refused("which no ε counts", SecureSum, Private(FedAvg(), noise=1.0, clip=1.0, per_round=4, at_clients=True))
    refused("combine=Mean()", Private, SecureSum(FedAvg()), noise=1.0, clip=1.0, per_round=4)
    run = (simulate, perceptron, CLIENTS)
    refused('weights="uniform"', *run, SecureSum(FedAvg()), replace(SCHEDULE, weights="size"))
    refused("blocks=None", *run, SecureSum(FedAvg()), replace(SCHEDULE, blocks=0))
    refused("travel unmasked", simulate, normed, CLIENTS, SecureSum(FedAvg()), SCHEDULE)
    refused("unmasked", *run, SecureSum(SCAFFOLD()), replace(SCHEDULE, momentum=0.0))
    refused("pass guard=None", *run, SecureSum(FedAvg()), SCHEDULE, guard=Guard())
    refused("pass bits=32", *run, SecureSum(FedAvg(), bits=24), SCHEDULE)
    refused("closes at 4, and it takes 5", *run, SecureSum(FedAvg()), replace(SCHEDULE, participation=0.5, spare=1.0))
    refused("no single updates", SecureSum(FedAvg()).aggregate, {}, [Update(0, {})], {}, 4)
    for name, value in (("threshold", 1.0), ("dropout", -0.1), ("bits", 20), ("bound", 0.0), ("step", 0.0)):
        refused("pass", lambda name=name, value=value: SecureSum(FedAvg(), **{name: value}))
