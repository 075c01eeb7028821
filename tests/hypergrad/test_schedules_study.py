"""The study of schedules: what the outer parameters are, late points do not count, and rates inside their sweep."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks import hypergrad_schedules as study

from sparing import hypergrad as hg


@pytest.fixture
def data(monkeypatch) -> study.Corpus:
    """Five short texts, and runs of seven steps."""
    monkeypatch.setattr(study, "STEPS", 7)
    texts = [torch.arange(40).mul(factor) % study.LETTERS for factor in (1, 3, 5, 7, 11)]
    return study.Corpus(tuple(texts), texts[0][:20], texts[0][10:])


def test_rates_go_through_three_points_and_texts_count_by_their_logits(data) -> None:
    problem = study.problem_of(data, 0)
    phi = torch.tensor([0.0, math.log(2.0), 0.0, -math.inf, math.log(0.1), math.log(0.4), math.log(0.1)])
    rates = [float(problem.optimizer.lr(step, phi)) for step in range(7)]
    assert rates == pytest.approx(
        [0.1, 0.1 * 4 ** (1 / 3), 0.1 * 4 ** (2 / 3), 0.4, *[0.1 * 4**x for x in (2 / 3, 1 / 3, 0)]]
    )
    batch = problem.batches(0, torch.Generator().manual_seed(1))
    losses = study.nats(problem.init, torch.cat(data.train), batch).mean(1)
    shares = torch.tensor([0.2, 0.2, 0.4, 0.2, 0.0])
    torch.testing.assert_close(problem.inner(problem.init, phi, batch), losses @ shares)
    starts = torch.arange(5) * 40
    assert ((batch >= starts[:, None]) & (batch + study.SEEN < starts[:, None] + 40)).all()  # no window leaves its text


def test_a_point_that_is_found_after_the_time_does_not_count(data, monkeypatch) -> None:
    clock = iter([0.0, 10.0, 20.0, 30.0])
    monkeypatch.setattr(study.time, "process_time", lambda: next(clock))
    values = iter([3.0, 2.0, 1.0])

    def hypergradient(problem, phi, method, *, seed):
        return type("Found", (), {"value": torch.tensor(next(values)), "grad": torch.ones_like(phi)})

    monkeypatch.setattr(study.hg, "hypergradient", hypergradient)
    found = study.climbed(data, 0, hg.Reverse(), 0.5)
    assert (found["tries"], found["chosen"], found["path"]) == (2, 2.0, [3.0, 2.0])
    assert found["phi"] == pytest.approx((study.START - 0.5).tolist())  # one step of Adam


def test_a_sweep_goes_on_until_the_best_rate_lies_inside(data, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(study, "GRADIENTS", {"arm": {"": hg.Reverse(), ", step 1": hg.Reverse()}})
    best = iter([0.03, 10.0])
    monkeypatch.setattr(study, "climbed", lambda data, seed, method, lr: {"chosen": abs(math.log(lr / target[0]))})
    target = [next(best)]
    table = study.Rows(tmp_path / "rows.json")
    assert study.tune(table, data, "arm") == ("", 0.03)
    assert {float(key.split(" | ")[2]) for key in table.rows} == {0.01, 0.03, 0.1, 0.3, 1.0}
