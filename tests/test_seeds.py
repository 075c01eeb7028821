"""Streams: stable everywhere, different for every label, and as good as the generator under them."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.seeds import number, stream

LAW = settings(max_examples=50)
LABELS = st.one_of(st.integers(), st.text(max_size=4))
PATHS = st.tuples(st.integers(), st.lists(LABELS, max_size=3).map(tuple))


def first(generator: torch.Generator, count: int = 4) -> list[int]:
    """The first numbers of a generator, 48 bits each: four of them collide by chance with odds of 2^-192."""
    return torch.randint(2**48, (count,), generator=generator).tolist()


@pytest.mark.parametrize(
    ("path", "golden"),
    [
        ((0,), [28, 1, 35, 33]),
        ((0, "draw", 3), [52, 82, 10, 92]),
        ((-1, "é", 2**70), [71, 8, 88, 5]),
    ],
)
def test_numbers_are_those_of_the_first_release(path: tuple, golden: list[int]) -> None:
    assert torch.randint(100, (4,), generator=stream(*path)).tolist() == golden


@pytest.mark.processes
def test_another_process_draws_the_same_whatever_its_hash_seed() -> None:
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    code = (
        "import torch; from sparing.seeds import number, stream;"
        "print(torch.randint(2**48, (4,), generator=stream(7, 'rank', 1)).tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(first(stream(7, "rank", 1)))


def test_state_is_the_hash_and_numbers_are_the_mersenne_twister_s() -> None:
    """Python's own Mersenne Twister, started from SHAKE-256 of the encoding spelt out here, gives torch's numbers."""
    digest = hashlib.shake_256(b"sparing.stream" + b"i1:5" + b"s5:layer" + b"i2:12").digest(8 + 4 * 624)
    twin = random.Random()
    twin.setstate((3, (*struct.unpack("<624I", digest[8:]), 624), None))
    expected = [(twin.getrandbits(32) % 2**24) / 2**24 for _ in range(2000)]  # how torch makes a float32 of 32 bits

    generator = stream(5, "layer", 12)

    assert generator.initial_seed() == int.from_bytes(digest[:8], "little")
    assert torch.rand(2000, generator=generator, dtype=torch.float32).tolist() == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, "1"), (0, 1)),
        ((0, "ab", "c"), (0, "a", "bc")),
        ((0, "a"), (0, "a", "")),
        ((0, 1), (0, 1, 1)),
        ((1, 0), (0, 1)),
        ((1,), (-1,)),
        ((0, "i1:0"), (0, 0)),
        ((0,), (2**32,)),  # one and the same for torch.Generator.manual_seed
    ],
)
def test_look_alike_labels_give_different_streams(one: tuple, other: tuple) -> None:
    assert first(stream(*one)) != first(stream(*other))


@LAW
@given(PATHS, PATHS)
def test_streams_are_equal_exactly_when_their_labels_are(one: tuple, other: tuple) -> None:
    (a, left), (b, right) = one, other
    assert (first(stream(a, *left)) == first(stream(b, *right))) == (one == other)


def test_more_than_32_bits_of_state_tell_streams_apart() -> None:
    """Words 1 and 2 of the state as one 64-bit number: 10,000 of them collide by chance with odds of 3e-12."""
    states = {bytes(stream(0, "direction", index).get_state()[32:48].numpy()) for index in range(10_000)}
    assert len(states) == 10_000


def test_global_generator_is_neither_read_nor_moved() -> None:
    before = torch.get_rng_state()
    numbers = first(stream(3))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert first(stream(3)) == numbers


def test_uniform_moments_and_independence_of_neighbours() -> None:
    count = 20_000
    a, b = (torch.rand(count, generator=stream(0, "check", i), dtype=torch.float64) - 0.5 for i in (1, 2))
    # Mean and correlation have standard errors (1/12/n)^½ and n^-½ · 1/12: five of each.
    assert abs(a.mean()) < 5 * (1 / 12 / count) ** 0.5
    assert abs((a * b).mean()) < 5 / 12 / count**0.5


@pytest.mark.parametrize("path", [(1.0,), (True,), ("1",), (0, 1.5), (0, None), (0, True), (0, b"a")])
def test_anything_but_int_and_str_is_refused(path: tuple) -> None:
    with pytest.raises(TypeError, match="stream: "):
        stream(*path)


def test_number_is_the_initial_seed_of_the_stream_without_its_highest_bit():
    for labels in [(), ("step", 3), ("a", "b")]:
        assert number(5, *labels) == stream(5, *labels).initial_seed() % 2**63
