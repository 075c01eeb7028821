"""The parts of the federated measurements that decide what is compared with what: pairs, budgets, norms held alike."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_paired_interval_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, reach 4.303/√3 = 2.48."""
    from benchmarks.federated.paired import differences, shown, verdict

    values = differences({0: 1.0, 1: 2.0, 2: 4.0}, {2: 1.0, 1: 0.0, 0: 0.0, 7: 9.0})
    assert values == [1.0, 2.0, 3.0]
    assert shown(values) == "+2.0 [−0.5, +4.5]"
    assert (verdict(values), verdict([5.0, 6.0, 7.0]), verdict([-7.0, -6.0, -5.0])) == (
        "has zero",
        "above zero",
        "below zero",
    )
    assert verdict(values[:2]) == "–"


def test_every_method_has_the_same_budget():
    from benchmarks.federated.arms import BUDGET, METHODS, settings
    from benchmarks.federated.cases import CASES, SEEDS, TUNING_SEEDS

    assert not set(SEEDS) & set(TUNING_SEEDS)
    for case in CASES:
        assert not set(case.tuning_seeds) & set(SEEDS)
        for arm in METHODS:
            tried = settings(arm, case)
            assert len({setting.label for setting in tried}) == len(tried) == BUDGET


def test_means_are_over_the_last_evaluations_and_the_rounds_since():
    from benchmarks.federated.study import summary

    same = {"loss": 0.0, "client_accuracy": 0.0, "fusion_gap": 0.0}
    record = [
        {"round": at, "ssr_global": float(at), "ssr_pairs": 0.0, "update_norm": 0.0, "norm": 2.0 * at, "left_out": "",
         "steps": 1, "bytes_up": 8, **({"accuracy": float(at), **same} if at % 2 == 0 else {})}
        for at in range(1, 9)
    ]  # fmt: skip
    found = summary(record, 4.0)
    assert found["accuracy"] == (4 + 6 + 8) / 3
    assert found["ssr_global"] == (4 + 5 + 6 + 7 + 8) / 5
    assert found["growth"] == 16.0 / 4.0


def test_matched_arms_have_the_norms_of_the_other_run():
    from benchmarks.federated.arms import Setting, method_of
    from benchmarks.federated.cases import SIGNALS
    from benchmarks.federated.study import train

    case = dataclasses.replace(SIGNALS, rounds=2, every=1)
    setting = Setting(lr=0.1, strength=0.1)
    judge = case.rows.validation
    _, pushed = train(case, method_of("fedsign", setting), setting, 0.5, 0, judge)
    _, plain = train(case, method_of("fedavg, same rate", setting), setting, 0.5, 0, judge)
    _, grown = train(case, method_of("fedavg, grown", setting, pushed), setting, 0.5, 0, judge)
    name = next(iter(pushed[-1]))
    assert grown[-1] == pytest.approx(pushed[-1], rel=1e-6)  # float32 tensors scaled once
    assert abs(plain[-1][name] / pushed[-1][name] - 1) > 1e-3


def test_a_sweep_is_widened_until_its_best_lies_inside():
    """Accuracy peaks at a rate of 0.8 and a strength of 0.001, both outside the first six settings."""
    from benchmarks.federated.arms import sweep
    from benchmarks.federated.cases import SIGNALS

    def peak(setting):
        return -abs(math.log2(setting.lr / 0.8)) - abs(math.log10(setting.strength / 0.001))

    found = sweep("fedsign", SIGNALS, peak)
    assert (found.best.lr, found.best.strength, found.open) == (0.8, 0.001, ())
    around = {(setting.lr, setting.strength) for setting in found.scores}
    assert {(0.4, 0.001), (1.6, 0.001), (0.8, 0.01), (0.8, 0.0001)} <= around

    def known(setting):  # only the first six are measured
        return peak(setting) if setting.lr in {0.1, 0.2, 0.4} and setting.strength in {0.01, 0.1} else None

    edge = sweep("fedsign", SIGNALS, known)
    assert (edge.best.lr, edge.best.strength) == (0.4, 0.01)
    assert {(setting.lr, setting.strength) for setting in edge.open} == {(0.8, 0.01), (0.4, 0.001)}


def test_swapped_arms_have_the_other_methods_setting():
    from benchmarks.federated.arms import METHODS, SWAPPED, Setting, method_of

    for arm, (method, other) in SWAPPED.items():
        assert {method, other} <= METHODS.keys()
        assert method_of(arm, Setting(lr=0.1, strength=0.1)) == METHODS[method][0](0.1)


def test_every_defence_meets_every_attack(monkeypatch):
    """The rate is that of the study's best, and a round of each rule and each attack ends without a failure."""
    from benchmarks.federated import defences, study
    from benchmarks.federated.cases import SIGNALS
    from benchmarks.federated.store import Store

    lr = study.chosen(Store("methods"), SIGNALS, "fedavg").lr
    assert lr == 0.4
    monkeypatch.setattr(defences, "CASE", dataclasses.replace(defences.CASE, rounds=1, every=1))
    for name, rule in defences.rules(3.0, 0).items():
        assert "why" not in defences.train(rule, lr, "flip", 10.0, 0), name
    for kind in defences.ATTACKS:
        found = defences.train(defences.rules(3.0, 0)["mean"], lr, kind, 0.5, 0)
        assert ("why" in found, "backdoor" in found) == (False, kind == "backdoor")


def test_ways_to_average_lora_are_tuned_on_seeds_of_their_own_and_those_alone_train_as_long():
    from benchmarks.federated.lora import BOOKS, METHODS, PLAN, SEEDS, TUNING_SEEDS

    assert not set(TUNING_SEEDS) & set(SEEDS)
    assert {method.name for method in METHODS.values()} == {"fedavg", "fedex-lora", "flora", "ffa-lora"}
    # whom a round draws, times the rounds, is what all clients alone make together
    assert PLAN.participants(len(BOOKS)) * PLAN.rounds == len(BOOKS) * int(PLAN.rounds * PLAN.participation)
