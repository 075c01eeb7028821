"""Numbers of rows are those of the user's file, whatever is left out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparing.errors import UserError
from sparing.jobs.attribute import inputs, run
from sparing.jobs.attribute.inputs import gather

LENGTH = 16  # bytes of a row, as in the settings

FRUITS = [f"{name} of {place} is here" for name in ("fig", "plum", "kiwi") for place in "abcdefg"]


def write(path, texts):
    """A record a line, with a blank line after the second."""
    lines = [json.dumps({"text": text}) for text in texts]
    path.write_text("\n".join([*lines[:2], "", *lines[2:]]) + "\n")
    return str(path)


def records(path):
    """The texts of a file, as another program counts them."""
    return [json.loads(line)["text"] for line in Path(path).read_text().split("\n") if line.strip()]


@pytest.mark.parametrize("short", ["hi", " "], ids=["too short", "empty"])
def test_the_record_the_page_and_the_tensors_number_the_records_of_the_file(text, tmp_path, capsys, short):
    data = write(tmp_path / "rows.jsonl", [short] * 20 + FRUITS)
    settings = text(data=data, predictions=(0, 1), retrain=0)
    record = run(settings)
    there, saved, made = records(data), load_file(settings.out / "influence.safetensors"), gather(settings)
    assert min(saved["rows"].tolist()) >= 20
    assert [there[row][:LENGTH] for row in saved["rows"].tolist()] == made.train_words
    assert [there[row][:LENGTH] for row in saved["test_rows"].tolist()] == made.test_words
    for name in ("rows", "predictions"):
        for row in record.table(name):
            assert there[row["row"]][:LENGTH] == row["label_or_text"]
    page = (settings.out / "report.html").read_text()
    (first, *_) = record.table("predictions")
    assert f"(row {first['row']} of the data)" in page
    (helps, *_) = record.table("rows", side="helps", test=0)
    assert f"helps, row {helps['row']}" in page
    assert record.table("run")[0]["left_out"] == 20
    assert "rows.jsonl: 20 rows have fewer than four bytes and are left out" in capsys.readouterr().err
    assert "which are left out: 20" in page


@pytest.mark.usefixtures("pageless")
def test_a_prediction_is_a_record_of_the_test_file(text, tmp_path):
    data = write(tmp_path / "rows.jsonl", FRUITS)
    test = tmp_path / "test.jsonl"
    write(test, ["ok", "lime of a is here", " "])
    settings = text(data=data, test=test, predictions=(1,), retrain=0)
    (found,) = run(settings).table("predictions")
    assert (found["test"], found["row"], found["label_or_text"]) == (1, 1, "lime of a is her")
    for number, why in ((0, "row 0 of test.jsonl has fewer than four bytes"), (2, "row 2"), (3, "numbered 0 to 2")):
        with pytest.raises(UserError, match=f"predictions: got {number}; .*{why}"):
            gather(text(data=data, test=test, predictions=(1, number)))


def test_paragraphs_are_counted_and_blank_lines_are_not(text, tmp_path):
    path = tmp_path / "fruits.txt"
    path.write_text("I\n\n\n\n" + "\n\n".join(FRUITS) + "\n\n\n\nII\n\n")
    made = gather(text(data=str(path)))
    there = ["I", *FRUITS, "II"]
    assert [there[row][:LENGTH] for row in made.numbers.tolist()] == made.train_words
    assert [there[row][:LENGTH] for row in made.test_numbers.tolist()] == made.test_words
    assert made.left_out == 2


def test_digits_are_numbered_as_scikit_learn_has_them(images):
    made = gather(images())
    from sklearn.datasets import load_digits

    found = load_digits()
    for numbers, seen, words in (
        (made.numbers, made.train_images, made.train_words), (made.test_numbers, made.test_images, made.test_words),
    ):  # fmt: skip
        there = torch.from_numpy(found.images)[numbers]
        torch.testing.assert_close((there * (255 / 16)).round() / 255, seen.double(), rtol=1e-6, atol=0)
        assert [str(label) for label in found.target[numbers]] == words
    assert not set(made.numbers.tolist()) & set(made.test_numbers.tolist())


def test_other_images_are_numbered_in_their_part(images, monkeypatch):
    def part(seed, count):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(256, (count, 8, 8), generator=generator, dtype=torch.uint8)
        return pixels, torch.arange(count) % 10

    train, test = part(0, 60), part(1, 20)
    monkeypatch.setattr(inputs, "image_rows", lambda *given, **how: (train, test))
    made = gather(images(data="mnist"))
    assert torch.equal(made.train_images, train[0][made.numbers].float() / 255)
    assert made.test_numbers.tolist() == [1, 4]
    assert torch.equal(made.test_images, test[0][[1, 4]].float() / 255)


@pytest.mark.parametrize(
    ("data", "test", "words"),
    [
        ("", None, "data: got .*; it has no row of four bytes or more; pass a text that has"),
        ("one paragraph", None, "data: got .*; its only row .* is the one that is predicted"),
        ("\n\n".join(FRUITS), "", "test: got .*; it has no row of four bytes"),
    ],
    ids=["empty", "one row", "an empty test"],
)
def test_a_text_without_rows_is_refused_in_a_line(text, tmp_path, data, test, words):
    (tmp_path / "data.txt").write_text(data)
    given = {"data": str(tmp_path / "data.txt")}
    if test is not None:
        (tmp_path / "test.txt").write_text(test)
        given["test"] = tmp_path / "test.txt"
    with pytest.raises(UserError, match=words):
        gather(text(**given))
