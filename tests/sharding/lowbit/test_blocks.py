"""Small integers with a shared power of two: error, exactness and length, against one number at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oracles import lowbit
from sparing.sharding.lowbit.blocks import PIECE, Blocks

FORMATS = [Blocks(bits=bits, block=block) for bits in (8, 4) for block in (2, 64, 256)]
LENGTHS = [1, 2, 3, 63, 64, 65, 127, 128, 129, 600]
MATRIX = pytest.mark.parametrize("form", FORMATS, ids=str)


def numbers(length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers whose sizes differ by eight powers of ten, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-4, 5, (length,), generator=generator)
    x[torch.rand(length, generator=generator) < 0.1] = 0
    return x.to(dtype)


def there_and_back(form: Blocks, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a payload decodes to, and what was left."""
    left, payload = x.clone(), torch.empty(form.nbytes(x.numel()), dtype=torch.uint8)
    form.encode_(left, payload)
    return form.decoded(payload, x.numel()), left


@MATRIX
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_payload_decodes_to_the_nearest_multiples_of_the_step(form: Blocks, length: int, dtype: torch.dtype) -> None:
    """One number at a time, in Python's float64: multiples of powers of two are exact, so equality is to the bit."""
    x = numbers(length, dtype)
    found, left = there_and_back(form, x)
    for at in range(0, length, form.block):
        block = x[at : at + form.block].double().tolist()
        step = lowbit.step_of(block, form.bits)
        assert found[at : at + form.block].tolist() == [round(value / step) * step for value in block]
        # half a step: the error of rounding to an integer, and the largest never lies beyond the last code
        assert left[at : at + form.block].abs().max() <= step / 2


@MATRIX
def test_what_is_left_is_exact(form: Blocks) -> None:
    """Decoded plus left is the number, in the number's own format: what feedback adds up, nothing else loses."""
    for dtype in (torch.float32, torch.float64):
        x = numbers(1000, dtype)
        found, left = there_and_back(form, x)
        assert torch.equal(found.double() + left.double(), x.double())
        assert torch.equal(found.to(dtype) + left, x)


@MATRIX
def test_numbers_on_the_grid_travel_unchanged(form: Blocks) -> None:
    most = 2 ** (form.bits - 1) - 1
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(-most, most + 1, (1001,), generator=generator).float()
    for scale in (1.0, 2.0**-70, 2.0**90):
        found, left = there_and_back(form, integers * scale)
        assert torch.equal(found, integers * scale)
        assert not left.any()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_number_never_overflows_its_code(bits: int) -> None:
    """Around every fraction at which the step doubles, from the smallest normal number to the largest."""
    form, edge = Blocks(bits=bits, block=2), 1 - 2.0**-bits
    for exponent in (-100, -1, 0, 1, 60, 127):
        for near in (0.5, math.nextafter(edge, 0), edge, 1 - 2.0**-24):
            x = torch.tensor([near * 2.0**exponent, 0.0]).float()
            found, left = there_and_back(form, x)
            assert torch.equal(found + left, x)
            assert left.abs().max() <= found.abs().max() / (2 ** (bits - 1) - 1)


def test_tiny_numbers_stay_owed() -> None:
    """Below half of the smallest step, 2^-126, nothing is sent and nothing lost."""
    x = torch.tensor([2.0**-127, -(2.0**-149), 0.0, 0.0])
    found, left = there_and_back(Blocks(bits=8, block=4), x)
    assert torch.equal(left, x)
    assert not found.any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_that_is_not_finite_arrives_so_and_alone(bits: int, bad: float) -> None:
    x = numbers(256)
    x[70] = bad
    found, _ = there_and_back(Blocks(bits=bits, block=64), x)
    assert not found[64:128].isfinite().any()
    assert found[:64].isfinite().all()
    assert found[128:].isfinite().all()


def test_numbers_beyond_float32_are_not_finite() -> None:
    x = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert not there_and_back(Blocks(bits=8, block=2), x)[0].isfinite().any()


@MATRIX
@pytest.mark.parametrize("length", LENGTHS)
def test_length_is_codes_and_a_byte_for_each_block(form: Blocks, length: int) -> None:
    assert form.nbytes(length) == math.ceil(length * form.bits / 8) + math.ceil(length / form.block)


def test_pieces_together_are_as_long_as_the_whole_and_decode_alike() -> None:
    form, x = Blocks(bits=4, block=62), numbers(2 * PIECE + 1001)
    whole, _ = there_and_back(form, x)
    left, payload = x.clone(), torch.zeros(form.nbytes(x.numel()), dtype=torch.uint8)
    pieces = list(form.pieces(left, payload=payload))
    assert sum(part.numel() for part, _ in pieces) == x.numel()
    assert sum(piece.numel() for _, piece in pieces) == payload.numel()
    for part, piece in pieces:
        form.encode_(part, piece)
    assert torch.equal(torch.cat([form.decoded(piece, part.numel()) for part, piece in pieces]), whole)
