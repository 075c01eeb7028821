"""Whose directory it is: nothing of another run is touched, resuming means the same run."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs import checkpoint
from sparing.jobs import folder as room
from sparing.jobs.folder import Folder, differences, identity, print_page_path
from sparing.jobs.settings import Resumable
from sparing.report import Record

NOW = {"lr": 0.1, "seed": 3}


@dataclass(frozen=True)
class Inner:
    rank: int = 2


@dataclass(frozen=True)
class Settings:
    out: Path = Path("runs/x")
    resume: bool = False
    overwrite: bool = False
    save_every: int = 5
    lr: float = 0.1
    rates: tuple[float, ...] = (1.0, 2.0)
    inner: Inner = Inner()
    shown: bool = False


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "out", names=("model",))


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_one_cannot_resume_what_one_deletes() -> None:
    Resumable(out=Path("x"), resume=True)
    with pytest.raises(UserError, match="pass one of them"):
        Resumable(out=Path("x"), resume=True, overwrite=True)


def test_the_identity_is_plain_and_leaves_out_the_harmless() -> None:
    assert identity(Settings(), harmless={"shown"}) == {"lr": 0.1, "rates": [1.0, 2.0], "inner": {"rank": 2}}
    assert identity(Settings(resume=True, save_every=1, out=Path("y"))) == identity(Settings())


def test_differences_are_those_of_both_sides() -> None:
    found = differences({"a": 1, "gone": 2}, {"a": 1, "new": 3})
    assert found == ["gone (2 before, now None)", "new (None before, now 3)"]
    assert differences(NOW, dict(NOW)) == []


def test_a_new_directory_is_claimed_with_a_mark(folder: Folder) -> None:
    folder.check()
    assert not folder.path.exists()  # checking writes nothing
    folder.claim_(NOW)
    assert json.loads(folder.at("run.json").read_text()) == NOW
    assert folder.held() == ["run.json"]


def test_another_run_is_left_alone(folder: Folder) -> None:
    folder.claim_(NOW)
    folder.at("model").mkdir()
    folder.at("model").joinpath("weights").write_text("w")
    before = contents(folder.path)
    with pytest.raises(UserError, match=r"another run \(run.json, model\).*--resume.*--overwrite"):
        folder.check()
    assert contents(folder.path) == before


def test_a_file_of_a_run_without_its_mark_is_somebodys(folder: Folder) -> None:
    folder.path.mkdir()
    folder.at("report.html").write_text("mine")
    with pytest.raises(UserError, match=r"another run \(report.html\)"):
        folder.check()
    with pytest.raises(UserError, match=r"no run wrote its report.html"):
        replace(folder, overwrite=True).check()


def test_other_things_in_a_directory_do_not_matter(folder: Folder) -> None:
    folder.path.mkdir()
    folder.at("notes.txt").write_text("mine")
    folder.check()


def test_overwriting_deletes_only_what_a_run_writes(folder: Folder) -> None:
    folder.claim_(NOW)
    checkpoint.save(folder.at("checkpoints"), 1, {})
    folder.at("notes.txt").write_text("mine")
    anew = replace(folder, overwrite=True)
    anew.check()
    anew.claim_({"lr": 0.2})
    assert set(contents(folder.path)) == {"run.json", "notes.txt"}
    assert json.loads(folder.at("run.json").read_text()) == {"lr": 0.2}


def test_a_deletion_that_was_cut_short_can_be_repeated(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark is deleted last: as long as anything of the run is there, it is known as a run's."""
    folder.claim_(NOW)
    for name in ("model", "checkpoints"):
        folder.at(name).mkdir()
    anew, whole = replace(folder, overwrite=True), room.shutil.rmtree

    def dying(path: Path, **options: object) -> None:
        if path.name == "model":
            raise OSError(errno.EIO, "Input/output error")
        whole(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(room.shutil, "rmtree", dying)
        with pytest.raises(UserError, match="cannot be written"):
            anew.claim_(NOW)
    assert folder.held() == ["run.json", "model"]
    anew.check()
    anew.claim_(NOW)


def test_a_run_does_not_delete_what_it_reads(folder: Folder) -> None:
    folder.claim_(NOW)
    folder.at("model").mkdir()
    anew = replace(folder, overwrite=True)
    for inside in (folder.at("model"), folder.at("model") / "data.txt", folder.path / "x" / ".." / "model"):
        with pytest.raises(UserError, match="reads from what it would delete"):
            replace(anew, reads=(inside,)).check()
    replace(anew, reads=(folder.at("notes.txt"), folder.path.parent)).check()


def test_a_file_is_no_directory_and_there_must_be_something_to_resume(folder: Folder) -> None:
    with pytest.raises(UserError, match="no run was started"):
        replace(folder, resume=True).check()
    folder.path.write_text("")
    with pytest.raises(UserError, match="not a directory"):
        folder.check()


def test_resuming_keeps_everything(folder: Folder) -> None:
    folder.claim_(NOW)
    checkpoint.save(folder.at("checkpoints"), 1, {})
    before = contents(folder.path)
    again = replace(folder, resume=True)
    again.check()
    again.claim_({"other": 1})
    assert contents(folder.path) == before


def test_resuming_with_other_settings_names_them(folder: Folder) -> None:
    folder.claim_({**NOW, "data": "3c"})
    with pytest.raises(UserError, match=r"lr \(0.1 before, now 0.5\), data \(other content\); .* same bits"):
        replace(folder, resume=True).newest({**NOW, "lr": 0.5, "data": "9f"}, files={"data"})


def test_the_newest_checkpoint_is_taken(folder: Folder) -> None:
    folder.claim_(NOW)
    again = replace(folder, resume=True)
    assert again.newest(NOW) is None
    for step in (2, 10):
        checkpoint.save(folder.at("checkpoints"), step, {})
    assert again.newest(NOW) == folder.at("checkpoints") / "step-00000010"
    assert folder.newest(NOW) is None
    folder.at("run.json").write_text("{")
    with pytest.raises(UserError, match=r"run.json is broken"):
        again.newest(NOW)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = Folder(tmp_path / "file" / "deeper" / "out")
    # before the work of a run, not only after it
    for refuse in (below.check, lambda: below.claim_(NOW)):
        with pytest.raises(UserError, match=r"cannot be written \(.*Not a directory"):
            refuse()
    with pytest.raises(UserError, match="no run was started there"):
        replace(below, resume=True).check()


def test_record_and_page_of_a_finished_run(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    record = Record(question="q", settings=Settings(out=folder.path), seed=0)
    record.add("rows", value=1)
    folder.finish_(record, lambda record, path: path.write_text(record.question))
    assert folder.at("report.html").read_text() == "q"
    assert Record.read(folder.at("record.jsonl")).rows == record.rows
    assert str(folder.path.parent) not in folder.at("record.jsonl").read_text()
    print_page_path(record)
    assert capsys.readouterr().out == f"report: {folder.at('report.html')}\n"


def test_a_full_disk_at_the_page_is_one_line(folder: Folder) -> None:
    def full(record: Record, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="disk is full"):
        folder.finish_(Record(question="q", settings={}, seed=0), full)
