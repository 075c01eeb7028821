"""Files of every kind that hold the same rows are read as the same, and nothing of them is left behind."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset, disable_progress_bars

from sparing.errors import UserError
from sparing.jobs.lm.files import read
from sparing.jobs.lm.records import Example, Text

CALL, OTHER = (
    {"type": "function", "function": {"name": "add", "arguments": arguments}} for arguments in ({"a": 1}, {"b": "z"})
)
ROWS = [
    {"messages": [{"role": "user", "content": "2+1?"}, {"role": "assistant", "tool_calls": [CALL]}], "id": 0},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "id": 1},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [OTHER, CALL]}], "id": 2},
]


def without_places(examples: list[Example]) -> list[dict]:
    return [{name: getattr(one, name) for name in one.__slots__ if name != "where"} for one in examples]


def written(folder: Path) -> dict[str, Path]:
    disable_progress_bars()
    paths = {name: folder / f"a.{name}" for name in ("jsonl", "json", "jsonl.gz", "parquet")}
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    paths["jsonl"].write_text(lines)
    paths["json"].write_text(json.dumps(ROWS, indent=1))
    paths["jsonl.gz"].write_bytes(gzip.compress(lines.encode()))
    # arrow gives each message and each call the fields of all others, with None in them
    Dataset.from_list(ROWS).to_parquet(paths["parquet"])
    return paths


def test_one_set_of_rows_in_every_kind_of_file(tmp_path: Path) -> None:
    paths = written(tmp_path)
    plain = read(paths["jsonl"])
    for path in paths.values():
        found = read(path)
        assert without_places(found.examples) == without_places(plain.examples)
        assert found.ignored == ("id",)
    places = {name: read(path).examples[1].where for name, path in paths.items()}
    assert places == {
        "jsonl": "a.jsonl, line 2", "json": "a.json, record 2", "jsonl.gz": "a.jsonl.gz, line 2",
        "parquet": "a.parquet, row 2",
    }  # fmt: skip


@pytest.mark.processes
def test_parquet_leaves_nothing_in_the_home(tmp_path: Path) -> None:
    """Neither a copy of the rows nor a lock."""
    path, home = written(tmp_path)["parquet"], tmp_path / "home"
    home.mkdir()
    code = f"from pathlib import Path\nfrom sparing.jobs.lm.files import read\nread(Path({str(path)!r}))"
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    subprocess.run([sys.executable, "-c", code], check=True, env=known | {"HOME": str(home)}, timeout=300)
    assert [entry for entry in home.rglob("*") if entry.is_file()] == []


def test_a_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\n\nparagraphs")
    (tmp_path / "a.TXT").write_text("one")
    assert read(tmp_path / "b.txt").examples == [Text("b.txt", "two\n\nparagraphs")]
    assert read(tmp_path).examples == [Text("a.TXT", "one"), Text("b.txt", "two\n\nparagraphs")]


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    for name, text in (("train-1", "b"), ("train-0", "a"), (".cache/old", "x")):
        (tmp_path / f"{name}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "README.md").write_text("a card")
    assert [one.text for one in read(tmp_path).examples] == ["a", "b"]


REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    "no data": ({"a.tsv": b"text\n"}, "the folder has no file that ends in"),
    "two kinds": ({"a.jsonl": b"{}", "b.txt": b"x"}, "it holds .jsonl and .txt"),
    "rows to measure on": ({"train.jsonl": b"{}", "test.jsonl": b"{}"}, "test.jsonl is named as rows to measure on"),
    "a split of the hub": ({"data/validation-00000-of-00001.parquet": b""}, "named as rows to measure on"),
    "saved by datasets": ({"a.arrow": b"", "b.jsonl": b""}, "write it with to_parquet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_that_would_be_learnt_wrongly(tmp_path: Path, name: str) -> None:
    files, words = REFUSED[name]
    for place, content in files.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(content)
    with pytest.raises(UserError, match=words):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.json"])
def test_what_is_not_what_its_name_says(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"[PAR1 not")
    with pytest.raises(UserError, match=rf"^{name}") as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_of_csv_every_value_is_a_text(tmp_path: Path) -> None:
    """Written by Python's own csv: numbers, nothing, quotes, line ends, and more letters than its usual limit."""
    rows = [("prompt", "response", "id"), ("2+2", "4", "1"), ("", "NA", "2"), ('say "a, b"\n', "x" * 200_000, "")]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    for name in ("a.csv", "a.csv.gz"):
        found = read(tmp_path / name)
        assert [(one.prompt, one.response) for one in found.examples] == [row[:2] for row in rows[1:]]
        assert (found.ignored, found.examples[1].where) == (("id",), f"{name}, row 2")


@pytest.mark.parametrize("line", ["a", "a,b,c", 'a,"b'])
def test_rows_of_csv_that_do_not_fit(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,response\nx,y\n{line}\n")
    with pytest.raises(UserError, match=r"^a.csv, (row 2|line [34]): got"):
        read(tmp_path / "a.csv")


def test_the_row_of_parquet_is_named(tmp_path: Path, jsonl: Callable[..., Path]) -> None:
    disable_progress_bars()
    Dataset.from_list([{"text": " "}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"^a.parquet, row 1: got an empty text"):
        read(tmp_path / "a.parquet")
