"""FLTrust against a twin in plain Python, and through whole runs: engines, Flower, attackers, refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from federated.worlds import client, equal, make_clients, max_difference, normed, perceptron
from refusals import refused
from sparing.errors import RunError
from sparing.federated import SCAFFOLD, FedAvg, FedProx, Private, Schedule, simulate
from sparing.federated.client.train import client_setup, initial_model, train
from sparing.federated.methods.controls import NormMatched
from sparing.federated.methods.interface import Sent, Update
from sparing.federated.server.collusion import Collusion
from sparing.federated.server.defences import Bucketing
from sparing.federated.server.faults import Sabotage
from sparing.federated.server.robust import Clipped
from sparing.federated.server.trust import ROOT, FLTrust, with_root
from sparing.seeds import stream

CENTER = {"x": torch.tensor([0.5, -1.0], dtype=torch.float64), "y": torch.tensor([[2.0]], dtype=torch.float64)}
SCHEDULE = Schedule(rounds=3, participation=1.0, local_epochs=1, batch_size=4, lr=0.3)


def update(number, row):
    row = torch.tensor(row, dtype=torch.float64)
    return Update(number, {"x": row[:2], "y": row[2:].view(1, 1)}, buffers={"m": row[:1]})


def flat(params):
    return [*params["x"].tolist(), params["y"].item()]


def twin(start, own, sent):
    """The published sums, element by element."""
    step = [a - b for a, b in zip(own, start, strict=True)]
    total, whole = [0.0] * len(start), 0.0
    for row in sent:
        move = [a - b for a, b in zip(row, start, strict=True)]
        length = math.hypot(*move)
        cosine = sum(a * b for a, b in zip(move, step, strict=True)) / length / math.hypot(*step) if length else 0.0
        if cosine > 0:
            whole += cosine
            total = [t + cosine * math.hypot(*step) / length * m for t, m in zip(total, move, strict=True)]
    return [s + t / whole for s, t in zip(start, total, strict=True)] if whole else list(start)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_its_twin_in_plain_python(seed):
    rows = torch.randn(8, 3, generator=stream(seed, "trust"), dtype=torch.float64).tolist()
    rows[3] = flat(CENTER)  # one that did not move
    own, sent = update(ROOT, rows[7]), [update(k, row) for k, row in enumerate(rows[:7])]
    rule = with_root(FLTrust(), own, CENTER)
    found = rule.params(CENTER, sent)
    assert flat(found) == pytest.approx(twin(flat(CENTER), rows[7], rows[:7]), rel=1e-12)
    assert equal(found, rule.params(CENTER, sent[::-1]))
    # Lengths of clients do not count, nor do their weights, and who goes the other way is not there.
    longer = [
        replace(u, weight=9.0, params={n: CENTER[n] + 1e3 * (v - CENTER[n]) for n, v in u.params.items()}) for u in sent
    ]
    assert flat(rule.params(CENTER, longer)) == pytest.approx(flat(found), rel=1e-9)
    start = flat(CENTER)
    turned = [sum((a - c) * (b - c) for a, b, c in zip(flat(u.params), rows[7], start, strict=True)) for u in sent]
    trusted = [u for u, product in zip(sent, turned, strict=True) if product > 0]
    assert 0 < len(trusted) < 7
    assert flat(rule.params(CENTER, trusted)) == pytest.approx(flat(found), rel=1e-12)
    middle = torch.tensor([u.buffers["m"].item() for u in trusted]).double().quantile(0.5)
    assert rule.buffers({"m": torch.zeros(1).double()}, sent)["m"].item() == pytest.approx(middle.item(), rel=1e-6)


def test_nobody_trusted_leaves_the_model():
    """One goes the other way, one across, and the server of the second case stands still."""
    away, across = update(0, [-0.5, -1.0, 2.0]), update(1, [0.5, 5.0, 2.0])
    rule = with_root(FLTrust(), update(ROOT, [1.5, -1.0, 2.0]), CENTER)
    for trusting in (rule, with_root(FLTrust(), update(ROOT, flat(CENTER)), CENTER)):
        assert equal(trusting.params(CENTER, [away, across]), CENTER)
        assert trusting.buffers({"m": torch.ones(1)}, [away, across])["m"].item() == 1


def test_a_round_is_the_twin_over_what_clients_and_server_trained():
    """By hand: every client and the server train from the first model; the run's engine and Flower's grid agree."""
    flower = pytest.importorskip("sparing.federated.flower", reason="flower")
    clients, root, method, schedule = (
        make_clients(),
        client(8, 77),
        FedAvg(combine=FLTrust()),
        replace(SCHEDULE, rounds=1),
    )
    setup = client_setup(initial_model(method, perceptron, 4), method, schedule, seed=4)
    sent = Sent({name: value.detach().clone() for name, value in setup.params.items()})
    made = [train(setup, rows, sent, {}, number=0, client_id=k).update for k, rows in enumerate([*clients, root])][:4]
    own = train(setup, root, sent, {}, number=0, client_id=ROOT).update

    def line(params):
        return [float(v) for name in sent.params for v in params[name].flatten()]

    wanted = twin(line(sent.params), line(own.params), [line(one.params) for one in made])
    run = simulate(perceptron, clients, method, schedule, seed=4, root=root, engine="loop")
    assert line(run.params) == pytest.approx(wanted, rel=1e-12)
    run = simulate(perceptron, clients, method, SCHEDULE, seed=4, root=root, engine="loop")
    other = flower.run_in_process(perceptron, clients, method, SCHEDULE, seed=4, root=root)
    assert equal(run.params, other.params)
    stacked = simulate(perceptron, clients, method, SCHEDULE, seed=4, root=root, engine="batched")
    assert max(float((run.params[name] - value).abs().max()) for name, value in stacked.params.items()) < 1e-12


def test_attackers_who_reverse_the_mean_are_not_there():
    """A reversed update has no trust: the run is the one in which its sender crashed; the plain mean is another."""
    clients, root = make_clients((9, 9, 9, 9)), client(9, 77)
    attack = Collusion(kind="inner", share=0.3, scale=5.0, seed=3)
    assert [attack.is_hostile(k) for k in range(4)].count(True) == 1
    first = replace(SCHEDULE, rounds=1)  # later rounds' updates hardly have a direction in common
    gone = Sabotage(kind="crash", share=0.3, seed=3)
    for method, rows, same in ((FedAvg(combine=FLTrust()), root, True), (FedAvg(), None, False)):
        hit, absent = (
            simulate(perceptron, clients, method, first, root=rows, tamper=tamper) for tamper in (attack, gone)
        )
        assert (max_difference(hit.params, absent.params) < 1e-12) == same


def test_it_works_inside_other_rules_and_methods_and_with_batch_norm():
    clients, root = make_clients(), client(8, 77)
    bucketed = FedProx(mu=0.1, combine=Bucketing(Clipped(9.0, FLTrust()), 2))
    run = simulate(normed, clients, NormMatched(bucketed, [{}] * 3), SCHEDULE, root=root)
    assert all(bool(value.isfinite().all()) for value in (*run.params.values(), *run.buffers.values()))
    assert float(run.buffers["1.running_mean"].abs().max()) > 0


def test_what_cannot_work_is_refused(tmp_path):
    clients, root, method = make_clients(), client(8, 77), FedAvg(combine=FLTrust())
    refused("pass root=Client", simulate, perceptron, clients, method, SCHEDULE)
    refused("pass root=Client", simulate, perceptron, clients, method, SCHEDULE, root=client(0, 77))
    refused("root=None", simulate, perceptron, clients, FedAvg(), SCHEDULE, root=root)
    refused("blocks=None", simulate, perceptron, clients, method, replace(SCHEDULE, blocks=0), root=root)
    still = replace(SCHEDULE, momentum=0.0)
    refused("a client's state", simulate, perceptron, clients, SCAFFOLD(combine=FLTrust()), still, root=root)
    refused("combine=Mean()", Private, method, noise=1.0, clip=1.0, per_round=4)
    refused("pass root=", FLTrust().params, CENTER, [update(0, [1.0, 2.0, 3.0])])
    partial = with_root(FLTrust(), update(ROOT, [1.0, 2.0, 3.0]), CENTER)
    refused("whole models", partial.params, CENTER, [Update(0, {"x": CENTER["x"]})])
    wild = replace(root, inputs=root.inputs / 0)
    with pytest.raises(RunError, match="infinite or NaN"):
        simulate(perceptron, clients, method, SCHEDULE, root=wild)
    at = tmp_path / "run.safetensors"
    simulate(perceptron, clients, method, replace(SCHEDULE, rounds=1), root=root, checkpoint=at)
    more = {"checkpoint": at, "resume": True}
    refused("another run", simulate, perceptron, clients, method, SCHEDULE, root=client(9, 77), **more)
