"""Where labels go so that none covers another: plain geometry, no drawing."""

from __future__ import annotations

from collections.abc import Sequence

Box = tuple[float, float, float, float]  # left, bottom, right, top


def spread(centres: Sequence[float], heights: Sequence[float], *, low: float, high: float) -> list[float]:
    """Move labels apart along a line, each as little as possible (least squares), in their order.

    Labels that would overlap share a block; blocks that meet are merged, which is the pool-adjacent-violators rule for
    the equivalent monotone regression.

    Example:
        >>> spread([5.0, 5.0, 20.0], [2, 2, 2], low=0, high=30)
        [4.0, 6.0, 20.0]
    """
    order = sorted(range(len(centres)), key=lambda at: centres[at])
    tops, offset = [], 0.0
    for at in order:  # the offset of each centre inside one gapless stack
        tops.append(offset + heights[at] / 2)
        offset += heights[at]
    wanted = [centres[at] - top for at, top in zip(order, tops, strict=True)]
    floor, ceiling = low, high - offset
    if ceiling < floor:
        floor = ceiling = (floor + ceiling) / 2
    placed = [0.0] * len(centres)
    for at, top, start in zip(order, tops, _monotone(wanted), strict=True):
        placed[at] = min(max(start, floor), ceiling) + top
    return placed


def _monotone(values: Sequence[float]) -> list[float]:
    """Closest rising sequence, in least squares."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, number = blocks.pop()
            mean, count = (mean * count + before * number) / (count + number), count + number
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def place(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    *,
    room: Box,
    gap: float,
    obstacles: Sequence[Box] = (),
) -> list[Box]:
    """Choose a place beside each point so that labels cover neither points nor each other, as far as there is room."""
    points = [*obstacles, *((x - gap, y - gap, x + gap, y + gap) for x, y in anchors)]
    taken: list[Box] = []
    for (x, y), size in zip(anchors, sizes, strict=True):
        costs: dict[Box, float] = {}
        for distance, price in ((1.3, 0.0), (2.6, size[0] * size[1] / 50)):
            for box in _around(x, y, size, gap * distance):
                outside = (box[2] - box[0]) * (box[3] - box[1]) - overlap(box, room)
                covered = sum(overlap(box, other) for other in (*points, *taken))
                costs.setdefault(box, price + (4 * outside + covered))
        taken.append(min(costs, key=costs.__getitem__))
    return taken


def _around(x: float, y: float, size: tuple[float, float], gap: float) -> list[Box]:
    width, height = size
    boxes = []
    for right, up in [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)]:
        left = x + right * gap - width * (1 - right) / 2
        bottom = y + up * gap - height * (1 - up) / 2
        boxes.append((left, bottom, left + width, bottom + height))
    return boxes


def overlap(one: Box, other: Box) -> float:
    """Area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)
