"""Speeds as people write them; a bit is an eighth of a byte."""

from __future__ import annotations

import math

import pytest

from sparing.errors import UserError
from sparing.sharding.rates import parse_rate


@pytest.mark.parametrize(
    ("written", "bytes_per_second"),
    [
        ("80Gbps", 10e9),
        ("80 Gb/s", 10e9),
        ("80Gbit/s", 10e9),
        ("80000 Mbits/s", 10e9),
        ("2.5Gbit/s", 312.5e6),
        ("100Mbit/s", 12.5e6),
        ("10GB/s", 10e9),
        ("10 GBps", 10e9),
        ("1GiB/s", 2.0**30),
        ("8Kibps", 1024.0),
        ("2000Gbps", 250e9),
        ("2tb/s", 250e9),
        ("64 bps", 8.0),
        ("1e3B/s", 1000.0),
        ("125", 125.0),
        (125, 125.0),
        (math.inf, math.inf),
    ],
)
def test_units(written, bytes_per_second):
    assert parse_rate(written) == bytes_per_second


@pytest.mark.parametrize("written", ["", "fast", "80G", "80Gb", "-1GB/s", "0Gbps", 0, -3.0, math.nan, "nan", "8 Xbps"])
def test_no_speed(written):
    with pytest.raises(UserError, match=r"rate: .*80Gbps"):
        parse_rate(written)
