"""The whole job on a tiny model: files, page, resuming, refusals."""

from __future__ import annotations

import dataclasses

import pytest
from safetensors.torch import load_file

from sparing.errors import UserError
from sparing.jobs.adapt import Adapt, job, run, show
from sparing.jobs.adapt.settings import Forward
from sparing.report import Record

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own jvp rules


@pytest.fixture
def settings(tmp_path, model_dir, book):
    text = tmp_path / "book.txt"
    text.write_text(book, encoding="utf-8")
    return Adapt(
        out=tmp_path / "out", model=str(model_dir), data=(text, text), elsewhere=text, documents=2, stream=2,
        held_out_documents=2, length=100, question_length=20, width=4, forward=Forward(directions=2), steps=2,
        seconds=1e6, rates=(0.01, 0.1), inner_lr=0.05, measurements=2,
    )  # fmt: skip


def test_the_job_writes_record_page_and_weights(settings, capsys):
    record = run(dataclasses.replace(settings, methods=("uniform", "names", "rgu", "fg-phi", "fg-psi")))
    show(record)
    printed = capsys.readouterr().out
    assert "report.html" in printed
    rows = record.table("answers")
    assert [row["method"] for row in rows] == ["base", "uniform", "names", "rgu", "fg-phi", "fg-psi"]
    assert [row["steps"] for row in rows] == [0, 0, 0, 2, 2, 2]
    assert Record.read(settings.out / "record.jsonl").table("answers") == rows
    page = (settings.out / "report.html").read_text(encoding="utf-8")
    assert "(FG)²U in ψ" in page
    # the rule has every mark, and neither a network nor a course
    assert len(record.table("sweep", method="names")) == len(settings.rates)
    assert not (settings.out / "weights" / "names.safetensors").exists()
    assert {row["method"] for row in record.table("curve")} == {"uniform", "rgu", "fg-phi", "fg-psi"}
    assert {row["method"] for row in record.table("tokens")} == {"uniform", "rgu", "fg-phi", "fg-psi"}
    assert all("names" in row for row in record.table("passage"))
    assert str(settings.out.parent) not in page
    phi = load_file(settings.out / "weights" / "fg-psi.safetensors")
    assert phi["head.1.weight"].abs().sum() > 0
    assert len(record.table("meta")) == 6
    # nothing to tune on, which a default does not mind and the page says
    assert [(row["there"], row["taken"]) for row in record.table("documents")] == [(0, 0), (10, 2), (2, 2), (4, 2)]
    assert "every document of the first part has a question" in page
    assert not record.table("said")


def test_an_interrupted_run_goes_on_to_the_same_bits(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "write_page", lambda *args: None)  # drawn once, in the test above
    short = dataclasses.replace(settings, methods=("uniform", "names", "checkpointed"))
    whole = run(short)
    cut = dataclasses.replace(short, out=tmp_path / "cut")
    step, count = job.meta.outer_step_, iter(range(99))

    def stopping(*args):
        if next(count) == 1:  # in the middle of the last method
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(job.meta, "outer_step_", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(cut)
    monkeypatch.setattr(job.meta, "outer_step_", step)
    # other methods may be left out or added, another budget would not be the same for all
    for change, words in (({"seconds": 9.0}, "seconds"), ({"steps": 3}, "steps")):
        with pytest.raises(UserError, match=f"{words} .*now"):
            run(dataclasses.replace(cut, resume=True, **change))
    again = run(dataclasses.replace(cut, resume=True))

    def untimed(record, table):
        return [{k: v for k, v in row.items() if k != "seconds"} for row in record.table(table)]

    for table in ("answers", "meta", "curve", "sweep", "tokens", "passage", "samples"):
        assert untimed(again, table) == untimed(whole, table)


def test_directories_of_other_runs_are_refused(settings):
    with pytest.raises(UserError, match="no run was started there"):
        run(dataclasses.replace(settings, resume=True))
    settings.out.mkdir()
    (settings.out / "run.json").write_text('{"seed": 5}')
    with pytest.raises(UserError, match="it holds another run"):
        run(settings)
    with pytest.raises(UserError, match="same bits"):
        run(dataclasses.replace(settings, resume=True))
    with pytest.raises(UserError, match="pass one of them"):
        dataclasses.replace(settings, resume=True, overwrite=True)


def test_a_run_does_not_delete_the_text_it_reads(settings, book):
    text = settings.out / "weights" / "book.txt"
    text.parent.mkdir(parents=True)
    text.write_text(book, encoding="utf-8")
    (settings.out / "run.json").write_text("{}")
    with pytest.raises(UserError, match="reads from what it would delete"):
        run(dataclasses.replace(settings, overwrite=True, data=(text,)))


@pytest.mark.parametrize(
    "change",
    [
        {"documents": 0}, {"inner_lr": 0.0}, {"rates": ()}, {"methods": ()}, {"methods": ("rgu", "rgu")}, {"length": 3},
        {"locality": -1.0}, {"width": 1}, {"tune": -1}, {"measurements": 0}, {"seconds": float("nan")},
        {"held_out_documents": 0},
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(change):
    with pytest.raises(UserError):
        Adapt(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"elsewhere": "none.txt"}, "text: .*cannot be read"), ({"data": ("none.txt",)}, "text: .*cannot be read"),
        ({"model": "none"}, "there is no such directory"),
        ({"length": 513}, "length: got 513; the model has 512 positions"),
        ({"question_length": 511}, "question_length: got 511; the model has 512 positions"),
        ({"stream": 5000}, "stream: got 5000; the test part has 4 documents with a question; pass at most that many"),
        ({"held_out_documents": 99}, "held_out_documents: got 99; the validation part has"),
        ({"documents": 99}, "documents: got 99; the meta-training part has"),
        ({"tune": 3}, "tune: got 3; every document of the first part has a question"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_a_finished_run_is_deleted(settings, tmp_path, change, words):
    paths = {"elsewhere": tmp_path.joinpath, "data": lambda names: tuple(map(tmp_path.joinpath, names))}
    change = {name: paths.get(name, lambda value: value)(value) for name, value in change.items()}
    settings.out.mkdir()
    (settings.out / "run.json").write_text("{}")
    (settings.out / "record.jsonl").write_text("a run that took an hour")
    with pytest.raises(UserError, match=words):
        run(dataclasses.replace(settings, overwrite=True, **change))
    assert (settings.out / "record.jsonl").read_text() == "a run that took an hour"


def test_other_text_that_is_too_short_is_named(settings, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("THE FIRST CHAPTER\n\nThe cat sat by the well. It rained and it rained.\n", encoding="utf-8")
    with pytest.raises(UserError, match="elsewhere: got 0 passages of 100 tokens"):
        run(dataclasses.replace(settings, elsewhere=short))
