"""Chapters of choice, going on with the same settings on the same data, and doing without what is not available."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from sparing.errors import RunError, UserError
from sparing.jobs import demo
from sparing.jobs.demo import condense, federate, inputs, memory, page, shard, transfer, valley
from sparing.jobs.demo.overview import PICTURES
from sparing.jobs.demo.settings import NAMES, Settings
from sparing.jobs.demo.shard_page import ShardChapter, statements
from sparing.jobs.federate import job
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.run import Run
from sparing.report import Record

CLOCK = {"seconds", "cpu_seconds", "seconds_per_step"}


def asked(folder, *chapters, **more) -> Settings:
    return Settings(out=folder, scale="tiny", chapters=chapters or NAMES, **more)


def untimed(record: Record) -> list[dict]:
    return [{key: cell for key, cell in row.items() if key not in CLOCK} for row in record.rows]


def missing(*_, **__):
    raise UserError("stories15m", got="no npm", why="nothing to fetch with", do="install npm")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, images) -> Record:
    """Three chapters that nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(condense, "load_digits", lambda: images)
        return demo.run(asked(tmp_path_factory.mktemp("straight"), "condense", "transfer", "valley"))


STOPS = (1, 6, 10, 21, 32, 35, 38)
"""Saved: real images, three condensations of four outer steps, twelve nets, four more, three merges, a scan."""


def test_a_demo_that_stops_anywhere_goes_on_to_the_same_rows(quick, straight, images, tmp_path, monkeypatch):
    """Stopped and resumed seven times."""
    monkeypatch.setattr(condense, "load_digits", lambda: images)
    save, restore, saved, seen = Run.save, condense.restore_, [], []

    def save_some(run: Run, state: object = None) -> object:
        if len(saved) in stops:
            stops.remove(len(saved))
            raise KeyboardInterrupt
        saved.append(save(run, state))
        return saved[-1]

    monkeypatch.setattr(Run, "save", save_some)
    # a condensation goes on in its middle: images, Adam and rows are in the checkpoint
    monkeypatch.setattr(condense, "restore_", lambda state, tree: (seen.append(tree["step"]), restore(state, tree)))
    stops, settings = {*STOPS}, asked(tmp_path, "condense", "transfer", "valley")
    for _ in STOPS:
        with pytest.raises(StoppedError, match="--resume to go on"):
            demo.run(settings)
        settings = dataclasses.replace(settings, resume=True)
    assert untimed(demo.run(settings)) == untimed(straight)
    assert seen == [3, 2]


def test_chapters_join_those_that_are_there(quick, tmp_path):
    """The page shows what there is, in its own order, and the command for the rest."""
    first = demo.run(asked(tmp_path, "transfer"))
    html = (tmp_path / "report.html").read_text()
    assert page.finished(first) == ["transfer"]
    assert "<strong>1 small experiment</strong>" in html
    asked_for = re.findall(r"sparing demo <span.*?--resume</span> <span.*?--chapters</span> (\w+)</code>", html)
    assert asked_for == [name for name in NAMES if name != "transfer"]
    both = demo.run(asked(tmp_path, "shard", resume=True))
    html = (tmp_path / "report.html").read_text()
    assert page.finished(both) == ["transfer", "shard"]
    assert html.index('id="transfer"') < html.index('id="shard"')
    assert both.table("transfer_runs") == first.table("transfer_runs")
    assert not list(tmp_path.glob("overview*"))  # it shows all six or none


def test_going_on_with_other_settings_is_refused(quick, tmp_path):
    demo.run(asked(tmp_path, "shard"))
    before = (tmp_path / "record.jsonl").read_bytes()
    for name, value in (("scale", "small"), ("seed", 1), ("source", "bundled")):
        other = dataclasses.replace(asked(tmp_path, "shard", resume=True), **{name: value})
        with pytest.raises(UserError, match=rf"{name} \(\w+ before, now {value}\)"):
            demo.run(other)
    assert (tmp_path / "record.jsonl").read_bytes() == before


def test_going_on_with_a_demo_of_an_earlier_version_is_refused(quick, tmp_path):
    """It had its rows in the record alone, which would be lost."""
    (tmp_path / "run.json").write_text('{"seed": 0, "scale": "tiny", "source": "auto"}')
    with pytest.raises(UserError, match="layout"):
        demo.run(asked(tmp_path, "shard", resume=True))


def test_other_data_than_a_chapter_began_with_are_refused(quick, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(valley, "train", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(StoppedError):
            demo.run(asked(tmp_path, "valley"))
    whole = valley.load_inputs
    monkeypatch.setattr(valley, "load_inputs", lambda *a: dataclasses.replace(whole(*a), name="fashion-mnist"))
    with pytest.raises(UserError, match="began on digits"):
        demo.run(asked(tmp_path, "valley", resume=True))


def test_without_resume_it_starts_over_when_asked(quick, tmp_path):
    first = demo.run(asked(tmp_path, "shard"))
    with pytest.raises(UserError, match=r"it holds another run .*--overwrite to delete it"):
        demo.run(asked(tmp_path, "shard", seed=1))
    over = demo.run(asked(tmp_path, "shard", seed=1, overwrite=True))
    assert len(over.table("shards")) == len(first.table("shards"))
    assert Record.read(tmp_path / "record.jsonl").seed == 1


def test_the_seed_of_the_demo_is_that_of_the_scaling_runs(quick, straight, tmp_path):
    other = demo.run(asked(tmp_path, "transfer", seed=1))
    pairs = zip(straight.table("transfer_runs"), other.table("transfer_runs"), strict=True)
    assert all(one["loss"] != two["loss"] and one["seed"] == two["seed"] for one, two in pairs)


def test_a_demo_of_nothing_is_an_error(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(memory, "gather", missing)
    monkeypatch.setattr(transfer, "digits", missing)
    monkeypatch.setattr(valley, "load_inputs", missing)
    monkeypatch.setattr(job, "run", missing)
    chapters = ("memory", "transfer", "valley", "federate")
    with pytest.raises(UserError, match="none of them could be run"):
        demo.run(asked(tmp_path, *chapters))
    for name in chapters:
        assert f"the chapter on {name} is left out (" in caplog.text
    with pytest.raises(UserError, match="no npm"):  # a model that was asked for by name
        demo.run(asked(tmp_path, "memory", source="stories", overwrite=True))


def test_without_scipy_the_valleys_are_left_out_before_a_net_is_trained(quick, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(valley, "train", missing)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)  # an import of it fails
    done = demo.run(asked(tmp_path, "shard", "valley"))
    assert "the chapter on valley is left out (scipy: got nothing" in caplog.text
    assert [row["chapter"] for row in done.table("chapters")] == ["shard"]


@pytest.mark.parametrize(
    ("chapters", "why"), [((), "a demo is made of chapters"), (("valley", "valley"), "a value stands there twice")]
)
def test_no_chapter_or_one_twice_is_refused(chapters, why):
    with pytest.raises(UserError, match=f"chapters: got .*{why}"):
        Settings(chapters=chapters)


def test_other_images_stand_in_for_those_that_cannot_be_had(monkeypatch, caplog):
    pytest.importorskip("sklearn", reason="its digits are the images")
    monkeypatch.setattr(condense, "gather", missing)
    monkeypatch.setattr(condense, "typeset_digits", lambda: "typeset")
    assert condense.load_digits() == "typeset"
    monkeypatch.setattr(valley, "image_rows", missing)
    assert valley.load_inputs(valley.WORKS["tiny"], 0).name == "digits"
    assert "stand in" in caplog.text
    monkeypatch.setattr(inputs, "stories", missing)
    monkeypatch.setattr(inputs, "smollm", missing)
    monkeypatch.setattr(inputs, "bundled", lambda out: "bundled")
    assert inputs.gather("auto", None, "small") == "bundled"
    with pytest.raises(UserError, match="no npm"):
        inputs.gather("stories", None, "small")


def test_the_three_parts_of_the_images_do_not_overlap():
    pytest.importorskip("sklearn", reason="its digits are the images")
    found = valley.load_inputs(valley.WORKS["tiny"], 0)
    rows = [found.start[0], found.halves["a"][0], found.halves["b"][0]]
    assert list(map(len, rows)) == [120, 60, 60]
    assert len({image.numpy().tobytes() for part in rows for image in part}) == 240  # each image once


def test_without_a_calibration_the_gap_is_measured_and_not_predicted(quick, straight, tmp_path, monkeypatch):
    monkeypatch.setattr(valley, "predict_merge", missing)
    rows = demo.run(asked(tmp_path, "valley")).table("valley_merges")
    assert [row["predicted"] for row in rows] == [None, None, None]
    assert [row["gap"] for row in rows] == [row["gap"] for row in straight.table("valley_merges")]


def test_without_flower_its_run_is_left_out(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    record = demo.run(asked(tmp_path, "federate"))
    assert {row["run"] for row in record.table("federated_methods")} == {"main", "blocks"}
    assert not record.table("federated_flower")


@pytest.mark.parametrize("run", ["main", "blocks"])
def test_an_interrupted_run_of_clients_is_resumed_only_when_asked(tmp_path, run):
    """Starting over with another seed in the same folder deletes what is there; nobody's folder is touched else."""
    (tmp_path / "federated" / run / "checkpoints").mkdir(parents=True)
    work = federate.WORKS["tiny"]
    over = federate.settings_of(run, work, asked(tmp_path))
    on = federate.settings_of(run, work, asked(tmp_path, resume=True))
    fresh = federate.settings_of(run, work, asked(tmp_path / "other", resume=True))
    wanted = [(False, True), (True, False), (False, False)]
    assert [(each.resume, each.overwrite) for each in (over, on, fresh)] == wanted


def test_without_processes_the_plan_is_still_shown_and_the_paper_s_statements_hold(quick, tmp_path):
    record = demo.run(asked(tmp_path, "shard"))
    assert not record.table("shard_runs")
    chapter = ShardChapter(record, tmp_path)
    assert len(chapter.figures()) == 1
    assert "Four processes" not in chapter.story()
    assert "4 fit" in chapter.answer()
    assert {number.note for number in chapter.numbers()} == {"computed from shapes, nothing run"}
    assert chapter.card().interval == "computed from shapes, nothing run"
    rows = {row["statement"]: row for row in statements(record)}
    assert rows["7B, full: leaders"]["by_formula"] == rows["7B, full: leaders"]["paper"] == "NII, IIG, III"
    fits = rows["65B, full: what fits 80 GB"]
    assert set(fits["paper"].split(", ")) == set(fits["by_formula"].split(", ")) - {"GIG"}  # which it did not try
    for row in rows.values():
        if "over" in row["statement"]:  # what the paper saw faster has less to send
            assert float(row["by_formula"].rstrip("×")) > 1
            assert float(row["simulated"].rstrip("×")) > 1


@pytest.mark.processes
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_is_told():
    with pytest.raises(RunError, match="status 1"):
        shard.run_ranks(dataclasses.replace(shard.WORKS["tiny"], plans=("INN",)))  # a plan that breaks the rule


def test_the_readmes_picture_comes_with_its_numbers_and_where_they_are_from():
    """Small, from a whole demo of the scale that is meant."""
    root = Path(__file__).parents[3]
    first = (root / "README.md").read_text().partition("## Five calls")[0]
    for name in PICTURES.values():
        assert f'="docs/pictures/{name}"' in first
        assert (root / "docs/pictures" / name).stat().st_size <= 300 * 1024
    stored = json.loads((root / "docs/pictures/overview.json").read_text())
    assert list(stored["rows"]) == list(NAMES)
    assert stored["settings"]["scale"] == "small"
    assert stored["environment"]["command"].startswith("sparing demo")
    assert stored["environment"]["commit"]
