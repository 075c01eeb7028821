"""The arms of the study of layer sampling: what trains, what it is priced at, and what each ablation changes."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layer_arms import PACE, arm, rows, tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARING_CACHE", str(tmp_path / "cache"))


# ---- arms


@pytest.fixture(scope="module")
def model():
    sys.path.insert(0, str(ROOT))
    from benchmarks.layers.base import RECIPE, fresh

    made = fresh(RECIPE)
    sys.path.remove(str(ROOT))
    return made


def copied(model: torch.nn.Module) -> torch.nn.Module:
    import copy

    return copy.deepcopy(model)


def test_parameters_that_train_are_those_counted_by_hand(model):
    """Width 256, feed-forward 688, vocabulary 2,048, 16 blocks."""
    from benchmarks.layers.arms import trainable

    block = 4 * 256**2 + 3 * 256 * 688 + 2 * 256
    table = 2048 * 256
    adapters = 8 * (4 * (256 + 256) + 3 * (256 + 688))
    expected = {
        "full": 16 * block + 2 * table + 256,
        "LISA": 2 * block + 2 * table + 256,
        "LISA, embedding frozen": 2 * block + table + 256,
        "LoRA, rank 8": 16 * adapters,
        "BAdam": block,
        "GRASS": 2 * block,
        "embedding and head only": 2 * table + 256,
        "no training": 0,
    }
    data = rows(vocabulary=2048)
    for name, count in expected.items():
        assert trainable(copied(model), arm(name), data, pace=PACE) == count, name
    budget = 0.03 * expected["full"]
    assert 0.7 * budget < trainable(copied(model), arm("MISA, 3 %"), data, pace=PACE) <= budget


def test_blocks_of_the_matched_arms_are_as_many_as_fit(model):
    from benchmarks.layers.arms import MATCHED, bytes_of
    from benchmarks.layers.study import PACE as REAL

    data = rows(vocabulary=2048)

    def size(one: Any) -> int:
        return bytes_of(model, one, data, pace=REAL)

    for name, limit in MATCHED.items():
        one = arm(name)
        more = replace(one, method=replace(one.method, active=one.method.active + 1))
        assert size(one) <= size(arm(limit)) < size(more)
    least = replace(arm("LoRA, rank 8"), method=replace(arm("LoRA, rank 8").method, rank=1))
    assert size(arm("LISA")) < size(least)


def test_state_that_is_kept_is_priced_for_all_blocks(model):
    """Two moments of four bytes, and a float of four for the number of the step of each of eight tensors.

    There are nine: prices count the two vectors of a block as one.
    """
    from benchmarks.layers.arms import bytes_of
    from benchmarks.layers.study import PACE as REAL

    data = rows(vocabulary=2048)
    kept, dropped = (bytes_of(model, arm(n), data, pace=REAL) for n in ("LISA, reshuffled, state kept", "LISA"))
    block = 4 * 256**2 + 3 * 256 * 688 + 2 * 256
    assert kept - dropped == 14 * (8 * block + 8 * 4)


def test_chances_by_outliers_follow_the_weights_and_their_inputs():
    """A block whose weights have a few large entries has more of them than the others."""
    from benchmarks.layers.arms import outliers
    from benchmarks.layers.base import fresh

    made: Any = fresh(tiny())
    with torch.no_grad():
        made.model.layers[2].mlp.up_proj.weight[:, 0] *= 100.0
    shares = outliers(made, rows(vocabulary=300))
    assert len(shares) == 4
    assert max(range(4), key=shares.__getitem__) == 2


# ---- ablations


def test_updates_of_drawn_blocks_are_divided_by_their_chance():
    """Adam's first step is the rate whatever the gradient: 4 blocks, 2 drawn, so blocks take twice the head's."""
    from benchmarks.layers.ablations import corrected
    from benchmarks.layers.arms import lisa
    from benchmarks.layers.base import fresh

    from sparing.jobs.finetune.settings import Training
    from sparing.jobs.finetune.state import start, take_step_

    made: Any = fresh(tiny())
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    training = Training(method=lisa(), lr=1e-3, steps=4, batch=2, accumulate=1, schedule="constant")
    data = rows(vocabulary=300)
    with start(made, training, rows=data.rows, make_stepper=corrected) as state:
        take_step_(state, data)
        drawn = state.sampler.active
        assert [group["lr"] for group in state.optimizer.param_groups] == [1e-3] * len(state.optimizer.param_groups)
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in made.named_parameters()}
    assert moved["lm_head.weight"] == pytest.approx(1e-3, rel=1e-2)  # ε and the rounding of weights
    for block in range(4):
        expected = 2e-3 if block in drawn else 0.0
        assert moved[f"model.layers.{block}.self_attn.v_proj.weight"] == pytest.approx(expected, rel=1e-2)


def test_rounding_by_chance_keeps_the_mean_and_what_is_exact():
    from benchmarks.layers.ablations import by_chance

    generator = torch.Generator().manual_seed(0)
    exact = torch.tensor([1.0, -2.5, 0.0, 3.0e-5]).bfloat16()
    assert torch.equal(by_chance(exact.float(), generator), exact)
    value = 1.0 + 0.3 * 2**-7  # three tenths of the way to the next bfloat16
    found = by_chance(torch.full((40_000,), value), generator).double()
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    share = float((found > 1.0).double().mean())
    assert share == pytest.approx(0.3, abs=4 * math.sqrt(0.3 * 0.7 / 40_000))


def test_stochastic_rounding_steps_as_adamw_does_in_32_bits():
    """Of 32-bit weights nothing is rounded away but to bfloat16 at the end: within one unit of torch's AdamW."""
    from benchmarks.layers.ablations import Rounded

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, 8, generator=generator).bfloat16()
    ours, theirs = start.clone().requires_grad_(), start.float().requires_grad_()
    mine = Rounded([{"params": [ours], "weight_decay": 0.1}], lr=0.5)
    torches = torch.optim.AdamW([{"params": [theirs], "weight_decay": 0.1}], lr=0.5)
    ours.grad = torch.randn(64, 8, generator=generator).bfloat16()
    theirs.grad = ours.grad.float()
    mine.step()
    torches.step()
    unit = 2.0**-7 * theirs.abs().clamp_min(2.0**-20)
    assert bool(((ours.float() - theirs).abs() <= unit).all())


def test_other_draws_leave_the_rows_as_they_are():
    from benchmarks.layers.ablations import DRAWN
    from benchmarks.layers.base import fresh
    from benchmarks.layers.study import tuned

    data, losses = rows(vocabulary=300), {}
    for one in DRAWN[:3]:
        training = one.training(fresh(tiny()), data, rate=1e-2, seed=5, pace=PACE)
        losses[one.name] = tuned(fresh(tiny()), training, data, one)
    first = [found[0] for found in losses.values()]
    assert first == [first[0]] * 3  # the same rows, the same model
    assert len({found[-1] for found in losses.values()}) > 1
