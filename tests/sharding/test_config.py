"""Machines in words, in axes and in files; a damaged file is refused by the entry at fault."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.sharding.planner.config import Link, Topology, parse_rate

PAPER = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")


def test_two_tiers_in_words():
    assert PAPER.sizes == (8, 4)
    assert (PAPER.world, PAPER.tiers) == (32, 2)
    assert [axis.name for axis in PAPER.axes] == ["intra", "inter"]
    assert [axis.rate for axis in PAPER.axes] == [250e9, 10e9]


def test_axes_are_the_same_thing():
    links = (Link(name="intra", size=8, rate=250e9), Link(name="inter", size=4, rate=10e9))
    assert Topology(axes=links) == PAPER
    assert hash(Topology(axes=links)) == hash(PAPER)


def test_one_hop_costs_latency_and_its_bytes():
    link = Link(name="inter", size=4, rate=100.0, latency=0.5, sharing=8.0)
    assert link.seconds(50, 3) == 3 * 0.5 + 50 / (100 / 8)
    assert Link(name="inter", size=4, rate=math.inf).seconds(1e12, 3) == 0
    assert Link(name="inter", size=4, rate=math.inf, latency=0.5, overhead=0.25).seconds(50, 3) == 3 * 0.75
    assert (
        Link(name="inter", size=4, rate=1.0, work=0.5, work_per_byte=0.25).processor_seconds(8, 3) == 3 * 0.5 + 8 * 0.25
    )


@pytest.mark.parametrize(
    "machine",
    [
        PAPER,
        Topology(groups=2, per_group=4, inter=1e7, intra=3e8, latency_inter=1e-4, latency_intra=2e-5, sharing=4),
        Topology(axes=[Link(name=str(at), size=at + 2, rate=10.0**at) for at in range(3)], overlap=0.25),
        Topology(axes=[Link(name="all", size=4, rate=1e9, work=1e-4, work_per_byte=1e-9)], crowding=2.0),
        Topology(axes=[Link(name="all", size=4, rate=1e9, overhead=1e-4)], per_pass=1e-5, per_step=1e-3),
    ],
)
def test_there_and_back(machine: Topology, tmp_path: Path):
    assert Topology.from_json(machine.to_json()) == machine
    (tmp_path / "cluster.json").write_text(machine.to_json())
    assert Topology.read(tmp_path / "cluster.json") == machine


def test_files_from_before_cores_were_counted_are_read():
    found = json.loads(PAPER.to_json())
    del found["crowding"], found["per_pass"], found["per_step"]
    for link in found["axes"]:
        del link["work"], link["work_per_byte"], link["overhead"]
    assert Topology.from_json(json.dumps(found)) == PAPER


def test_files_may_carry_units():
    found = json.loads(PAPER.to_json())
    found["axes"][1]["rate"] = "80Gbps"
    assert Topology.from_json(json.dumps(found)) == PAPER


def changed(**entries: object) -> str:
    return json.dumps(json.loads(PAPER.to_json()) | entries)


def axis(**entries: object) -> str:
    first = json.loads(PAPER.to_json())["axes"][0]
    return changed(axes=[first | entries])


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("{", "no JSON"),
        ("[]", "no object"),
        ("{}", "version is missing"),
        (changed(version=2), "reads version 1"),
        (changed(version="1"), "topology: version"),
        (changed(speed=1), "topology: speed"),
        (changed(axes=[]), "sizes|axes"),
        (changed(axes=[3]), "axis 0"),
        (changed(overlap=2), "overlap"),
        (changed(crowding=-1), "crowding"),
        (axis(work=-1), "work of intra"),
        (axis(rate="slow"), "rate"),
        (axis(rate=-1), "rate"),
        (axis(size=0), "size of intra"),
        (axis(size=True), "axis 0: size"),
        (axis(size=2.5), "axis 0: size"),
        (axis(latency=-1), "latency of intra"),
        (axis(sharing=0), "sharing of intra"),
        (axis(colour="red"), "axis 0: colour"),
    ],
)
def test_damaged_files(written: str, told: str):
    with pytest.raises(UserError, match=told):
        Topology.from_json(written)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        Topology.read(tmp_path / "none.json")


def test_at_most_three_axes():
    with pytest.raises(UserError, match="at most three"):
        Topology(axes=[Link(name=str(at), size=2, rate=1.0) for at in range(4)])


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
