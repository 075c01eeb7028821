"""Reading the user's file: every kind, and every way to be wrong in one line with its number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs.lm.records import Chat, Pair, Text, read_examples, split

HELLO = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def test_the_four_forms(jsonl: Callable[..., Path]) -> None:
    assert read_examples(jsonl({"text": "a"})) == [Text(1, "a")]
    assert read_examples(jsonl({"prompt": "p", "response": "r"})) == [Pair(1, "p", "r")]
    assert read_examples(jsonl({"instruction": "i", "input": "n", "output": "o"})) == [Pair(1, "i\n\nn\n\n", "o")]
    assert read_examples(jsonl({"instruction": "i", "input": "", "output": "o"})) == [Pair(1, "i\n\n", "o")]
    assert read_examples(jsonl({"instruction": "i", "output": "o"})) == [Pair(1, "i\n\n", "o")]
    assert read_examples(jsonl(HELLO)) == [Chat(1, (("user", "Hi"), ("assistant", "Hello")))]


def test_blank_lines_windows_ends_and_a_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "\xc3\xa4"}')
    assert read_examples(path) == [Text(1, "a"), Text(4, "ä")]


BROKEN = [
    (b'{"text": "a"}\n{"text": \n', "line 2", "not JSON"),
    (b'{"text": "a"}\n[1]\n', "line 2", "JSON object"),
    (b'{"text": "a"}\n{"txt": "a"}\n', "line 2", "fields txt"),
    (b'{"text": "a", "label": 1}\n', "line 1", "fields label, text"),
    (b"{}\n", "line 1", "fields none"),
    (b'{"text": 3}\n', "line 1", "text = 3"),
    (b'{"text": "a"}\n{"prompt": "p", "response": "r"}\n', "line 2", "a pair after a text on line 1"),
    (b'{"text": "a"}\n\n{"text": "\xe4"}\n', "line 3", "byte 0xe4"),
    (b'{"text": " "}\n', "line 1", "no tokens"),
    (b'{"prompt": "p", "response": ""}\n', "line 1", "no tokens"),
    (b'{"messages": []}\n', "line 1", "messages"),
    (b'{"messages": [{"role": "user"}]}\n', "line 1", "role"),
    (b'{"messages": [{"role": "user", "content": "x"}]}\n', "line 1", "no assistant"),
    (b'{"messages": [{"role": "assistant", "content": 1}]}\n', "line 1", "content = 1"),
    (b"[" * 100_000 + b"\n", "line 1", "JSON"),
    (b"", "empty", "write lines"),
    (b"\n \n", "empty", "write lines"),
]


@pytest.mark.parametrize(("content", "where", "what"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, content: bytes, where: str, what: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_examples(path)
    message = str(caught.value)
    assert where in message
    assert what in message
    assert message.startswith("d.jsonl, ")
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("place", ["none.jsonl", "."])
def test_a_file_that_cannot_be_opened(tmp_path: Path, place: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_examples(tmp_path / place)


def test_the_split_is_a_partition_by_seed_alone() -> None:
    examples = [Text(i, str(i)) for i in range(30)]
    train, held = split(examples, 0.2, seed=4)
    assert len(held) == 6
    assert sorted(train + held, key=lambda e: e.line) == examples
    assert split(examples, 0.2, seed=4) == (train, held)
    assert split(examples, 0.2, seed=5) != (train, held)
    assert split(examples, 0.0, seed=4) == (examples, [])
    assert len(split(examples, 0.001, seed=4)[1]) == 1


def test_a_split_that_leaves_nothing() -> None:
    with pytest.raises(UserError, match="held_out"):
        split([Text(1, "a")], 0.5, seed=0)
