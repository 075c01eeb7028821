"""The demo's chapter on a model small enough for a test: every arm, every table, the page, and going on."""

from __future__ import annotations

import dataclasses

import pytest

import zoo
from sparing.data import bundled_text
from sparing.jobs.demo import QUESTION, UNITS
from sparing.jobs.demo.layers import ARMS, method_of, run_chapter
from sparing.jobs.demo.materials import RATES, Materials, split
from sparing.jobs.demo.page import answer, show, write_page
from sparing.jobs.demo.tiny import make_tiny_model
from sparing.jobs.finetune.models import load_tokenizer
from sparing.layersample import LayerSampling
from sparing.report import Record


@pytest.fixture(scope="module")
def materials(tmp_path_factory) -> Materials:
    text = bundled_text("alice")[:6000]
    path = make_tiny_model(tmp_path_factory.mktemp("demo") / "tiny", text, steps=2)
    ids = load_tokenizer(path)(text, add_special_tokens=False)["input_ids"]
    train, dev, test = split(ids, 16, rows=(16, 2, 2))
    return Materials(
        model=path, title="a tiny model", licence="public domain", train=train, dev=dev, test=test, batch=2, steps=4,
        trial=1, prompts=("Alice was",), rates={arm: rates[:2] for arm, rates in RATES.items()},
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(materials, tmp_path_factory) -> tuple[Record, object]:
    path = tmp_path_factory.mktemp("run") / "record.jsonl"
    record = Record(question=QUESTION, settings={"seed": 0}, seed=0, units=UNITS)
    run_chapter(materials, record, seed=0, path=path)
    record.add("run", seconds=1.0, licence="public domain", materials="a tiny model", page="report.html")
    return record, path


@pytest.mark.slow  # eight trials and four runs of a real model
def test_every_arm_has_its_rows(finished):
    record, path = finished
    assert [row["method"] for row in record.table("arms")] == list(ARMS)
    assert len(record.table("sweep")) == 2 * len(ARMS)
    assert {row["when"] for row in record.table("samples")} == {"before", *(f"after {arm}" for arm in ARMS)}
    for row in record.table("arms"):
        assert row["lr"] in [tried["lr"] for tried in record.table("sweep") if tried["method"] == row["method"]]
        assert row["peak_predicted"] == pytest.approx(row["peak_measured"], rel=0.02)  # the promise of `memory`
    assert Record.read(path).table("arms") == record.table("arms")


@pytest.mark.slow
def test_the_rate_is_the_best_on_the_development_rows(finished):
    record, _ = finished
    for row in record.table("arms"):
        tried = {t["lr"]: t["dev_loss"] for t in record.table("sweep") if t["method"] == row["method"]}
        assert row["lr"] == min(tried, key=tried.__getitem__)


@pytest.mark.slow
def test_a_finished_arm_is_not_run_again(finished, materials):
    _, path = finished
    again = Record.read(path)
    run_chapter(dataclasses.replace(materials, steps=10**9), again, seed=0, path=path)  # would never end
    assert again.rows == Record.read(path).rows


@pytest.mark.slow
def test_page_and_table(finished, tmp_path, capsys):
    record, _ = finished
    write_page(record, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Alice was" in page
    assert "LISA ends at a held-out loss of" in answer(record)
    show(record)
    shown = capsys.readouterr().out
    assert all(arm in shown for arm in ARMS)


def test_a_tied_head_freezes_with_its_embedding():
    frozen = method_of("LISA, embedding frozen", zoo.llama(tied=True))
    free = method_of("LISA, embedding frozen", zoo.llama(tied=False))
    assert isinstance(frozen, LayerSampling)
    assert (frozen.embed, frozen.head, free.embed, free.head) == (False, False, False, True)
