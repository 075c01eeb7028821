"""Labels are moved apart by the least that suffices."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparing.report.labels import overlap, place, spread

_LABELS = st.lists(st.tuples(st.floats(0, 100), st.floats(1, 15)), min_size=1, max_size=8)


@given(_LABELS)
def test_labels_do_not_overlap_and_keep_their_order(labels: list[tuple[float, float]]) -> None:
    centres, heights = zip(*labels, strict=True)
    moved = spread(centres, heights, low=-1000, high=1000)
    order = sorted(range(len(centres)), key=lambda at: centres[at])
    for below, above in itertools.pairwise(order):
        gap = moved[above] - moved[below] - (heights[above] + heights[below]) / 2
        assert gap >= -1e-9  # rounding of sums of some hundreds


@given(_LABELS)
def test_no_other_arrangement_moves_them_less(labels: list[tuple[float, float]]) -> None:
    """Least squares: random arrangements that keep order and gaps cost at least as much."""
    centres, heights = zip(*labels, strict=True)
    moved = spread(centres, heights, low=-1000, high=1000)
    best = sum((a - b) ** 2 for a, b in zip(moved, centres, strict=True))
    order = sorted(range(len(centres)), key=lambda at: centres[at])
    rng = random.Random(0)
    for _ in range(20):
        other = list(moved)
        push = 0.0
        for at in order:  # growing pushes keep every gap
            push += rng.random() * 3
            other[at] += push
        shift = rng.uniform(-20, 5)
        cost = sum((other[at] + shift - centres[at]) ** 2 for at in order)
        assert cost >= best - 1e-6


def test_labels_with_room_stay_others_stay_in_the_room_and_too_many_pass_both_ends_equally() -> None:
    assert spread([10, 50, 90], [5, 5, 5], low=0, high=100) == pytest.approx([10, 50, 90])
    assert spread([99, 100], [10, 10], low=0, high=100) == pytest.approx([85, 95])
    assert spread([0, 1], [10, 10], low=0, high=100) == pytest.approx([5, 15])
    assert sorted(spread([5, 5, 5], [10, 10, 10], low=0, high=10)) == pytest.approx([-5, 5, 15])


def test_a_name_stands_right_of_its_point_when_it_may_and_left_at_the_right_edge() -> None:
    (box,), (left,) = (place([(x, 50)], [(20, 10)], room=(0, 0, 100, 100), gap=5) for x in (50, 95))
    assert box[0] > 55
    assert box[1] + box[3] == pytest.approx(100)
    assert left[2] < 90


def test_names_of_close_points_cover_neither_points_nor_names() -> None:
    anchors = [(50, 50), (58, 52), (54, 44), (46, 46)]
    boxes = place(anchors, [(30, 10)] * 4, room=(0, 0, 200, 100), gap=4)
    assert all(overlap(one, other) == 0 for one, other in itertools.combinations(boxes, 2))
    points = [(x - 3, y - 3, x + 3, y + 3) for x, y in anchors]
    assert all(overlap(box, point) == 0 for box in boxes for point in points)


def test_a_name_avoids_a_line() -> None:
    line = [(x, 48.0, x + 4, 52.0) for x in range(0, 100, 4)]
    (box,) = place([(50, 50)], [(20, 10)], room=(0, 0, 100, 100), gap=5, obstacles=line)
    assert all(overlap(box, piece) == 0 for piece in line)
