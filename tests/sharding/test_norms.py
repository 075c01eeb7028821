"""Every slice counts once, whatever its replicas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparing.errors import UserError
from sparing.sharding.engine.norms import ORDERS, ROW, Clip, owners, power, square, whole_norms
from sparing.sharding.layout import Layout, coords_of

SIZES = [(1,), (3,), (2, 2), (3, 2), (1, 3), (2, 2, 2)]


@pytest.mark.parametrize("sizes", SIZES)
def test_owners_cover_a_tensor_once(sizes: tuple[int, ...]) -> None:
    layout = Layout(sizes=sizes, length=24)
    for level in range(len(sizes) + 1):
        covered = [0] * layout.padded
        for rank in owners(sizes, level):
            offset, length = layout.slice(level, coords_of(rank, sizes))
            for at in range(offset, offset + length):
                covered[at] += 1
        assert set(covered) == {1}


def mesh_of(sizes: tuple[int, ...], rows: torch.Tensor) -> Any:
    return SimpleNamespace(
        sizes=sizes, gather_scalars_async=lambda _: lambda: rows, beside=(), tensor=None, stages=None
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_norms_of_slices_are_those_of_the_whole(sizes: tuple[int, ...], order: float) -> None:
    """One tensor at each level, against torch's norm of it and of all of them."""
    generator = torch.Generator().manual_seed(1)
    layout = Layout(sizes=sizes, length=24)
    tensors = torch.randn(len(sizes) + 1, layout.padded, generator=generator, dtype=torch.float64)
    rows = torch.zeros(layout.world, len(sizes) + 1, dtype=torch.float64)
    for rank in range(layout.world):
        for level, tensor in enumerate(tensors):
            offset, length = layout.slice(level, coords_of(rank, sizes))
            rows[rank, level] = power(tensor[offset : offset + length], order)
    found = whole_norms(mesh_of(sizes, rows), [(level, 0.0) for level in range(len(sizes) + 1)], order)()
    # rounding of a hundred additions in float64
    assert found.whole == pytest.approx(torch.linalg.vector_norm(tensors, order).item(), rel=1e-14)
    parts = [torch.linalg.vector_norm(tensor, order).item() for tensor in tensors]
    assert found.parts == pytest.approx(parts, rel=1e-14)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_slice_spoils_its_own_norm_and_that_of_the_whole(bad: float, order: float) -> None:
    rows = torch.ones(4, 3, dtype=torch.float64)
    rows[3, 0] = bad  # a replica that no sum reads
    found = whole_norms(mesh_of((2, 2), rows), [(0, 1.0), (1, 1.0), (2, 1.0)], order)()
    assert math.isnan(found.whole)
    assert math.isnan(found.parts[0])
    assert not any(map(math.isnan, found.parts[1:]))


def test_nothing_that_trains_has_a_norm_of_zero() -> None:
    assert whole_norms(mesh_of((2, 2), torch.ones(4, 0)), [], 2.0)().whole == 0.0


@pytest.mark.parametrize("order", ORDERS)
def test_an_empty_slice_adds_nothing(order: float) -> None:
    assert power(torch.zeros(0), order) == 0.0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("each", [False, True])
def test_factors_are_those_of_torch(order: float, each: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(n, generator=generator, dtype=torch.float64) * scale for n, scale in ((5, 1.0), (9, 0.01))]
    parts = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for part, grad in zip(parts, grads, strict=True):
        part.grad = grad.clone()
    for group in [[part] for part in parts] if each else [parts]:
        torch.nn.utils.clip_grad_norm_(group, 0.3, norm_type=order)
    clip, rows = Clip(0.3, order, each), torch.tensor([[power(grad, order) for grad in grads]], dtype=torch.float64)
    whole_norms(mesh_of((1,), rows), [(0, 0.0), (0, 0.0)], order)().clip_(grads, clip)
    # rounding of float64
    assert all(torch.allclose(grad, part.grad, rtol=1e-12, atol=0) for grad, part in zip(grads, parts, strict=True))


@pytest.mark.parametrize(("given", "words"), [((0.0,), "clip: got 0.0"), ((1.0, 3.0), "norm_type: got 3.0")])
def test_what_is_no_clip_is_refused(given: tuple[float, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Clip(*given)


@pytest.mark.parametrize("length", [0, 1, ROW, ROW + 1, 5 * ROW + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_squares_are_those_of_exact_sums(length: int, dtype: torch.dtype) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64).to(dtype)
    # single precision within rows: 2⁻²⁴ a term at worst
    assert square(x) == pytest.approx(math.fsum(value * value for value in x.tolist()), rel=3e-7)


def test_squares_that_leave_single_precision_are_finite_in_double() -> None:
    assert square(torch.full((2 * ROW,), 1e30)) == pytest.approx(2 * ROW * 1e60, rel=1e-6)
    assert math.isnan(square(torch.full((2 * ROW,), math.nan)))
