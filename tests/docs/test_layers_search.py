"""The search for a sampler: signals against closed forms, draws that follow them, and rounds that do not judge."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from layer_arms import PACE, rows, tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARING_CACHE", str(tmp_path / "cache"))


def stepped(grads: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """The last gradient, and the state that Adam has after all of them."""
    weight = torch.nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return grads[-1], optimizer.state[weight]


def test_signals_of_equal_gradients_have_closed_forms():
    """Adam's direction is then the sign: the gain is Σ|g|, all gradients agree, and g²/√v̂ is |g|."""
    from benchmarks.layers.search import agreement, curvature, gain

    grad = torch.tensor([1.0, -2.0, 0.5])
    last, state = stepped([grad] * 7)
    # 1 − 0.999⁷ in float32 keeps four digits
    assert gain(last, state).item() == pytest.approx(3.5, rel=1e-4)
    assert agreement(last, state).item() == pytest.approx(3.0, rel=1e-4)
    assert curvature(last, state).item() == pytest.approx(3.5, rel=1e-4)
    opposed, state = stepped([grad, -grad] * 20)
    assert agreement(opposed, state).item() < 0.1


def test_schedules_change_how_many_blocks_train_and_for_how_long():
    from benchmarks.layers.search import Scheduled, WithLast

    fewer = Scheduled(counts=(3, 3, 2, 1))
    assert [len(fewer.draw(16, 3, seed=0, interval=k)) for k in range(10)] == [3, 3, 3, 3, 3, 2, 2, 2, 1, 1]
    longer = Scheduled(counts=(3, 3, 3, 3), lasting=(1, 1, 2, 4), periods=20)
    sets = [longer.draw(16, 3, seed=0, interval=k) for k in range(20)]
    assert len(set(sets[:10])) == 10
    assert sets[10] == sets[11] != sets[12] == sets[13]
    assert sets[16] == sets[17] == sets[18] == sets[19] != sets[15]
    draws = [WithLast().draw(16, 3, seed=0, interval=k) for k in range(50)]
    assert all(len(set(drawn)) == 3 and drawn[-1] == 15 for drawn in draws)
    assert WithLast().inclusion(16, 3).sum().item() == pytest.approx(3.0)


def test_draws_follow_what_a_signal_shows(monkeypatch):
    """Of four blocks, one gains a hundred times the others: once all were seen it is drawn at almost every step."""
    from benchmarks.layers import search
    from benchmarks.layers.arms import lisa
    from benchmarks.layers.base import fresh
    from benchmarks.layers.study import tuned

    monkeypatch.setattr(search, "LAYERS", 4)
    seen: list[tuple[int, ...]] = []

    def signal(model, sampler, optimizer):
        seen.append(sampler.active)
        return {unit: 100.0 if unit == 2 else 1.0 for unit in sampler.active}

    method = lisa(active=1, period=1, embed=False)
    one = replace(search._frozen("x"), method=method, stepper=search.told(lambda: signal, temperature=0.5))
    data = rows(vocabulary=300)
    training = one.training(fresh(tiny()), data, rate=1e-3, seed=0, pace=PACE | {"steps": 24})
    tuned(fresh(tiny()), training, data, one)
    assert {drawn[0] for drawn in seen[:8]} == {0, 1, 2, 3}
    assert sum(drawn == (2,) for drawn in seen[8:]) >= 12


def test_the_fall_of_the_loss_counts_for_the_blocks_that_trained():
    from benchmarks.layers.base import fresh
    from benchmarks.layers.search import Decrease

    model, data = fresh(tiny()), rows(vocabulary=300)
    fell = Decrease(lambda: data, 2)
    found = [fell(model, SimpleNamespace(step=0, active=(1,)), None)]
    found.append(fell(model, SimpleNamespace(step=1, active=(1,)), None))
    assert found == [{}, {}]
    before = fell.last
    with torch.no_grad():
        model.lm_head.weight.zero_()
    (shown,) = fell(model, SimpleNamespace(step=3, active=(3,)), None).items()
    assert shown == (3, pytest.approx(before - math.log(300), abs=1e-5))  # of losses near 6


def test_every_try_fits_the_bytes_of_lora():
    from benchmarks.layers.arms import bytes_of
    from benchmarks.layers.base import RECIPE, fresh
    from benchmarks.layers.search import CANDIDATES
    from benchmarks.layers.study import PACE as REAL

    from layer_arms import arm

    model, data = fresh(RECIPE), rows(vocabulary=2048)
    limit = bytes_of(model, arm("LoRA, rank 8"), data, pace=REAL)
    sizes = {repr(one.method): bytes_of(model, one, data, pace=REAL) for one in CANDIDATES}
    assert max(sizes.values()) <= limit


def test_the_second_round_adds_nothing_to_the_sweep():
    from benchmarks.layers import search
    from benchmarks.layers.base import fresh

    first, one = replace(search.FIRST, load=lambda: fresh(tiny())), search.CANDIDATES[0]
    about = {"arm": one.name, "kind": "dev", "weights": first.weights}
    there = {
        first.key(one, "dev", half, 100): about | {"seed": 100, "half": half, "dev": abs(half + 20.0)}
        for half in range(-22, -17)
    }
    assert first.chosen(there, one) == -20
    there |= {
        first.key(one, "dev", -22, seed): about | {"seed": seed, "half": -22, "dev": 0.0} for seed in search.AGAIN
    }
    assert first.chosen(there, one) == -20
    assert not [job for job in first.plan(there) if job.kind == "test"]
