"""What low-bit wires send and hold, by hand, and the planner beside it; ``test_lowbit_engine`` counts the same."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sparing import sharding as sh
from sparing.errors import UserError
from sparing.sharding.planner.prediction import live_bytes
from sparing.sharding.planner.traffic import Traffic
from sparing.sharding.planner.workload import BucketSpec

MACHINE = sh.Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
WORK = sh.Workload(params=7e9, accumulate=10, param_bytes=2, grad_bytes=4, wire_bytes=4)
EIGHT = dataclasses.replace(WORK, slow=sh.LowBit())
BUCKETS = (BucketSpec(elements=997), BucketSpec(elements=500, trainable=False, block=1))


@pytest.mark.parametrize(
    ("plan", "sync", "refresh"), [("III", 2 * 254, 0), ("IIG", 254, 254), ("NNG", 254, 254), ("NNN", 2 * 254, 0)]
)
def test_a_bucket_by_hand(plan: str, sync: int, refresh: int) -> None:
    """997 elements on 2×2 ranks are padded to 1000; a quarter has 250 codes and ⌈250 / 64⌉ = 4 scales."""
    sent = Traffic.of_step(plan, (2, 2), BUCKETS, gather_bytes=4, reduce_bytes=4, slow=sh.LowBit())
    assert (sent.sync_grads[1], sent.sync_params[1]) == (sync, refresh)
    exact = Traffic.of_step(plan, (2, 2), BUCKETS, gather_bytes=4, reduce_bytes=4)
    assert sent.messages == exact.messages
    assert [sent.total[0], sent.params_forward] == [exact.total[0], exact.params_forward]  # inside a group all is exact


def test_four_bits_and_whole_parameters_by_hand() -> None:
    """125 bytes of codes for 250 elements; and 250 floats where parameters travel as they are."""
    slow = sh.LowBit(bits=4, block=100, params=32)
    sent = Traffic.of_step("IIG", (2, 2), BUCKETS, gather_bytes=4, reduce_bytes=4, slow=slow)
    assert (sent.sync_grads[1], sent.sync_params[1]) == (125 + 3, 1000)


@pytest.mark.parametrize("plan", [plan.name for plan in sh.effective() if plan.params != "G"])
@pytest.mark.parametrize("views", [False, True])
def test_residuals_and_lagging_parameters_by_hand(plan: str, views: bool) -> None:
    """One bucket trains; 2 × 3 ranks share it in 6, a group in 2; its masters are apart only where parameters lag."""
    exact = live_bytes(BUCKETS, (2, 3), plan, param_bytes=4, views=views)
    found = live_bytes(BUCKETS, (2, 3), plan, param_bytes=4, views=views, slow=sh.LowBit())
    padded = 6 * math.ceil(997 / 6)
    lags = plan[2] == "G"
    assert found.residuals == 4 * padded // 2
    assert found.published == lags * 4 * padded // 6
    assert found.master - exact.master == (lags and views) * 4 * padded // 6
    assert live_bytes(BUCKETS, (2, 3), plan, slow=sh.LowBit(feedback=False, params=32)).residuals == 0
    price, work = sh.Topology(groups=3, per_group=2, inter=1e9, intra=1e9), sh.Workload.of(BUCKETS, param_bytes=4)
    slow = sh.predict(dataclasses.replace(work, slow=sh.LowBit()), price, plan).slow
    # with parameters of 32 bits, the price of masters apart is in it
    assert slow == found.residuals + (2 if lags else 0) * 4 * padded // 6


def test_the_slow_wire_is_busy_for_a_quarter_of_the_time() -> None:
    """Four bytes become one and a scale for 64; parameters' two become as much."""
    exact, low = (sh.predict(work, MACHINE, "IIG") for work in (WORK, EIGHT))
    # α is zero here, so seconds are bytes
    ratio = low.seconds[1] / exact.seconds[1]
    assert ratio == pytest.approx(2 * (1 + 1 / 64) / (4 + 2), rel=1e-5)  # of two payloads, ends rounded up
    assert low.seconds[0] == exact.seconds[0]
    simulated = sh.simulate(EIGHT, MACHINE, "IIG"), sh.simulate(WORK, MACHINE, "IIG")
    assert simulated[0].busy[1] / simulated[1].busy[1] == pytest.approx(ratio)


def test_plans_that_changes_cannot_follow_are_not_chosen() -> None:
    verdicts = {verdict.plan.name: verdict for verdict in sh.choose(EIGHT, MACHINE).ranking}
    out = {name for name, verdict in verdicts.items() if not verdict.fits}
    assert out == {"GNG", "GIG", "GGG"}
    assert "nobody to add to" in verdicts["GGG"].why
    whole = dataclasses.replace(WORK, slow=sh.LowBit(params=32))
    assert all(verdict.fits for verdict in sh.choose(whole, MACHINE).ranking)
    with pytest.raises(UserError, match="low-bit wires cannot carry parameters at G"):
        sh.choose(EIGHT, MACHINE, plans=["GGG"])
