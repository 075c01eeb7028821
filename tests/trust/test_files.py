"""Files that others wrote: read whole, or refused in one line that names the place; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.cli import main
from sparing.errors import UserError
from sparing.jobs.folder import Folder
from sparing.jobs.lm.files import read
from sparing.jobs.lm.records import Chat, Pair, Text

DEEP = [b'{"text": ' + b"[" * depth + b"]" * depth + b"}" for depth in range(880, 1010, 10)]
"""Around the depth that Python's parser takes, where what is parsed may be too deep to be shown."""

LINES = {
    "latin-1": '{"text": "é"}'.encode("latin-1"),
    "utf-16 with its mark": '{"text": "é"}'.encode("utf-16"),
    "a mark inside": b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}',
    "nan": b'{"text": NaN}',
    "infinity as a role": b'{"messages": [{"role": Infinity, "content": "a"}]}',
    "a number of 5000 digits": b'{"text": ' + b"9" * 5000 + b"}",
    "half a character": b'{"text": "\\ud800"}',
    "half a character in a turn": b'{"messages": [{"role": "assistant", "content": "a\\udfff"}]}',
    "a raw zero": b'{"text": "a\0b"}',
    "only zeros": bytes(4096),
    "a list": b"[]",
    "a string": b'"text"',
    "null": b"null",
    "nothing": b"",
    "an escape for the terminal": b'{"\\u001b[2J": "a"}',
    "a line of a million": b'{"text": ' + b"1" * 10**6 + b"}",
    "no such kind": b'{"prompt": "a"}',
    "a message too many": b'{"messages": [[]]}',
    "cut": b'{"text": "a',
} | {f"{len(line) // 2} brackets": line for line in DEEP}


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    said = str(caught.value)
    assert said.startswith(f"{path.name}, ")
    assert "\n" not in said
    assert len(said) < 500
    return said


@pytest.mark.parametrize("name", LINES)
def test_lines_that_are_none(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "whole"}\n' * bool(LINES[name]) + LINES[name] + b"\n")
    assert ("line 2" in refused(path)) == bool(LINES[name]) or "line 3" in refused(path)


def test_what_may_look_strange_and_is_fine(tmp_path: Path) -> None:
    path, long = tmp_path / "data.jsonl", "word " * 200_000
    texts = ["a\r", "\u0000", "\U0001f600", "a\u2028b", "NaN", long]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps({"text": text}).encode() for text in texts) + b"\r\n")
    assert [example.text for example in read(path).examples] == texts


words = st.text(max_size=4) | st.sampled_from(["text", "prompt", "response", "messages", "role", "content", "output"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | words
nests = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))
lines = nests.map(lambda nest: json.dumps(nest).encode()) | st.binary(max_size=12)
whole = st.sampled_from([{"text": "a"}, {"prompt": "p", "response": "r"}, {"instruction": "i", "output": "o"}])


@settings(max_examples=150)
@given(st.lists(lines | whole.map(lambda row: json.dumps(row).encode()), max_size=4), st.sampled_from([b"\n", b"\r\n"]))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], end: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(end.join(rows))
    try:
        found = read(path).examples
    except UserError:
        refused(path)
    else:
        assert found
        assert all(isinstance(example, Text | Pair | Chat) for example in found)


def test_the_command_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINES["half a character"])
    assert main(["finetune", str(tmp_path / "model"), str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("sparing: data.jsonl, line 1: got half a character in text; ")
    assert not (tmp_path / "out").exists()


MARKS = {
    "a list": "[1]", "a word": '"run"', "null": "null", "a number": "3", "empty": "", "torn": '{"seed": ',
    "too deep": "[" * 5000, "of another coding": "é", "of too many digits": '{"seed": ' + "9" * 5000 + "}",
    "deep inside": '{"seed": ' + "[" * 950 + "]" * 950 + "}",
}  # fmt: skip


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.json").write_text(MARKS[name], encoding="latin-1")
    with pytest.raises(UserError, match="resume: got ") as caught:
        Folder(tmp_path, resume=True).newest({"seed": 0})
    assert "\n" not in str(caught.value)
