"""Each fault is found, named and left out; the others count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparing.errors import RunError, UserError
from sparing.federated.client.train import ClientResult
from sparing.federated.methods.interface import Update
from sparing.federated.server.faults import Fault, Guard, Sabotage, filter_results, report_faults, require_enough

G = {"w": torch.zeros(2), "b": torch.zeros(1)}
BUFFERS = {"mean": torch.zeros(1)}


def result(client, step=1.0, **changes):
    update = Update(client, {name: value + step for name, value in G.items()}, 1.0, {}, {"mean": torch.ones(1)})
    return ClientResult(replace(update, **changes), {})


def filtered(*results, guard=Guard(), partial=False):  # noqa: B008  # it is frozen
    kept, faults = filter_results(results, G, BUFFERS, guard, partial=partial)
    return [one.update.client for one in kept], [str(fault) for fault in faults]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"params": {"w": torch.tensor([1.0, float("nan")]), "b": torch.zeros(1)}}, "not finite (w)"),
        ({"params": {"w": torch.ones(2), "b": torch.tensor([float("inf")])}}, "not finite (b)"),
        ({"buffers": {"mean": torch.tensor([float("nan")])}}, "not finite (mean)"),
        ({"extras": {"c": {"w": torch.ones(2)}}}, "wrong shape (c beside the model is only on one side)"),
        ({"buffers": {"mean": torch.full((1,), 1e6)}}, "huge (1e+06 times the median mean)"),
        ({"weight": 1e12}, "weight (claims 1e+12 times the median)"),
        ({"weight": "many"}, "not finite (weight many)"),
        ({"params": {"w": [1.0, 1.0], "b": torch.zeros(1)}}, "wrong shape (w is no dense tensor)"),
        ({"weight": float("nan")}, "not finite (weight nan)"),
        ({"weight": 0.0}, "not finite (weight 0.0)"),
        ({"params": {"w": torch.ones(3), "b": torch.zeros(1)}},
         "wrong shape (w is (3,) float32, the model's (2,) float32)"),
        ({"params": {"w": torch.ones(2).double(), "b": torch.zeros(1)}},
         "wrong shape (w is (2,) float64, the model's (2,) float32)"),
        ({"params": {"w": torch.ones(2)}}, "wrong shape (b is only on one side)"),
        ({"params": {**G, "x": torch.ones(2)}}, "wrong shape (x is only on one side)"),
        ({"buffers": {}}, "wrong shape (mean is only on one side)"),
    ],
)  # fmt: skip
def test_each_is_named_and_left_out(changes, text):
    assert filtered(result(3), result(7, **changes), result(1)) == ([3, 1], [f"client 7: {text}"])


def test_clients_that_draw_blocks_may_leave_parameters_out():
    assert filtered(result(0, params={"w": torch.ones(2)}), partial=True) == ([0], [])
    assert filtered(result(0, params={"x": torch.ones(2)}), partial=True)[0] == []


def test_huge_updates_in_medians():
    """Lengths √3·(1, 1, 1, 120): the last is 120 medians long."""
    assert filtered(result(0), result(1), result(2), result(3, step=19.0))[1] == []
    assert filtered(result(0), result(1), result(2), result(3, step=21.0))[0] == [0, 1, 2]
    four = [result(0), result(1), result(2), result(3, step=120.0)]
    assert filtered(*four) == ([0, 1, 2], ["client 3: huge (120 times the median update)"])
    assert filtered(*four, guard=Guard(huge=121.0)) == ([0, 1, 2, 3], [])
    assert filtered(*four, guard=Guard(huge=None)) == ([0, 1, 2, 3], [])
    assert filtered(result(0), result(3, step=1e9))[1] == []  # of two, nobody knows which is odd


def test_clients_that_do_not_move_make_nobody_huge():
    assert filtered(result(0, step=0.0), result(1, step=0.0), result(2))[1] == []


def test_what_travels_beside_the_model_is_held_to_the_others():
    def control(client, value):
        return result(client, extras={"control": {name: torch.full_like(one, value) for name, one in G.items()}})

    def filtered(last):
        kept, faults = filter_results([control(0, 1.0), control(1, 2.0), control(2, 1.0), last], G, BUFFERS, Guard(),
                            extra_names={"control"})  # fmt: skip
        return [one.update.client for one in kept], [str(fault) for fault in faults]

    assert filtered(control(3, 20.0)) == ([0, 1, 2, 3], [])
    assert filtered(control(3, 1e9)) == ([0, 1, 2], ["client 3: huge (6.67e+08 times the median control)"])
    assert filtered(control(3, math.nan)) == ([0, 1, 2], ["client 3: not finite (w)"])
    assert filtered(result(3)) == ([0, 1, 2], ["client 3: wrong shape (control beside the model is only on one side)"])
    half = {"control": {"w": torch.ones(2)}}
    assert filtered(result(3, extras=half)) == ([0, 1, 2], ["client 3: wrong shape (b is only on one side)"])


def test_more_steps_explain_a_longer_way():
    """Ten times the steps explain ten times the way: 199 medians are fewer than 20 · 10, and 201 are not."""
    others = [replace(result(at), steps=2) for at in range(3)]

    def passes(step, steps=20, momentum=0.0, mean=1.0):
        last = result(3, step=step, buffers={"mean": torch.full((1,), mean)})
        kept, _ = filter_results([*others, replace(last, steps=steps)], G, BUFFERS, Guard(), momentum=momentum)
        return len(kept) == 4

    assert [passes(199.0), passes(201.0), passes(1e6), passes(-1e6)] == [True, False, False, False]
    assert [passes(1.0, mean=199.0), passes(1.0, mean=201.0)] == [True, False]
    # Two steps with momentum 0.9 go 1 + 1.9, twenty go 10 · 20 − 90 (1 − 0.9²⁰) = 120.9: 41.7 times as far.
    assert [passes(833.0, momentum=0.9), passes(835.0, momentum=0.9)] == [True, False]
    assert [passes(19.0, steps=1), passes(21.0, steps=1)] == [True, False]  # fewer steps take nothing away


def test_a_buffer_that_most_leave_alone_moves_as_far_as_a_count():
    """Five steps count to 5, and a layer may be called several times a step; 10¹² no steps explain."""
    still = [replace(result(at, buffers={"mean": torch.zeros(1)}), steps=5) for at in range(3)]

    def filtered(mean):
        last = replace(result(3, buffers={"mean": torch.full((1,), mean)}), steps=5)
        return [str(fault) for fault in filter_results([*still, last], G, BUFFERS, Guard())[1]]

    assert filtered(5.0) == filtered(100.0) == []
    assert filtered(1e12) == ["client 3: huge (moved by 1e+12, unlike the median mean)"]


def test_a_counter_does_not_compound():
    """However much it holds, a round adds what steps explain: 20 · 5, not 20 · 1000 that would be 2⁶³ in fifteen."""
    sent = {"count": torch.tensor(1000)}

    def filtered(added, **more):
        results = [replace(result(at, buffers={"count": torch.tensor(1005)}), steps=5) for at in range(3)]
        results.append(replace(result(3, buffers={"count": torch.tensor(1000 + added)}), steps=5))
        return [str(fault) for fault in filter_results(results, G, sent, Guard(), **more)[1]]

    assert filtered(100) == []
    assert filtered(110) == ["client 3: huge (22 times the median count)"]
    assert filtered(-900, rounds=9) == []  # its own, of nine rounds ago


def test_faults_are_told_once_for_each_client_and_kind(capsys):
    seen = set()
    crash, huge = Fault(3, "crash", "KeyError: a; b"), Fault(4, "huge", "30 times the median update")
    for number, faults in enumerate(([crash, huge], [huge], [], [huge, Fault(3, "absent", "no answer")])):
        report_faults({"round": number + 1, "left_out": "; ".join(map(str, faults))}, seen, "fedavg")
    told = "is left out: {}; later rounds are not reported again"
    assert capsys.readouterr().err.splitlines() == [
        "fedavg: round 1: client 3 " + told.format("crash (KeyError: a; b)"),
        "fedavg: round 1: client 4 " + told.format("huge (30 times the median update)"),
        "fedavg: round 4: client 3 " + told.format("absent (no answer)"),
    ]


def test_a_weight_that_the_server_knows_is_not_believed():
    known = {0: 1.0, 1: 30.0, 2: 4.0}
    results = [result(0), result(1, weight=30.0), result(2, weight=1e12)]
    kept, faults = filter_results(results, G, BUFFERS, Guard(), weights=known)
    assert [one.update.client for one in kept] == [0, 1]  # rows may differ as they do
    assert str(faults[0]) == "client 2: weight (claims 1e+12 and counts 4)"
    assert filtered(*results, guard=Guard(heavy=None))[1] == []


def test_too_few_left():
    faults = [Fault(at, "crash", "x") for at in range(5)]
    require_enough(2, 0, faults, Guard(least=2))
    with pytest.raises(RunError, match=r"round 4: 1 clients left of the 2 .* client 0: crash \(x\);.*; …"):
        require_enough(1, 3, faults, Guard(least=2))


def test_sabotage():
    update = result(5, step=2.0).update
    params = {name: value + 1 for name, value in G.items()}  # so the update moved by 1
    assert Sabotage(kind="flip", share=1.0)(update, params).params["w"].tolist() == [0.0, 0.0]
    assert Sabotage(kind="huge", share=1.0)(update, params).params["b"].tolist() == [1e6 + 1]
    assert Sabotage(kind="not finite", share=1.0)(update, params).params["b"].isnan().all()
    assert Sabotage(kind="wrong shape", share=1.0)(update, params).params["b"].shape == (1, 1)
    assert Sabotage(kind="flip", share=0.0)(update, params) is update
    with pytest.raises(RunError, match="sabotage"):
        Sabotage(kind="crash", share=1.0)(update, params)
    struck = sum(Sabotage(kind="flip", share=0.3).is_hostile(client) for client in range(500))
    assert abs(struck - 150) < 4 * (500 * 0.3 * 0.7) ** 0.5  # four standard deviations


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Guard(huge=1.0), "above the median"),
        (lambda: Guard(least=0), "a mean needs"),
        (lambda: Guard(heavy=0.5), "more than the median"),
        (lambda: Sabotage(kind="flip", share=1.5), "share of clients"),
    ],
)
def test_bad_input(make, why):
    with pytest.raises(UserError, match=why):
        make()
