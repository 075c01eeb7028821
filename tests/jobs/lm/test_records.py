"""Reading the user's file: every kind, and every way to be wrong in one line with its number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs.lm.files import read
from sparing.jobs.lm.records import Chat, Example, Pair, Text, split
from talks import talk

HELLO = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def examples(path: Path) -> list[Example]:
    return read(path).examples


def test_the_forms(jsonl: Callable[..., Path]) -> None:
    first = "data.jsonl, line 1"
    assert examples(jsonl({"text": "a"})) == [Text(first, "a")]
    assert examples(jsonl({"prompt": "p", "response": "r"})) == [Pair(first, "p", "r")]
    assert examples(jsonl({"prompt": "p", "completion": "r"})) == [Pair(first, "p", "r")]
    assert examples(jsonl({"instruction": "i", "input": "n", "output": "o"})) == [Pair(first, "i\n\nn\n\n", "o")]
    assert examples(jsonl({"instruction": "i", "input": "", "output": "o"})) == [Pair(first, "i\n\n", "o")]
    assert examples(jsonl({"instruction": "i", "input": None, "output": "o"})) == [Pair(first, "i\n\n", "o")]
    assert examples(jsonl({"instruction": "i", "output": "o"})) == [Pair(first, "i\n\n", "o")]
    assert examples(jsonl(HELLO)) == [talk(first, (("user", "Hi"), ("assistant", "Hello")))]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_one_conversation_in_every_spelling(jsonl: Callable[..., Path]) -> None:
    """OpenAI's, transformers', ShareGPT's and TRL's: all become what chat templates of transformers take."""
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "So."},
    ]
    whole = Chat("data.jsonl, line 1", tuple(turns), (2, 4), (TOOL,))
    openai = [*turns[:2], {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]}, *turns[3:]]  # fmt: skip
    parts = [
        *turns[:4],
        {"role": "assistant", "content": [{"type": "text", "text": "S"}, {"type": "text", "text": "o."}]},
    ]
    shared = [
        {"from": "human", "value": "u"}, {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"}, {"from": "gpt", "value": "So."},
    ]  # fmt: skip
    for row in (
        {"messages": turns, "tools": [TOOL]},
        {"messages": openai, "tools": json.dumps([TOOL["function"]])},
        {"messages": parts, "tools": [TOOL["function"]]},
        {"conversations": shared, "system": "s", "tools": json.dumps([TOOL])},
        {"prompt": turns[:2], "completion": turns[2:], "tools": [TOOL]},
    ):
        assert examples(jsonl(row)) == [whole]


def test_turns_that_are_only_read(jsonl: Callable[..., Path]) -> None:
    """Those before TRL's completion, and those of OpenAI's weight 0."""
    hello = HELLO["messages"]
    before = examples(jsonl({"prompt": [*hello, hello[0]], "completion": [hello[1]]}))[0]
    weighed = examples(jsonl({"messages": [hello[0], hello[1] | {"weight": 0}, *hello]}))[0]
    assert before.learnt == weighed.learnt == (3,)
    assert before.messages == weighed.messages


def test_what_is_not_used_is_named_once(jsonl: Callable[..., Path]) -> None:
    odd = {"role": "user", "content": "Hi", "stamp": 3}
    path = jsonl({"messages": [odd, HELLO["messages"][1]], "id": 1, "prompt": "Hi"}, HELLO | {"source": "x"})
    assert read(path).ignored == ("id", "prompt", "source", "stamp of messages")


def test_blank_lines_windows_ends_and_a_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "\xc3\xa4"}')
    assert examples(path) == [Text("d.jsonl, line 1", "a"), Text("d.jsonl, line 4", "ä")]


BROKEN = [
    (b'{"text": "a"}\n{"text": \n', "line 2", "not JSON"),
    (b'{"text": "a"}\n[1]\n', "line 2", "JSON object"),
    (b'{"text": "a"}\n{"txt": "a"}\n', "line 2", "fields txt"),
    (b'{"label": 1, "prompt": "a"}\n', "line 1", "fields label, prompt"),
    (b'{"text": null}\n', "line 1", "text = null"),
    (b'{"conversations": [{"from": "bard", "value": "x"}]}\n', "line 1", "from 'bard'"),
    (b'{"conversations": [{"from": "function_call", "value": "f(x)"}]}\n', "line 1", "must be JSON"),
    (b'{"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}\n', "line 1", "text alone"),
    (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}\n', "line 1", "a call names a function"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": 2}]}\n', "line 1", "weight = 2"),
    (b'{"messages": [{"role": "assistant", "content": "x"}], "tools": "add"}\n', "line 1", "must be JSON"),
    (b'{"prompt": "x", "completion": [{"role": "assistant", "content": "x"}]}\n', "line 1", '"prompt" must be a list'),
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
        examples(path)
    message = str(caught.value)
    assert where in message
    assert what in message
    assert message.startswith("d.jsonl, ")
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("place", ["none.jsonl", "none.parquet", "none.txt.gz"])
def test_a_file_that_cannot_be_opened(tmp_path: Path, place: str) -> None:
    with pytest.raises(UserError, match=rf"cannot be read; pass an existing {place[4:]} file|pass a parquet file"):
        examples(tmp_path / place)


def test_the_split_is_a_partition_by_seed_alone() -> None:
    some = [Text(f"line {i:02}", str(i)) for i in range(30)]
    train, held = split(some, 0.2, seed=4)
    assert len(held) == 6
    assert sorted(train + held, key=lambda e: e.where) == some
    assert split(some, 0.2, seed=4) == (train, held)
    assert split(some, 0.2, seed=5) != (train, held)
    assert split(some, 0.0, seed=4) == (some, [])
    assert len(split(some, 0.001, seed=4)[1]) == 1


def test_of_a_single_document_the_end_is_held_out() -> None:
    """Cut where a paragraph ends, else a line; what has neither is refused."""
    for text in ("one\n\ntwo\nthree\n\nfour\n\nfive", "one\ntwo\nthree\nfour\nfive"):
        (first,), (second,) = split([Text("a.txt", text)], 0.5, seed=0)
        assert first.text + second.text == text
        assert second.text == "four" + text[text.index("four") + 4 :]


def test_a_split_that_leaves_nothing() -> None:
    with pytest.raises(UserError, match="held_out"):
        split([Text("line 1", "a")], 0.5, seed=0)
