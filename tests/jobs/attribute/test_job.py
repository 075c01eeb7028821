"""The job: its files, the same numbers as the library's, and what it refuses."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch
from safetensors.torch import load_file

from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.jobs.attribute import job, run, show
from sparing.jobs.attribute.checks import drop_set, retrained, spearman
from sparing.jobs.attribute.inputs import gather
from sparing.jobs.attribute.nets import language_model, row_losses
from sparing.jobs.attribute.page import caveats
from sparing.jobs.interrupts import StoppedError
from sparing.report import Record

POEM = "\n\n".join(f"{place}: the {animal} sat down." for animal in ("cat", "dog", "hen") for place in "abcdefg")


def bits(record):
    return [{name: cell for name, cell in row.items() if name != "seconds"} for row in record.rows]


def test_images_leave_record_page_and_influences(images, capsys):
    settings = images()
    record = run(settings)
    show(record)
    assert str(settings.out / "report.html") in capsys.readouterr().out
    assert bits(Record.read(settings.out / "record.jsonl")) == bits(record)
    saved, inputs = load_file(settings.out / "influence.safetensors"), gather(settings)
    found = hg.attribute(inputs.run, inputs.target, check=0)
    torch.testing.assert_close(saved["influence"], found.influence, rtol=1e-5, atol=1e-8)
    for at, test in enumerate((1, 4)):
        rows = record.table("rows", test=test, side="helps")
        assert [row["position"] for row in rows] == found.helpful(3)[at].tolist()
        assert [row["row"] for row in rows] == saved["rows"][found.helpful(3)[at]].tolist()
        (drop, *_) = record.table("drops", test=test)
        rows = drop_set(40, 0.1, 0, 0)
        assert drop["predicted"] == pytest.approx(float(found.predict(rows)[at]), rel=1e-4)
        theta = hg.solve(inputs.run.problem(), inputs.run.weights(drop=rows))
        change = inputs.target(theta)[at] - found.value[at]
        assert drop["measured"] == pytest.approx(float(change), rel=1e-3, abs=1e-6)
    page = (settings.out / "report.html").read_text()
    assert "rank correlation" in page
    assert "Test row 4" in page


def test_text_shows_its_rows(text):
    settings = text()
    record = run(settings)
    (shown, *_) = record.table("rows", side="helps")
    assert ": the " in shown["label_or_text"]
    assert shown["label_or_text"] in (settings.out / "report.html").read_text()
    texts = {part[:16] for part in POEM.split("\n\n")}  # bytes of a row
    assert {row["label_or_text"] for row in record.table("rows")} <= texts
    assert record.table("predictions")[0]["label_or_text"] not in {row["label_or_text"] for row in record.table("rows")}


@pytest.mark.usefixtures("pageless")
def test_records_of_a_file_and_test_rows_of_another(text, tmp_path):
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "The dog sät."}, ensure_ascii=False) + "\n")
    record = run(text(test=tmp_path / "test.jsonl", retrain=0, length=10))
    assert record.table("predictions")[0]["label_or_text"] == "The dog s"  # not half an ä
    assert not record.table("agreement")


@pytest.mark.usefixtures("pageless")
def test_a_stopped_run_goes_on_to_the_same_bits(images, tmp_path, monkeypatch):
    whole = run(images(out=tmp_path / "whole"))
    retrain, done = job.retrained, []

    def stopping(*given):
        done.append(1)
        if len(done) == 2:
            signal.raise_signal(signal.SIGTERM)
        return retrain(*given)

    with monkeypatch.context() as patch:
        patch.setattr(job, "retrained", stopping)
        with pytest.raises(StoppedError, match="--resume"):
            run(images())
    assert bits(run(images(resume=True))) == bits(whole)


def test_a_row_stands_on_the_side_of_its_sign_and_a_resumed_run_may_show_more(text, capsys):
    """Twelve rows, of which six may be shown on a side: no row on both, and none whose influence says otherwise."""
    from dataclasses import replace

    settings = text(shown=2)
    first = run(settings)
    influence = load_file(settings.out / "influence.safetensors")["influence"][0]
    for shown in (2, 6):
        record = first if shown == 2 else run(replace(settings, shown=shown, resume=True))
        for side, sign in (("helps", -1), ("harms", 1)):
            there = sorted(influence[sign * influence > 0].tolist(), reverse=sign > 0)[:shown]
            found = [row["influence"] for row in record.table("rows", side=side)]
            assert found == pytest.approx(there, rel=1e-6)
        assert len({row["position"] for row in record.table("rows")}) == len(record.table("rows"))


def test_a_side_may_be_empty(images, monkeypatch):
    """All rows but two help."""
    from dataclasses import replace

    true = hg.attribute

    def attribute(*given, **how):
        found = true(*given, **how)
        influence = -found.influence.abs()
        influence[0, :2] *= -1
        return replace(found, influence=influence)

    monkeypatch.setattr(job.hg, "attribute", attribute)
    settings = images(retrain=1)
    record = run(settings)
    counts = {test: [len(record.table("rows", test=test, side=side)) for side in ("helps", "harms")] for test in (1, 4)}
    assert counts == {1: [3, 2], 4: [3, 0]}
    page = (settings.out / "report.html").read_text()
    assert "of what harms: none." in page
    assert "One set was dropped, too few to rank" in page


@pytest.mark.parametrize(("epochs", "steps", "passes"), [(5, 35, 5), (1, 7, 1), (0.5, 4, 1)])
def test_an_epoch_passes_over_all_rows_though_its_last_step_has_fewer(images, epochs, steps, passes):
    """Sixty-one rows in steps of ten."""
    batches = gather(images(train_rows=61, batch=10, epochs=epochs)).run.batches
    assert len(batches) == steps
    seen = torch.bincount(torch.cat(list(batches)), minlength=61)
    if epochs >= 1:
        assert (seen == passes).all()
    assert seen.max() == passes


@pytest.mark.usefixtures("pageless")
def test_files_of_one_name_are_told_apart(text, tmp_path):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "x.txt").write_text(POEM)
    given = {"data": str(tmp_path / "train" / "x.txt"), "test": tmp_path / "test" / "x.txt"}
    run(text(**given))
    (tmp_path / "train" / "x.txt").write_text(POEM.replace("cat", "cow"))
    with pytest.raises(UserError, match="data"):
        run(text(**given, resume=True))


def test_cut_rows_and_padding_have_no_say():
    theta = language_model(0, width=8, length=6)
    ids = torch.randint(256, (2, 7), generator=torch.Generator().manual_seed(0))
    known = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    whole = row_losses(theta, ids, known, "gelu")
    other = ids.clone()
    other[1, 4:] = 5
    torch.testing.assert_close(row_losses(theta, other, known, "gelu"), whole)
    torch.testing.assert_close(row_losses(theta, ids[1:, :4], known[1:, :4], "gelu"), whole[1:])


def test_a_rank_of_what_is_not_a_number_is_not_a_number():
    """As the smallest, a run that diverged would rank like one in which nothing was lost."""
    numbers = torch.tensor([1.0, 2.0, 3.0, 4.0])
    broken = torch.tensor([math.nan, 1.0, 2.0, 3.0])
    assert math.isnan(spearman(numbers, broken))
    assert math.isnan(spearman(broken, numbers))
    assert math.isnan(spearman(numbers, torch.ones(4)))


@pytest.mark.usefixtures("pageless")
def test_the_page_says_that_retraining_diverged(images, monkeypatch):
    """Of the second prediction one loss is not a number: it has no rank, the first keeps its own."""
    true, done = job.retrained, []

    def diverging(*given):
        done.append(1)
        return torch.where(torch.tensor([False, len(done) == 2]), math.nan, true(*given))

    monkeypatch.setattr(job, "retrained", diverging)
    record = run(images())
    assert [row["test"] for row in record.table("agreement")] == [1]
    assert "Sets without which the retrained run diverged: 1." in " ".join(caveats(record))


def test_a_run_that_overflows_without_rows_has_no_losses(images):
    inputs = gather(images(lr=1e30))
    assert torch.isnan(retrained(inputs, torch.tensor([0]), 0)).tolist() == [True, True]


def test_ranks_share_ties():
    assert spearman(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([3.0, 3.0, 9.0])) == pytest.approx(1)
    assert spearman(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"predictions": (10_000,)}, "predictions: got 10000"),
        ({"batch": 50}, "batch: got 50"),
        ({"shown": 30}, "shown: got 30"),
        ({"data": "no-such"}, "data: got no-such; it is neither"),
        ({"test": "x.txt"}, "test: got x.txt"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(images, changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        run(images(**changes))
    assert not (tmp_path / "run").exists()


def test_prompts_with_answers_are_no_text(text, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    with pytest.raises(UserError, match="no plain text"):
        run(text(data=str(tmp_path / "pairs.jsonl")))
