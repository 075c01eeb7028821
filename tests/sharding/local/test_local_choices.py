"""Prices of local steps: a group's own step, and a share of the outer one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sparing.errors import UserError
from sparing.sharding import LocalSteps, LowBit, Topology, Workload, predict, simulate
from sparing.sharding.planner.local_choices import local_choices, local_price

SLOW = Topology(groups=4, per_group=8, inter="10Gbps", intra="2000Gbps", latency_inter=1e-3)
WORK = Workload(params=64 * 32 * 1000, accumulate=2, blocks=32, seconds_forward=1e-3, grad_bytes=4, wire_bytes=4)


def test_an_outer_step_sends_twice_a_ranks_share_but_its_own_part() -> None:
    """An all-reduce over four groups of Ψ/8 elements of 4 bytes, in 2 · 3 messages for each of 32 blocks."""
    price = local_price(WORK, SLOW, "III", LocalSteps(every=8))
    sent = 2 * 3 / 4 * WORK.params / 8 * 4
    assert price.leaving == 8 * sent / 8  # eight ranks, an eighth in each step
    assert price.outer_seconds == pytest.approx(32 * 6 * 1e-3 + sent / 1.25e9, rel=1e-12)


def test_a_step_is_that_of_one_group_and_its_share_of_an_outer_step() -> None:
    """One group of the same padding: 2,048,000 elements are a multiple of 32 in every block."""
    alone = simulate(WORK, Topology(groups=1, per_group=8, inter="10Gbps", intra="2000Gbps"), "NII").seconds
    for every in (1, 8, 1000):
        price = local_price(WORK, SLOW, "NII", LocalSteps(every=every))
        assert price.seconds == pytest.approx(alone + price.outer_seconds / every, rel=1e-12)


def test_what_the_engine_adds_to_passes_and_steps_counts_as_on_the_other_ways() -> None:
    """As in a step of one group by itself, on a topology that was probed on processors."""
    costs: dict[str, Any] = {"per_pass": 1e-3, "per_step": 0.5, "crowding": 1.0, "overlap": 0.5}
    probed, group = replace(SLOW, **costs), Topology(groups=1, per_group=8, inter="10Gbps", intra="2000Gbps", **costs)
    price = local_price(WORK, probed, "NII", LocalSteps(every=8))
    assert price.seconds - price.outer_seconds / 8 == pytest.approx(simulate(WORK, group, "NII").seconds, rel=1e-12)
    assert price.seconds > local_price(WORK, SLOW, "NII", LocalSteps(every=8)).seconds + 0.5


def test_anchor_momentum_and_residual_are_held_besides() -> None:
    plain = predict(WORK, SLOW, "III").memory
    share = 4 * WORK.params // 8
    assert local_price(WORK, SLOW, "III", LocalSteps(every=8)).memory == plain + 2 * share
    assert local_price(WORK, SLOW, "III", LocalSteps(every=8, wire=LowBit(bits=8))).memory == plain + 3 * share


def test_the_choice_keeps_to_the_memory_and_sends_less_the_rarer_groups_meet() -> None:
    ways = [LocalSteps(every=every, wire=wire) for wire in (None, LowBit(bits=8)) for every in (1, 8, 32)]
    prices = local_choices(WORK, SLOW, ways)
    seconds = [price.seconds if price else math.nan for price in prices]
    assert seconds[:3] == sorted(seconds[:3], reverse=True)
    assert all(few < exact for few, exact in zip(seconds[3:], seconds[:3], strict=True))
    least = min(local_price(WORK, SLOW, plan, ways[0]).memory for plan in ("NNN", "NNI", "NII", "INI", "III"))
    (tight,) = local_choices(WORK, SLOW, ways[:1], memory=least)
    assert tight is not None
    assert tight.plan.name == "III"
    assert local_choices(WORK, SLOW, ways[:1], memory=least - 1) == (None,)


def test_plans_that_cut_over_all_are_refused() -> None:
    with pytest.raises(UserError, match="none could take a step alone"):
        local_price(WORK, SLOW, "IIG", LocalSteps(every=8))
