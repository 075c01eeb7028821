"""A run that is killed, whose disk fills, or that may not write: whole files, one line, on again to the same bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparing.cli import main

SHORT = {"rounds": 4}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Any]:
    """One interpreter for all runs of this file."""
    from benchmarks.trust.nursery import Nursery

    with Nursery(["sparing.jobs.federate.job", "tyro"]) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, nursery: Any) -> Any:
    """A federated run of a second, once done by nobody disturbed."""
    from benchmarks.trust.cases import WAYS, Case

    case = Case(place=tmp_path_factory.mktemp("runs"), job="federate", way=WAYS["federate"][1])
    case.start(nursery, case.place / "federate-straight", **SHORT).end()
    return case


@pytest.mark.processes
@pytest.mark.slow  # an interpreter that imports torch, and runs with their pages
def test_killed_twice_and_resumed_twice(case: Any, nursery: Any) -> None:
    from benchmarks.trust.cases import leftovers, outcome
    from benchmarks.trust.kills import killed

    out = case.place / "killed"
    kills = killed(case, out, [0.0, 0.1], nursery, **SHORT)
    assert kills[0]["hit"]
    assert outcome("federate", out) == outcome("federate", case.place / "federate-straight")
    assert leftovers(out) == []


@pytest.mark.processes
@pytest.mark.slow
def test_a_run_goes_on_where_a_full_disk_stopped_it(case: Any, nursery: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.trust import disks

    if why := nursery.refusal():
        pytest.skip(why)
    monkeypatch.setitem(disks.SHORT, "federate", SHORT)
    row = disks.full(case, 0.5, nursery)
    assert (row["status"], row["one_line"]) == (2, True), row["said"]
    assert "disk is full" in row["said"]
    assert (row["broken"], row["left_over"], row["same"]) == ([], [], True)
    row = disks.fixed(case, "resumed", nursery)
    assert (row["status"], row["one_line"], row["same"]) == (2, True, True), row["said"]
    assert "Read-only file system" in row["said"]


def test_a_folder_below_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Root may write where bits forbid it, but nobody may make a folder in a file."""
    from benchmarks.trust.cases import Case

    (tmp_path / "file").write_text("mine")
    case = Case(place=tmp_path, job="federate")
    words = case.words(tmp_path / "file" / "deeper", **{"train-rows": 40, "clients": 2})
    assert main([*words, "--resume"]) == 2
    assert "no run was started there" in capsys.readouterr().err
    assert main(words) == 2
    assert "it cannot be written" in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="255 bytes is what file systems of Linux take")
def test_a_name_too_long_for_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["condense", "--out", str(tmp_path / ("x" * 300))]) == 2
    assert "File name too long" in capsys.readouterr().err
