"""The user's JSONL file: one JSON object per line, all of one kind, read whole or refused with the line number."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from sparing.errors import UserError
from sparing.seeds import stream

FORMS = '{"text"}, {"prompt", "response"}, {"instruction", "input", "output"} or {"messages"}'


@dataclass(frozen=True, slots=True)
class Text:
    """A document, learnt whole."""

    line: int  # where it stands in the file (from 1)
    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt that is only read and a response that is learnt."""

    line: int  # where it stands in the file (from 1)
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, of which the assistant's turns are learnt."""

    line: int  # where it stands in the file (from 1)
    messages: tuple[tuple[str, str], ...]  # (role, content) in order


Example = Text | Pair | Chat  # one line of the file


def _refuse(line: int, got: str, why: str, do: str) -> NoReturn:
    raise UserError(f"line {line}", got=got, why=why, do=do) from None


def _string(row: Mapping[str, Any], name: str, line: int) -> str:
    value = row[name]
    if not isinstance(value, str):
        _refuse(line, f"{name} = {json.dumps(value)[:40]}", f'"{name}" must be a string', "quote it")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        _refuse(line, f"half a character in {name}", "it cannot be written as UTF-8", "escape both halves, or drop it")
    return value


def _message(message: object, line: int) -> tuple[str, str]:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        got = json.dumps(message)[:60]
        _refuse(line, got, 'a message has exactly "role" and "content"', "give each message these two strings")
    return _string(message, "role", line), _string(message, "content", line)


def _chat(row: Mapping[str, Any], line: int) -> Chat:
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        _refuse(line, json.dumps(messages)[:40], '"messages" must be a list with a message', "give one or more")
    turns = tuple(_message(message, line) for message in messages)
    for role, _ in turns:
        if role != "assistant" and role.strip().lower() == "assistant":
            _refuse(line, f"role {role!r}", "its turns would be read and not learnt", 'write "assistant"')
    if not any(role == "assistant" and content for role, content in turns):
        _refuse(line, "no assistant message", "only assistant turns are learnt", "add one or drop the line")
    return Chat(line, turns)


def example(row: object, line: int) -> Example:
    """One parsed line as a text, a pair or a chat.

    An instruction becomes the pair of ``instruction, blank line, [input, blank line]`` and ``output``.
    """
    if not isinstance(row, dict):
        _refuse(line, type(row).__name__, "each line must be a JSON object", f"write {FORMS}")
    names = set(row)
    if names == {"messages"}:
        return _chat(row, line)
    found: Text | Pair
    if names == {"text"}:
        found = Text(line, learnt := _string(row, "text", line))
    elif names == {"prompt", "response"}:
        found = Pair(line, _string(row, "prompt", line), learnt := _string(row, "response", line))
    elif names in ({"instruction", "output"}, {"instruction", "input", "output"}):
        parts = [_string(row, name, line) for name in ("instruction", "input") if name in row]
        learnt = _string(row, "output", line)
        found = Pair(line, "".join(f"{part}\n\n" for part in parts if part), learnt)
    else:
        _refuse(line, f"fields {', '.join(sorted(names)) or 'none'}", "no known kind of record", f"write {FORMS}")
    if not learnt.strip():
        _refuse(line, "an empty text", "a record with no tokens teaches nothing", "drop the line")
    return found


def _parse(text: str, line: int) -> Example:
    try:
        return example(json.loads(text), line)
    except json.JSONDecodeError as error:
        got = f"{text[:40]!r} (column {error.colno}: {error.msg})"
        _refuse(line, got, "it is not JSON", "write one whole JSON object per line")
    except UserError:
        raise
    except ValueError as error:
        # such as a number of more digits than Python reads
        _refuse(line, f"{text[:40]!r}", f"it cannot be read ({error})", "write one whole JSON object per line")
    except RecursionError:
        _refuse(line, "brackets without end", "it is nested too deep", "write a flat JSON object")


def _contents(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        got = f"{path} ({error.strerror})"
        raise UserError("data", got=got, why="the file cannot be read", do="pass an existing JSONL file") from None
    try:
        # some editors on Windows begin a file with a byte-order mark, which JSON refuses
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, got = raw[: error.start].count(b"\n") + 1, f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        _refuse(line, got, "it is not UTF-8", "convert the file: iconv -f LATIN1 -t UTF-8 OLD > NEW")


def read_examples(path: Path) -> list[Example]:
    """Read a JSONL file of examples of one kind, UTF-8 with or without byte-order mark; blank lines are skipped."""
    try:
        # not ``splitlines``: a JSON text may hold U+2028, which would end a line in its middle
        lines = _contents(path).split("\n")
        found = [_parse(text, number) for number, text in enumerate(lines, start=1) if text.strip()]
        if not found:
            raise UserError("data", got="an empty file", why="there is nothing to learn", do=f"write lines of {FORMS}")
        for other in found:
            if type(other) is not type(first := found[0]):
                kinds = f"a {type(other).__name__.lower()} after a {type(first).__name__.lower()} on line {first.line}"
                _refuse(other.line, kinds, "one file holds one kind of record", "split the file by kind")
    except UserError as error:
        raise UserError(f"{path.name}, {error.what}", got=error.got, why=error.why, do=error.do) from None
    return found


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Split examples into train and held out, each in file order; at least one is held out if ``share`` is above 0."""
    if not share:
        return list(examples), []
    count = max(1, round(share * len(examples)))
    if count >= len(examples):
        got = f"{share} of {len(examples)} record(s)"
        raise UserError("held_out", got=got, why="nothing would be left to learn", do="pass --held-out 0 or more data")
    order = torch.randperm(len(examples), generator=stream(seed, "held_out")).tolist()
    chosen = set(order[:count])
    parts: tuple[list[Example], list[Example]] = ([], [])
    for index, item in enumerate(examples):
        parts[index in chosen].append(item)
    return parts
