"""Rules over whole models against slow twins and properties; attacks by hand and through a run."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from scipy.optimize import minimize

from federated.worlds import equal, make_clients, normed, perceptron
from refusals import refused
from sparing.federated import SCAFFOLD, FedAvg, Schedule, simulate
from sparing.federated.methods.around import Around
from sparing.federated.methods.interface import Update
from sparing.federated.server.collusion import Collusion, flip_labels, hidden_deviations, marked, plant_backdoor
from sparing.federated.server.defences import Bucketing, Bulyan, CenteredClipping, GeometricMedian, with_buckets_of
from sparing.federated.server.robust import Krum, Mean, Median
from sparing.seeds import stream

ZERO = {"x": torch.zeros(2, dtype=torch.float64), "y": torch.zeros(1, dtype=torch.float64)}


def updates(count=11, seed=0, shift=0.0):
    source = stream(seed, "defences")
    rows = torch.randn(count, 3, generator=source, dtype=torch.float64) + shift
    return [Update(k, {"x": row[:2], "y": row[2:]}, buffers={"m": row[:1]}) for k, row in enumerate(rows)]


def vector(params):
    return torch.cat([params["x"], params["y"]])


def rows_of(sent):
    return torch.stack([vector(one.params) for one in sent])


def test_geometric_median_is_the_minimum():
    """Against a minimiser of the sum of distances, unequal weights; on a line it is the weighted median."""
    sent = [replace(one, weight=1.0 + one.client % 3) for one in updates()]
    rows, weights = rows_of(sent).numpy(), [one.weight for one in sent]
    best = minimize(
        lambda z: sum(w * math.dist(z, row) for w, row in zip(weights, rows, strict=True)),
        rows.mean(0), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000},
    )  # fmt: skip
    found = GeometricMedian(steps=300).params(ZERO, sent)
    assert vector(found).tolist() == pytest.approx(best.x.tolist(), abs=1e-5)  # the minimiser's own precision
    line = [Update(k, {"x": torch.tensor([v, v]), "y": torch.zeros(1)}) for k, v in enumerate([0.0, 1.0, 50.0])]
    start = {"x": torch.zeros(2), "y": torch.zeros(1)}
    assert GeometricMedian(steps=2000).params(start, line)["x"].tolist() == pytest.approx([1.0, 1.0], abs=1e-2)


def test_centered_clipping_by_hand():
    """One step from 0 with τ = 1: (3, 4, 0) counts as (0.6, 0.8, 0), (0.3, 0, 0.4) as itself."""
    sent = [
        Update(0, {"x": torch.tensor([3.0, 4.0]), "y": torch.zeros(1)}),
        Update(1, {"x": torch.tensor([0.3, 0.0]), "y": torch.tensor([0.4])}),
    ]
    start = {"x": torch.zeros(2), "y": torch.zeros(1)}
    assert vector(CenteredClipping(1.0, steps=1).params(start, sent)).tolist() == pytest.approx([0.45, 0.4, 0.2])
    far = CenteredClipping(1e9, steps=1).params(ZERO, updates())
    assert torch.allclose(vector(far), rows_of(updates()).mean(0), rtol=1e-12)


def slow_bulyan(rows, hostile):
    """One model at a time, in plain Python."""
    alive, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * hostile:
        near = max(len(alive) - hostile - 2, 1)
        scores = {i: sum(sorted(math.dist(rows[i], rows[j]) ** 2 for j in alive if j != i)[:near]) for i in alive}
        best = min(alive, key=lambda i: (scores[i], i))
        chosen.append(best)
        alive.remove(best)
    made = []
    for column in range(len(rows[0])):
        values = sorted(rows[i][column] for i in chosen)
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        nearest = sorted(values, key=lambda v: abs(v - middle))[: len(chosen) - 2 * hostile]
        made.append(sum(nearest) / len(nearest))
    return made


@pytest.mark.parametrize(("count", "hostile"), [(7, 1), (11, 2), (5, 0)])
def test_bulyan_is_its_slow_twin(count, hostile):
    sent = updates(count, seed=count)
    found = Bulyan(hostile).params(ZERO, sent)
    assert vector(found).tolist() == pytest.approx(slow_bulyan(rows_of(sent).tolist(), hostile), rel=1e-12)


def test_buckets_are_drawn_anew_in_every_round():
    """Also where the same clients answer: an honest client would share one with a hostile one for ever."""
    method = Around(FedAvg(combine=Bucketing(Median(), size=2, seed=1)))
    sent = [Update(k, {"x": torch.full((1,), float(k))}) for k in range(8)]

    def partition(number):
        groups = with_buckets_of(method, number).method.combine._buckets(sent)
        return frozenset(frozenset(one.client for one in group) for _, group in groups)

    assert len({partition(number) for number in range(6)}) > 3
    assert partition(3) == partition(3)
    plain = FedAvg(combine=Median())
    within = with_buckets_of(Bucketing(Bucketing(Median())), 3)
    assert (within.number, within.combine.number) == (3, 3)
    assert with_buckets_of(plain, 3) is plain
    assert repr(with_buckets_of(method, 3)) == repr(method)  # a checkpoint knows its method by these words


def test_buckets_are_a_partition_and_their_mean_is_the_mean():
    sent = [replace(one, weight=1.0 + one.client) for one in updates()]
    whole = Mean().params(ZERO, sent)
    assert torch.allclose(vector(Bucketing(Mean(), 3).params(ZERO, sent)), vector(whole), rtol=1e-12)
    one, other = (Bucketing(Median(), 2, seed=seed).params(ZERO, sent) for seed in (0, 1))
    assert not torch.equal(one["x"], other["x"])
    assert equal(Bucketing(Median(), 1).params(ZERO, sent), Median().params(ZERO, sent))
    krum = Bucketing(Krum(hostile=1), 2)
    at = krum.params(ZERO, sent)
    pairs = [rows_of(pair).T @ torch.tensor([p.weight for p in pair], dtype=torch.float64) / sum(p.weight for p in pair)
             for pair in itertools.combinations(sent, 2)]  # fmt: skip
    assert min(float((vector(at) - row).abs().max()) for row in [*pairs, *rows_of(sent)]) < 1e-12
    assert krum.buffers({"m": ZERO["y"]}, sent)["m"].item() == pytest.approx(at["x"][0].item(), rel=1e-12)


RULES = [Bulyan(2), GeometricMedian(), CenteredClipping(1.0), Bucketing(Median(), 1), Krum(hostile=2, keep=None)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:16])
def test_order_changes_no_bit_and_two_of_eleven_move_little(rule):
    sent = updates(shift=0.5)
    assert equal(rule.params(ZERO, sent), rule.params(ZERO, sent[::-1]))
    wrong = [replace(one, params={n: v + 1e9 for n, v in one.params.items()}) for one in sent[:2]]
    found = rule.params(ZERO, [*wrong, *sent[2:]])
    assert float((vector(found) - rows_of(sent[2:]).mean(0)).norm()) < 1.5  # honest models are 1.7 from their mean


def test_little_is_enough_and_inner_product_by_hand():
    sent = [replace(one, extras={"c": one.params}) for one in updates(10)]
    for kind in ("alie", "inner", "sybil"):
        attack = Collusion(kind=kind, share=0.3, scale=0.5, seed=4)
        hostile = [one for one in sent if attack.is_hostile(one.client)]
        honest = rows_of([one for one in sent if not attack.is_hostile(one.client)])
        z = 0.5 * hidden_deviations(10, len(hostile))
        wanted = {
            "alie": honest.mean(0) - z * honest.std(0, correction=0),
            "inner": -0.5 * honest.mean(0),
            "sybil": -0.5 * vector(hostile[0].params),
        }[kind]
        assert 0 < len(hostile) < 5
        for one in attack.attack(sent, ZERO, {"m": torch.zeros(1, dtype=torch.float64)}):
            mine = wanted if attack.is_hostile(one.client) else vector(sent[one.client].params)
            assert vector(one.params).tolist() == pytest.approx(mine.tolist(), rel=1e-12)
            assert equal(one.extras["c"], one.params)  # the same start, 0
            assert one.buffers["m"].item() == pytest.approx(mine[0].item())


def test_attacks_on_rows():
    clients = make_clients()
    attack = Collusion(kind="alie", share=0.5, seed=1)
    hit = [attack.is_hostile(at) for at in range(4)]
    assert 0 < sum(hit) < 4
    for at, (one, before) in enumerate(zip(flip_labels(clients, attack, 3), clients, strict=True)):
        assert torch.equal(one.targets, 2 - before.targets if hit[at] else before.targets)
    for at, (one, before) in enumerate(
        zip(plant_backdoor(clients, attack, target=1, elements=2), clients, strict=True)
    ):
        half = len(before) // 2 if hit[at] else 0
        assert torch.equal(one.inputs[:half], marked(before.inputs[:half], 2))
        assert bool((one.targets[:half] == 1).all())
        assert torch.equal(one.inputs[half:], before.inputs[half:])
        assert torch.equal(one.targets[half:], before.targets[half:])


def test_colluders_in_a_run_are_in_buffers_and_controls_too():
    schedule = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=4, lr=0.3, momentum=0.0)
    attack = Collusion(kind="inner", share=0.5, seed=1)
    fair = simulate(normed, make_clients(), SCAFFOLD(), schedule)
    run = simulate(normed, make_clients(), SCAFFOLD(), schedule, tamper=attack)
    assert not run.record[-1]["left_out"]
    assert not torch.equal(run.buffers["1.running_mean"], fair.buffers["1.running_mean"])
    assert not equal(run.state.server["control"], fair.state.server["control"])


def test_what_cannot_work_is_refused():
    refused("needs 7", Bulyan(1).params, ZERO, updates(6))
    partial = [*updates(6), Update(9, {"x": torch.zeros(2)})]
    for rule in (Bulyan(1), GeometricMedian(), CenteredClipping(1.0), Bucketing(Median())):
        refused("partial models", rule.params, ZERO, partial)
    schedule = Schedule(rounds=1, momentum=0.0)
    for rule in (CenteredClipping(1.0), Bucketing(CenteredClipping(1.0))):
        refused("another scale", simulate, perceptron, make_clients(), SCAFFOLD(combine=rule), schedule)
    for wrong in (
        lambda: Bulyan(-1), lambda: GeometricMedian(steps=0), lambda: GeometricMedian(smoothing=0.0),
        lambda: CenteredClipping(0.0), lambda: CenteredClipping(1.0, steps=0), lambda: Bucketing(Median(), 0),
        lambda: Collusion(kind="alie", share=2.0), lambda: Collusion(kind="alie", share=0.1, scale=0.0),
    ):  # fmt: skip
        refused("pass", wrong)
    assert FedAvg(combine=Krum(keep=None)).combine.keep is None
