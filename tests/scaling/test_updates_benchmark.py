"""The benchmark of updates counts bytes: of what must be there at least, and the same every time."""

from __future__ import annotations

from benchmarks import scaling_updates as updates


def test_peaks_are_counted_and_the_same_every_time():
    (row, _) = updates.rows((64,), ("1/4",), depth=3)
    assert row == next(updates.rows((64,), ("1/4",), depth=3))
    assert row["share"] == row["csr"] / row["dense"] < 1
    weights, live = 3 * 64 * 64, 3 * 64 * 16
    # weight, mask and two moments of masked dense; value, two moments and an int32 column of a live weight
    assert row["dense"] > weights * (4 + 1 + 8)
    assert row["csr"] > live * (4 + 8 + 4)


def test_an_update_is_within_what_is_measured():
    """Without one the peak is less: RigL reads the gradient of all places."""
    with_update = updates.peak("rigl", "dense", 64, 0.25, depth=3)
    assert with_update > updates.peak("set", "dense", 64, 0.25, depth=3)
