"""The probe on four real processes: the file it writes is one that a plan reads; one process measures its device."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from oracles.processes import answers
from sparing import UserError
from sparing.cli import main
from sparing.jobs import arithmetic, probe
from sparing.jobs.arithmetic import operations
from sparing.jobs.probe import link_row
from sparing.report import Record
from sparing.sharding import Topology


def probed(folder: str) -> list[dict]:
    """What a rank is told; its arithmetic is measured for a moment, for links are what is asked here."""
    arithmetic.SECONDS, arithmetic._SIZES["cpu"] = 0.05, (32, 16, 2**16)
    record = probe.run(probe.Settings(groups=2, per_group=2, seconds=1.0, out=Path(folder)))
    return record.table("links")


@pytest.mark.processes
@pytest.mark.slow  # four processes that import torch
def test_four_processes_write_a_topology_that_a_plan_reads(tmp_path, capsys):
    found = answers(4, probed, str(tmp_path))
    assert all(rows == found[0] for rows in found)  # every rank knows the same
    topology = Topology.read(tmp_path / "topology.json")
    assert topology.sizes == (2, 2)
    assert [link_row(axis) for axis in topology.axes] == found[0]
    assert all(0 < row["rate"] < 1e6 and row["latency"] >= 0 and row["sharing"] >= 1 for row in found[0])
    record = Record.read(tmp_path / "record.jsonl")
    probe.show(record)
    assert "sparing plan MODEL_DIR --topology" in capsys.readouterr().out
    assert "links" in (tmp_path / "report.html").read_text()
    # files that are passed on hold no folders of this machine
    for name in ("record.jsonl", "report.html"):
        assert str(tmp_path) not in (tmp_path / name).read_text()


@pytest.mark.parametrize(("width", "tokens"), [(64, 32), (128, 8), (200, 4)])
def test_operations_of_a_block_are_those_of_its_products(width, tokens):
    """Twelve squares of the width a token, and scores with every other; the backward pass costs twice the forward."""
    products = 2 * tokens * 12 * width**2 + 2 * 2 * tokens**2 * width
    assert operations(width, tokens) == 3 * products


def test_groups_of_one_process_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match="groups: got one process"):
        probe.run(probe.Settings(groups=2, out=tmp_path))


def test_one_process_measures_its_device(tmp_path, capsys, monkeypatch):
    """The rate is operations over seconds: a clock that runs twice as fast halves it."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    now = itertools.count(step=0.5)
    monkeypatch.setattr("sparing.jobs.arithmetic.time.perf_counter", lambda: next(now))
    record = probe.run(probe.Settings(timed_width=64, timed_tokens=16, device="cpu", out=tmp_path))
    passes, exact, step = record.table("arithmetic")
    assert (passes["dtype"], exact["dtype"]) == ("bfloat16", "float32")
    assert passes["speed"] == exact["speed"] == operations(64, 16) / 0.5
    assert step["moves"] == 28 * 2**24 / 0.5
    assert not (tmp_path / "topology.json").exists()
    probe.show(record)
    said = capsys.readouterr().out
    assert f"--tflops {operations(64, 16) / 0.5e12:.3g} --bandwidth {28 * 2**24 / 0.5e9:.5g}" in said
    assert "FLOP/s" in (tmp_path / "report.html").read_text()


def test_repetitions_far_apart_are_told_of(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    now = itertools.accumulate(itertools.cycle([0.5, 0.5, 1.5]))
    monkeypatch.setattr("sparing.jobs.arithmetic.time.perf_counter", lambda: next(now))
    record = probe.run(probe.Settings(timed_width=64, timed_tokens=16, device="cpu", out=tmp_path))
    probe.show(record)
    assert "Repetitions differ by" in capsys.readouterr().err
    assert "Repetitions differ by" in (tmp_path / "report.html").read_text()


def test_a_world_that_is_no_number_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    with pytest.raises(UserError, match="ranks and ports are integers"):
        probe.run(probe.Settings(out=tmp_path))


def test_the_topology_of_another_probe_is_left_alone(tmp_path, capsys, monkeypatch):
    """Before anything is measured; a topology somebody copied there is no run's, and is never deleted."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "topology.json").write_text("mine")
    for more, said in (
        ([], "it holds another run (topology.json)"),
        (["--overwrite"], "no run wrote its topology.json"),
    ):
        assert main(["probe", "--out", str(tmp_path), *more]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "topology.json").read_text() == "mine"


@pytest.mark.parametrize("bad", [{"groups": 0}, {"per_group": -1}, {"seconds": 0.0}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(UserError):
        probe.Settings(**bad)


@pytest.mark.parametrize(("rates", "said"), [((80.0, 8.0), "inner links are 10× as fast as outer ones"),
                                             ((80.0, None), "All processes are one group")])  # fmt: skip
def test_the_page_compares_the_links(rates, said):
    record = Record(question="How fast?", settings={}, seed=0, units=dict(probe.UNITS), environment={})
    for link, rate in zip(("inner", "outer"), rates, strict=True):
        record.add("links", link=link, ranks=2, rate=rate, latency=1e-5, sharing=1.5, work=None)
    record.add("arithmetic", what="passes of a block", dtype="bfloat16", speed=4e14, spread=1.0, rounds=5)
    record.add("arithmetic", what="step of AdamW", dtype="float32", moves=9e11, spread=1.0, rounds=5)
    record.add("about", device="cuda", memory=80 * 10**9, cluster="4 GPUs", topology="topology.json")
    page = probe.PAGE.of(record)
    assert page.answer.startswith(f"**{said}")
    assert page.reproduce["use it"].endswith("--memory 80GB --dtype bfloat16 --tflops 400 --bandwidth 900")
    section, arithmetic = page.sections
    assert arithmetic.tables[0].title == "cuda"
    assert section.figures[0].title.startswith(said)
    assert section.tables[0].title == "4 GPUs"
