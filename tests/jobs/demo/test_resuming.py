"""Chapters of choice, and going on: with the same settings on the same data, or not at all."""

from __future__ import annotations

import pytest

from sparing.errors import RunError, UserError
from sparing.jobs import demo
from sparing.jobs.demo import page, sharding, transfer
from sparing.jobs.demo.resuming import require_unchanged
from sparing.jobs.demo.settings import NAMES, Settings
from sparing.report import Record
from sparing.report.figure import Figure


@pytest.fixture
def quick(small, priced, monkeypatch):
    """Two chapters that need no data from elsewhere, and no drawing."""
    pytest.importorskip("sklearn", reason="its digits are the images")

    def broken(work: object) -> None:
        raise RunError("no network here")

    monkeypatch.setitem(transfer.WORKS, "tiny", small.transfer)
    monkeypatch.setattr(sharding, "run_ranks", broken)
    monkeypatch.setattr(sharding, "plan_cases", lambda cases: priced)
    monkeypatch.setattr(Figure, "svg", lambda *_, **__: "<svg ></svg>")


def test_chapters_join_those_that_are_there(quick, tmp_path):
    """The page shows what there is, in its own order, and the command for the rest."""
    first = demo.run(Settings(out=tmp_path, scale="tiny", chapters=("transfer",)))
    html = (tmp_path / "report.html").read_text()
    assert page.finished(first) == ["transfer"]
    assert "<strong>1 small experiment</strong>" in html
    assert [name for name in NAMES if f"sparing demo --resume --chapters {name}</code>" in html] == [
        name for name in NAMES if name != "transfer"
    ]
    both = demo.run(Settings(out=tmp_path, scale="tiny", chapters=("shard",), resume=True))
    html = (tmp_path / "report.html").read_text()
    assert page.finished(both) == ["transfer", "shard"]
    assert html.index('id="transfer"') < html.index('id="shard"')
    assert both.table("transfer_runs") == first.table("transfer_runs")
    assert not (tmp_path / "overview.png").exists()  # it shows all six or none


def test_going_on_with_other_settings_is_refused_and_said(quick, tmp_path):
    demo.run(Settings(out=tmp_path, scale="tiny", chapters=("shard",)))
    before = (tmp_path / "record.jsonl").read_bytes()
    for other in ({"scale": "small"}, {"scale": "tiny", "seed": 1}, {"scale": "tiny", "source": "bundled"}):
        with pytest.raises(UserError, match="began with seed 0, scale tiny, source auto"):
            demo.run(Settings(out=tmp_path, chapters=("shard",), resume=True, **other))
    assert (tmp_path / "record.jsonl").read_bytes() == before


def test_without_resume_it_starts_over_when_asked(quick, tmp_path):
    first = demo.run(Settings(out=tmp_path, scale="tiny", chapters=("shard",)))
    with pytest.raises(UserError, match=r"it holds another run .*--overwrite to delete it"):
        demo.run(Settings(out=tmp_path, scale="tiny", seed=1, chapters=("shard",)))
    over = demo.run(Settings(out=tmp_path, scale="tiny", seed=1, chapters=("shard",), overwrite=True))
    assert len(over.table("shards")) == len(first.table("shards"))
    assert Record.read(tmp_path / "record.jsonl").seed == 1


def test_a_demo_of_nothing_is_an_error(monkeypatch, tmp_path):
    def missing(*_):
        raise UserError("stories15m", got="no npm", why="nothing to fetch with", do="install npm")

    monkeypatch.setattr(demo, "gather", missing)
    with pytest.raises(UserError, match="none of them could be run"):
        demo.run(Settings(out=tmp_path, chapters=("memory",)))
    with pytest.raises(UserError, match="no npm"):  # a model that was asked for by name
        demo.run(Settings(out=tmp_path, chapters=("memory",), source="stories", overwrite=True))


@pytest.mark.parametrize("chapters", [(), ("valley", "valley")])
def test_no_chapter_or_one_twice_is_refused(chapters):
    with pytest.raises(UserError, match="different chapters"):
        Settings(chapters=chapters)


def test_other_data_than_a_chapter_began_with_are_refused():
    record = Record(question="Q?", settings={}, seed=0, environment={})
    require_unchanged(record, "valley_data", "digits")
    record.add("valley_data", name="fashion-mnist")
    require_unchanged(record, "valley_data", "fashion-mnist")
    with pytest.raises(UserError, match="began on fashion-mnist"):
        require_unchanged(record, "valley_data", "digits")


def test_times_of_an_interrupted_chapter_add_up():
    record = Record(question="Q?", settings={}, seed=0, environment={})
    for seconds in (2.0, 3.0):
        record.add("chapters", chapter="valley", seconds=seconds, cpu_seconds=2 * seconds)
    assert page.times(record) == {"valley": {"seconds": 5.0, "cpu_seconds": 10.0}}
