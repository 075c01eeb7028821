"""The products that studies of losses take from oneDNN."""

from __future__ import annotations

import pytest
import torch
from benchmarks import onednn


@pytest.mark.parametrize("turned_left", [False, True])
@pytest.mark.parametrize("turned_right", [False, True])
@pytest.mark.parametrize("taken", [False, True])
def test_products_are_those_in_double_precision(monkeypatch, turned_left, turned_right, taken):
    """To the rounding of sums of 257 float32 terms; small, strided and double ones take the way they had."""
    monkeypatch.setitem(onednn._taken, "oneDNN", taken)
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(130, 257, generator=draw), torch.randn(257, 333, generator=draw)
    left = a.t().contiguous().t() if turned_left else a
    right = b.t().contiguous().t() if turned_right else b
    want = a.double() @ b.double()
    for one, other, error in ((left, right, 1e-6), (left[::2], right, 1e-6), (a.double(), b.double(), 1e-14)):
        exact = want[::2] if one.shape[0] == 65 else want
        assert (onednn._mm(one, other) - exact).norm() <= error * exact.norm()
    assert onednn._mm(a[:2, :3], b[:3, :4]).shape == (2, 4)
