"""The schedule: rates by hand, draws that are the same for all, numbers that are refused."""

from __future__ import annotations

import math

import pytest

from refusals import refused
from sparing.federated.settings import Schedule, rate_at, sample_clients


@pytest.mark.parametrize(
    ("share", "clients", "count"),
    [(0.1, 100, 10), (0.1, 14, 1), (0.1, 15, 2), (0.1, 25, 3), (0.001, 10, 1), (1.0, 7, 7), (0.5, 1, 1)],
)
def test_participants(share: float, clients: int, count: int):
    """max(⌊Q·K⌉, 1), halves upwards."""
    schedule = Schedule(participation=share)
    assert schedule.participants(clients) == len(sample_clients(schedule, clients, 3, seed=0)) == count


def test_draws_are_distinct_ascending_and_depend_on_labels_alone():
    schedule = Schedule(participation=0.3)
    rounds = [sample_clients(schedule, 20, number, seed=5) for number in range(200)]
    assert rounds == [
        sample_clients(Schedule(participation=0.3, lr=9.0, rounds=7), 20, number, seed=5) for number in range(200)
    ]
    assert all(list(row) == sorted(set(row)) and len(row) == 6 for row in rounds)
    assert len(set(rounds)) > 150
    assert sample_clients(schedule, 20, 0, seed=6) != rounds[0]
    counts = [sum(k in row for row in rounds) for k in range(20)]
    # 200 · 0.3 = 60 expected, standard deviation 6.5: five of them bound all twenty.
    assert all(abs(count - 60) < 33 for count in counts)


def test_rates_by_hand():
    schedule = Schedule(rounds=6, lr=0.4, warmup_rounds=2, decay="cosine")
    after = [0.4 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert [rate_at(schedule, r) for r in range(6)] == pytest.approx([0.2, 0.4, *after])
    assert rate_at(schedule, 50) == pytest.approx(0)  # beyond the end it does not climb again
    assert [rate_at(Schedule(lr=0.4, warmup_rounds=4), r) for r in range(6)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    )
    assert rate_at(Schedule(lr=0.3), 99) == 0.3
    assert rate_at(Schedule(rounds=3, warmup_rounds=3, decay="cosine", lr=0.3), 3) == 0.3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"participation": 0.0}, r"Schedule\.participation: got 0\.0"),
        ({"participation": 1.5}, r"pass 0 < share <= 1"),
        ({"participation": math.nan}, r"Schedule\.participation"),
        ({"rounds": 0}, r"Schedule\.rounds: got 0; it is a count"),
        ({"local_epochs": True}, r"Schedule\.local_epochs"),
        ({"batch_size": 2.5}, r"Schedule\.batch_size"),
        ({"warmup_rounds": -1}, r"Schedule\.warmup_rounds"),
        ({"least_steps": -1}, r"Schedule\.least_steps"),
        ({"blocks": -1}, r"Schedule\.blocks"),
        ({"lr": 0.0}, r"Schedule\.lr"),
        ({"lr": math.inf}, r"Schedule\.lr"),
        ({"clip": 0.0}, r"Schedule\.clip"),
        ({"momentum": 1.0}, r"Schedule\.momentum"),
        ({"optimizer": "adam"}, r"Schedule\.optimizer: got 'adam'.*sgd, adamw"),
        ({"optimizer": "adamw", "beta2": 1.0}, r"Schedule\.beta2"),
        ({"optimizer": "adamw", "eps": 0.0}, r"Schedule\.eps"),
        ({"beta2": 0.95}, r'Schedule\.beta2: got 0\.95 with optimizer="sgd"; SGD has none; pass optimizer="adamw"'),
        ({"weight_decay": -1e-4}, r"Schedule\.weight_decay"),
        ({"decay": "linear"}, r"Schedule\.decay: got 'linear'.*none, cosine"),
        ({"batch_norm": "drop"}, r"Schedule\.batch_norm"),
        ({"weights": "rows"}, r"Schedule\.weights"),
    ],
)
def test_what_is_no_schedule_is_refused(setting: dict, message: str):
    refused(message, Schedule, **setting)


def test_no_clients_and_no_round_are_refused():
    refused("clients: got 0", sample_clients, Schedule(), 0, 0, seed=0)
    refused("round: got -1", rate_at, Schedule(), -1)
