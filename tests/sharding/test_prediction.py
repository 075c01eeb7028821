"""Memory of every plan in the paper's tables, what fits, and live bytes counted slice by slice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparing.sharding.layout import Layout, coords_of
from sparing.sharding.levels import Plan, effective
from sparing.sharding.planner.config import BucketSpec, Link, Topology, Workload
from sparing.sharding.planner.prediction import live_bytes, predict, transient_bytes

PAPER = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")

GIGABYTES = {
    (
        7e9,
        1,
    ): "NNI 38.50 NII 26.25 INI 26.25 III 14.00 IIG 6.12 NIG 18.38 ING 18.38 NNG 30.6 NNN 112 IGG 4.81 NGG 17.06 "
    "GIG 4.81 GGG 3.50",
    (65e9, 1): "NNI 357.5 NII 243.8 INI 243.8 IIG 56.9 III 130.0 NIG 170.6 ING 170.6 IGG 44.7 NGG 158.4 GIG 44.7 "
    "GNG 158.4 GGG 32.5 NNG 284 NNN 1040",
    (
        65e9,
        1 / 16,
    ): "NNI 144.2 NII 137.1 NIG 132.5 NGG 131.8 INI 30.5 IIG 18.8 III 23.4 ING 25.9 IGG 18.0 GIG 6.6 GNG 13.7 GGG 5.8",
    (65e9, 0.003): "NNI 130.7 NII 130.3 NIG 130.1 NGG 130.1 INI 16.93 IIG 16.37 III 16.59 ING 16.71 IGG 16.34 GIG 4.18 "
    "GNG 4.53 GGG 4.15",
    (7e9, 1 / 16): "NNI 15.5 NII 14.8 NIG 14.3 NNG 15.0 NNN 20.1 NGG 14.2 INI 3.28 III 2.52 IIG 2.02 ING 2.79 IGG 1.94 "
    "GIG .71 GNG 1.48 GGG .63",
}
"""Parameters and trainable share -> bytes each rank holds throughout, in 10⁹, to the digits that are known."""

ROWS = [
    (*model, *pair)
    for model, row in GIGABYTES.items()
    for pair in zip(row.split()[::2], row.split()[1::2], strict=True)
]


@pytest.mark.parametrize(("params", "trainable", "name", "written"), ROWS)
def test_tables(params: float, trainable: float, name: str, written: str):
    half = 0.5 * 10 ** -len(written.partition(".")[2])
    found = predict(Workload(params=params, trainable=trainable), PAPER, name).static / 1e9
    assert found == pytest.approx(float(written), abs=half * 1.001)


def test_what_fits_65b_into_80_gb():
    """Only ZeRO-3, IGG and IIG of those the paper ran; GIG, which it did not run, would fit too."""
    fits = {p.name for p in effective() if predict(Workload(params=65e9), PAPER, p).memory <= 80e9}
    assert fits == {"GGG", "IGG", "IIG", "GIG"}


BUCKETS = st.lists(
    st.builds(BucketSpec, elements=st.integers(1, 99), trainable=st.booleans(), block=st.integers(0, 3)),
    min_size=1,
    max_size=5,
)


@given(BUCKETS, st.sampled_from(effective()), st.tuples(st.integers(1, 4), st.integers(1, 4)), st.booleans())
def test_live_bytes_slice_by_slice(buckets, plan: Plan, sizes, views: bool):
    p, g, os = plan.levels()
    rank = coords_of(sizes[0] * sizes[1] - 1, sizes)
    params = grads = state = 0
    for spec in buckets:
        layout = Layout(sizes, spec.elements)
        params += layout.slice(p, rank)[1]
        grads += layout.slice(g, rank)[1] if spec.trainable else 0
        state += layout.slice(os, rank)[1] if spec.trainable else 0
    live = live_bytes(buckets, sizes, plan, param_bytes=2, grad_bytes=4, master_bytes=4, moments=2, views=views)
    assert (live.params, live.grads, live.moments) == (2 * params, 4 * grads, 8 * state)
    assert live.master == (0 if views else 4 * state)
    assert live.total == live.params + live.grads + live.master + live.moments


def test_live_is_static():
    """Twelve bytes of state are a float32 master and two moments."""
    work = Workload(params=10_001, trainable=1 / 3, grad_bytes=4)
    for plan in effective():
        price, live = predict(work, PAPER, plan), live_bytes(work.buckets(), PAPER.sizes, plan)
        assert price.static == live.total
        assert price.optimizer == live.master + live.moments


def test_whole_tensors_for_a_moment():
    """Roots, and the largest 1 + prefetch blocks, frozen parts too; gradients of roots and of the largest others."""
    specs = [
        BucketSpec(elements=64, root=True, block=-1),
        BucketSpec(elements=16, block=0),
        BucketSpec(elements=32, block=0, trainable=False),
        BucketSpec(elements=40, block=1),
        BucketSpec(elements=24, block=2),
    ]
    work = Workload.of(specs, prefetch=1, grad_buffers=1, param_bytes=2, wire_bytes=4)
    assert transient_bytes(work, (2, 2), "NNN") == transient_bytes(work, (2, 2), "NNG") == 0
    assert transient_bytes(work, (2, 2), "INI") == 2 * (64 + 48 + 40)
    assert transient_bytes(work, (2, 2), "NIG") == 4 * (64 + 40)
    assert transient_bytes(work, (2, 2), "IIG") == 2 * (64 + 48 + 40) + 4 * (64 + 40)
    two = Workload.of(specs, prefetch=2, grad_buffers=2, param_bytes=2, wire_bytes=4)
    assert transient_bytes(two, (2, 2), "GGG") == 2 * (64 + 48 + 40 + 24) + 4 * (64 + 40 + 24)


@pytest.mark.parametrize("plan", effective(), ids=str)
def test_slices_that_are_whole_need_no_copy(plan: Plan):
    """With one rank on each axis that a level cuts, nothing is cut."""
    assert transient_bytes(Workload(params=99), (1, 1), plan) == 0
    cut_outside = transient_bytes(Workload(params=99, blocks=1), (1, 3), plan)
    assert cut_outside == 2 * 99 * ((plan.params == "G") + (plan.grads == "G"))


def test_three_tiers():
    """Pairs, nodes, racks: thirty plans, each between the coarsest and the finest in memory."""
    rack = Topology(axes=[Link(name=name, size=s, rate=1e9) for name, s in (("pair", 2), ("node", 4), ("rack", 4))])
    held = {p.name: predict(Workload(params=3.2e9), rack, p).static for p in effective(3)}
    assert len(held) == 30
    assert held["NNN"] == max(held.values()) == 16 * 3.2e9
    assert held["GGG"] == min(held.values()) == 16 * 1e8
    assert held["MMM"] == 16 * 4e8


def test_a_price_adds_up():
    price = predict(Workload(params=1000, activation_bytes=77), PAPER, "IIG")
    assert price.static == price.params + price.grads + price.optimizer
    assert price.memory == price.static + price.transient + 77
