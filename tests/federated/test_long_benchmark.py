"""What the benchmark of a hundred rounds makes of a run, and whom it judges clients' own models by."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.federated import long, personal
from benchmarks.federated.arms import Setting

from sparing.federated import Client
from sparing.federated.metrics import Accuracy


def test_the_last_ten_rounds_and_the_whole_run():
    """Every second of 20 rounds has accuracy round/100: the last ten give (12 + … + 20)/5, all (2 + … + 20)/10."""
    record = []
    for number in range(1, 21):
        judged = {"accuracy": number / 100, "loss": 1.0, "ssr_global": 0.5, "ssr_pairs": 0.5, "norm": 3.0}
        row = {"round": number, "left_out": "", "steps": 7, "bytes_up": 5}
        record.append(row | (judged if number % 2 == 0 else {}))
    found = long.summary(record, 1.5)
    assert [found[name] for name in ("accuracy", "accuracy_run")] == pytest.approx([0.16, 0.11])
    assert (found["curve"], found["growth"], found["steps"]) == ([0.1, 0.2], 2.0, 7)


def test_a_sweep_ends_where_the_best_has_beaten_its_neighbours():
    """Of a score with its peak at rate 0.02 and strength 0.1, from 0.1 and 0.01."""

    def score(setting: Setting) -> float:
        return -abs(math.log(setting.lr / 0.02)) - abs(math.log(setting.strength / 0.1))

    found = long.sweep("fedsign", long.DEEP, score, long.first_settings("fedsign"))
    assert (found.best.lr, found.best.strength, found.open) == (0.02, 0.1, ())


def test_own_rows_have_the_clients_classes_and_nothing_twice():
    inputs = torch.arange(400.0)
    whole = Accuracy(inputs, torch.arange(400) % 4)
    targets = torch.tensor([1] * 9 + [3] * 3)
    rows, classes = personal.own_rows(whole, targets, 0, 5)
    assert len(rows) == personal.ROWS == len(rows.unique())
    assert set(classes.tolist()) == {1, 3}
    assert torch.equal(rows % 4, classes.float())
    assert 25 < int((classes == 1).sum()) < 49  # of 50 at 3/4: 37.5 ± 4 standard deviations


def test_clients_keep_between_an_eighth_and_all_of_their_rows():
    sizes = []
    for at in range(200):
        kept = long._part(Client(torch.arange(800), torch.arange(800)), 3, at)
        assert torch.equal(kept.inputs, kept.targets)
        assert len(kept.inputs.unique()) == len(kept)
        sizes.append(len(kept))
    assert min(sizes) >= 100
    assert max(sizes) <= 800
    # 800 (1 − 1/8)/ln 8, and four standard errors of 0.25 · 800/√200
    assert abs(sum(sizes) / 200 - 336.6) < 4 * 14.2
