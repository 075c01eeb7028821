"""The assumed buckets add up to the model; shares become counts; nonsense is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.sharding.planner.workload import BucketSpec, Workload


@given(st.integers(1, 10**6), st.floats(0.001, 1), st.integers(1, 40), st.floats(0, 0.9))
def test_buckets_add_up(params: int, share: float, blocks: int, root: float):
    if round(share * params) < 1:
        return
    work = Workload(params=params, trainable=share, blocks=blocks, root_share=root)
    buckets = work.buckets()
    assert sum(spec.elements for spec in buckets) == params
    assert sum(spec.elements for spec in buckets if spec.trainable) == round(share * params)
    assert all(spec.elements > 0 for spec in buckets)
    body = {spec.block for spec in buckets if not spec.root}
    sizes = [sum(spec.elements for spec in buckets if spec.block == at and not spec.root) for at in body]
    assert len(sizes) <= blocks
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_a_share_is_a_count():
    assert Workload(params=65e9, trainable=65e9).trainable == 65 * 10**9
    assert Workload(params=65e9).trainable == 65 * 10**9
    assert Workload(params=65e9, trainable=1 / 16).trainable == 4_062_500_000
    assert Workload(params=65e9, trainable=3 / 1000).trainable == 195_000_000


def test_of_counts_from_buckets():
    specs = (
        BucketSpec(elements=5, root=True, block=-1),
        BucketSpec(elements=7, block=0),
        BucketSpec(elements=11, trainable=False, block=1),
    )
    work = Workload.of(specs, accumulate=3)
    assert (work.params, work.trainable, work.blocks, work.accumulate) == (23, 12, 2, 3)
    assert work.buckets() == specs


def test_buckets_and_counts_must_agree():
    specs = (BucketSpec(elements=5), BucketSpec(elements=7, trainable=False))
    assert Workload(params=12, trainable=5, specs=specs).buckets() == specs
    with pytest.raises(UserError, match="the buckets have 12 and 5"):
        Workload(params=12, specs=specs)


def test_arithmetic_of_a_step():
    work = Workload(params=10, accumulate=3, seconds_forward=2.0)
    assert (work.backward, work.compute) == (4.0, 18.0)
    again = Workload(params=10, accumulate=3, seconds_forward=2.0, seconds_backward=5.0, checkpointing=True)
    assert (again.backward, again.compute) == (7.0, 27.0)
    assert Workload(params=10).compute == 0.0


def test_checkpointing_keeps_one_block():
    options = {"params": 10, "blocks": 4, "activation_bytes": 400, "boundary_bytes": 16}
    assert Workload(**options).activations == 400
    assert Workload(**options, checkpointing=True).activations == 116


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("params", 0),
        ("params", float("nan")),
        ("trainable", 0),
        ("trainable", 101),
        ("trainable", -0.5),
        ("accumulate", 0),
        ("blocks", 0),
        ("prefetch", -1),
        ("grad_buffers", 0),
        ("seconds_forward", -1.0),
        ("seconds_backward", float("inf")),
        ("root_share", 1.0),
        ("param_bytes", 0),
    ],
)
def test_nonsense_is_named(name: str, value: float):
    with pytest.raises(UserError, match=f"^{name}: got"):
        Workload(**({"params": 100} | {name: value}))
