"""The probe on four real processes: the file it writes is one that a plan reads; one process is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracles.processes import answers
from sparing import UserError
from sparing.cli import main
from sparing.jobs import probe
from sparing.jobs.probe import link_row
from sparing.report import Record
from sparing.sharding import Topology


def probed(folder: str) -> list[dict]:
    """What a rank is told."""
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


def test_one_process_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["probe", "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "torchrun" in err
    assert not (tmp_path / "out").exists()


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
    record.add("about", cluster="4 GPUs", topology="topology.json")
    page = probe.PAGE.of(record)
    assert page.answer.startswith(f"**{said}")
    (section,) = page.sections
    assert section.figures[0].title.startswith(said)
    assert section.tables[0].title == "4 GPUs"
