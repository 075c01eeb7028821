"""Vectors of named tensors: the laws of an inner product, and of signs that vote."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparing.errors import UserError
from sparing.vectors import axpy, dot, flatten, like, norm, sign_agreement

LAW = settings(max_examples=50)
SHAPES = {"a.weight": (2, 3), "a.bias": (3,), "scale": (), "none": (0, 4)}
ELEMENTS = sum(math.prod(shape) for shape in SHAPES.values())
# Zeros and equal magnitudes are common here; magnitudes stay where no product overflows or goes below 1e-300.
NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0]), st.floats(1e-9, 1e9), st.floats(-1e9, -1e-9))


def build(numbers: list[float], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    pieces = torch.tensor(numbers, dtype=dtype).split([math.prod(shape) for shape in SHAPES.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)}


VECTORS = st.lists(NUMBERS, min_size=ELEMENTS, max_size=ELEMENTS).map(build)


def close(got: Tensor, want: float, size: float) -> bool:
    """Equal up to rounding: a sum of n products errs by at most n ulps of the sum of their sizes; 4 n here."""
    return abs(got.item() - want) <= 4 * ELEMENTS * 2**-52 * size + 1e-300


@LAW
@given(VECTORS, VECTORS, VECTORS, NUMBERS)
def test_dot_is_bilinear_and_symmetric(x: dict, y: dict, z: dict, alpha: float) -> None:
    size = (abs(alpha) * norm(x) * norm(z) + norm(y) * norm(z)).item()
    assert close(dot(axpy(alpha, x, y), z), (alpha * dot(x, z) + dot(y, z)).item(), size)
    assert dot(x, y).item() == dot(y, x).item()


@LAW
@given(VECTORS, VECTORS)
def test_dot_is_fsum_of_the_products(x: dict, y: dict) -> None:
    products = [a * b for a, b in zip(flatten(x).tolist(), flatten(y).tolist(), strict=True)]
    assert close(dot(x, y), math.fsum(products), math.fsum(map(abs, products)))


@LAW
@given(VECTORS, VECTORS)
def test_cauchy_schwarz_and_triangle(x: dict, y: dict) -> None:
    slack = 1 + 4 * ELEMENTS * 2**-52
    assert abs(dot(x, y)) <= norm(x) * norm(y) * slack
    assert norm(axpy(1.0, x, y)) <= (norm(x) + norm(y)) * slack


@LAW
@given(VECTORS)
def test_norm_is_the_root_of_the_dot_with_itself(x: dict) -> None:
    assert close(norm(x), math.sqrt(dot(x, x)), norm(x).item())


@LAW
@given(VECTORS)
def test_flatten_and_like_undo_each_other(x: dict) -> None:
    flat = flatten(x)
    assert flat.shape == (ELEMENTS,)
    back = like(flat, x)
    assert list(back) == list(x)
    assert all(torch.equal(back[name], x[name]) for name in x)
    assert torch.equal(flatten(back), flat)


@LAW
@given(VECTORS, VECTORS, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_sign_agreement_is_symmetric_scale_free_and_a_share(x: dict, y: dict, c: float, d: float) -> None:
    zero = build([0.0] * ELEMENTS)
    share = sign_agreement(x, y)
    assert torch.equal(share.nan_to_num(-1), sign_agreement(y, x).nan_to_num(-1))
    assert torch.equal(share.nan_to_num(-1), sign_agreement(axpy(c, x, zero), axpy(d, y, zero)).nan_to_num(-1))
    votes = [(a > 0) == (b > 0) for a, b in zip(flatten(x).tolist(), flatten(y).tolist(), strict=True) if a and b]
    assert share.item() == sum(votes) / len(votes) if votes else share.isnan()


@LAW
@given(VECTORS)
def test_sign_agreement_with_itself_is_one_and_with_its_opposite_zero(x: dict) -> None:
    if any(value.any() for value in x.values()):
        assert sign_agreement(x, x) == 1
        assert sign_agreement(x, {name: -value for name, value in x.items()}) == 0


def test_zero_votes_for_nobody_and_nan_agrees_with_nothing() -> None:
    a = {"w": torch.tensor([0.0, -0.0, 1.0, math.nan, 2.0])}
    b = {"w": torch.tensor([0.0, 0.0, 0.0, math.nan, 1.0])}
    assert sign_agreement(a, b) == 0.5
    assert sign_agreement({}, {}).isnan()


def test_reductions_accumulate_in_float64() -> None:
    """2^24 + 1 is lost in float32, and 257 ones in bfloat16."""
    x = {"big": torch.tensor([2.0**12], dtype=torch.float32), "one": torch.ones(257, dtype=torch.bfloat16)}
    assert dot(x, x).dtype == norm(x).dtype == torch.float64
    assert dot(x, x).item() == 2**24 + 257
    assert norm(x).item() == math.sqrt(2**24 + 257)


def test_order_of_names_is_of_no_matter_and_dtypes_may_differ() -> None:
    x = build([float(i) for i in range(ELEMENTS)])
    y = {name: x[name].float() for name in reversed(x)}
    assert dot(x, y) == dot(x, x)
    assert sign_agreement(x, y) == 1
    assert list(axpy(2.0, x, y)) == list(y)


def test_gradients_flow_and_vanish_at_zero() -> None:
    x = {"w": torch.zeros(3, dtype=torch.float64, requires_grad=True)}
    norm(x).backward()
    assert x["w"].grad is not None
    assert not x["w"].grad.any()
    y = {"w": torch.arange(3.0, dtype=torch.float64, requires_grad=True)}
    (flat,) = torch.autograd.grad(dot(y, like(flatten(y), y)), [y["w"]])
    assert torch.equal(flat, 2 * y["w"])


def test_like_takes_dtype_of_the_template_and_empty_vectors_are_zero() -> None:
    assert (
        like(torch.ones(2, dtype=torch.float64), {"w": torch.zeros(2, dtype=torch.bfloat16)})["w"].dtype
        == torch.bfloat16
    )
    assert dot({}, {}) == norm({}) == 0
    assert like(flatten({}), {}) == {}


ONE = {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dot(ONE, {"v": torch.ones(2)}), "names in only one"),
        (lambda: dot(ONE, {"w": torch.ones(2, 1)}), "shapes"),
        (lambda: axpy(1.0, ONE, {}), "names in only one"),
        (lambda: sign_agreement(ONE, {"w": torch.ones(1)}), "shapes"),
        (lambda: norm({"w": torch.ones(2, dtype=torch.int64)}), "int64"),
        (lambda: dot(ONE, {"w": torch.ones(2, dtype=torch.bool)}), "bool"),
        (lambda: flatten({"w": torch.ones(2, dtype=torch.complex64)}), "complex64"),
        (lambda: like(torch.ones(3), ONE), "2 elements"),
        (lambda: like(torch.ones(1, 2), ONE), "2 elements"),
        (lambda: like(torch.ones(2, dtype=torch.int32), ONE), "int32"),
    ],
)
def test_what_does_not_fit_is_refused(call, said: str) -> None:
    with pytest.raises(UserError, match=said):
        call()
