"""What one record of a user's file is: a text, a prompt with its answer, or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from sparing.errors import UserError
from sparing.jobs.lm.messages import Message, brief, refuse, string, tools, turn
from sparing.seeds import stream

FORMS = (
    '{"text"}, {"prompt", "response"}, {"prompt", "completion"}, {"instruction", "input", "output"}, {"messages"} or '
    '{"conversations"}'
)


@dataclass(frozen=True, slots=True)
class Text:
    """A document, learnt whole."""

    where: str  # the file, and the line in it (from 1)
    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt that is only read and a response that is learnt."""

    where: str  # the file, and the line in it (from 1)
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, of which turns of the assistant are learnt."""

    where: str  # the file, and the line in it (from 1)
    messages: tuple[Message, ...]  # as chat templates of transformers take them
    learnt: tuple[int, ...]  # the messages that are learnt (indices)
    tools: tuple[Message, ...] = ()  # JSON schemas of what may be called


Example = Text | Pair | Chat  # one record of a file

# Fields of each kind, the first that a record has all of counts: a file with conversations often has parts of them too.
_KINDS = (
    ("messages",), ("conversations",), ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"),
    ("text",),
)  # fmt: skip
_ALSO = {"messages": ("tools", "system"), "conversations": ("tools", "system"), "instruction": ("input",)}


class NothingToLearnError(UserError):
    """A record is in order but teaches nothing: left out of a file that has others."""


def _nothing(where: str, got: str, why: str) -> NoReturn:
    raise NothingToLearnError(where, got=got, why=why, do="drop the line")


def _turns(row: Mapping[str, Any], name: str, where: str, ignored: set[str]) -> tuple[list[Message], list[int]]:
    """The messages of a field, and which of them may be learnt."""
    value = row[name]
    if not isinstance(value, list) or not value:
        refuse(where, brief(value)[:40], f'"{name}" must be a list with a message', "give one or more")
    found = [turn(message, where, ignored) for message in value]
    return [message for message, _ in found], [index for index, (_, learnt) in enumerate(found) if learnt]


def _chat(row: Mapping[str, Any], kind: Sequence[str], where: str, ignored: set[str]) -> Chat:
    """A conversation in one field, or in two of which the second is learnt."""
    messages, learnt = _turns(row, kind[-1], where, ignored)
    if not learnt:
        _nothing(where, "no assistant message", "only assistant turns are learnt")
    before: list[Message] = []
    if len(kind) == 2:
        before, _ = _turns(row, kind[0], where, ignored)
    elif row.get("system") and messages[0]["role"] != "system":
        before = [{"role": "system", "content": string(row, "system", where)}]
    known = tools(row.get("tools"), where)
    return Chat(where, (*before, *messages), tuple(index + len(before) for index in learnt), known)


def _kind(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """The fields that make a record what it is."""
    # a parquet file has every field in every row, and null where there is nothing
    filled = {name for name, value in row.items() if value is not None}
    found = [kind for given in (filled, set(row)) for kind in _KINDS if given.issuperset(kind)]
    if not found:
        got = f"fields {', '.join(sorted(map(str, row))) or 'none'}"
        refuse(where, got, "no known kind of record", f"write {FORMS}")
    return found[0]


def example(row: object, where: str, ignored: set[str]) -> Example:
    """One parsed line; ``ignored`` collects the fields of it that are not used.

    An instruction becomes the pair of ``instruction, blank line, [input, blank line]`` and ``output``.
    """
    if not isinstance(row, dict):
        refuse(where, type(row).__name__, "each line must be a JSON object", f"write {FORMS}")
    kind = _kind(row, where)
    turns = kind[0] in {"messages", "conversations"} or (kind[0] == "prompt" and isinstance(row[kind[1]], list))
    also = ("tools",) if turns and len(kind) == 2 else _ALSO.get(kind[0], ())
    ignored.update(set(row) - {*kind, *also})
    if turns:
        return _chat(row, kind, where, ignored)
    learnt = string(row, kind[-1], where)
    if not learnt.strip():
        _nothing(where, "an empty text", "a record with no tokens teaches nothing")
    if kind == ("text",):
        return Text(where, learnt)
    if kind[0] == "prompt":
        return Pair(where, string(row, "prompt", where), learnt)
    parts = [string(row, name, where) for name in ("instruction", "input") if row.get(name) is not None]
    return Pair(where, "".join(f"{part}\n\n" for part in parts if part), learnt)


def _cut(example: Example, share: float) -> tuple[list[Example], list[Example]] | None:
    """A document in two where a line ends, the second of about this share; None if that leaves one of them empty."""
    if not isinstance(example, Text):
        return None
    least = int(len(example.text) * (1 - share))
    # a paragraph, if one ends in time
    ends = (example.text.find(end, least) + len(end) for end in ("\n\n", "\n") if example.text.find(end, least) >= 0)
    place = next(ends, 0)
    parts = example.text[:place], example.text[place:]
    if not all(part.strip() for part in parts):
        return None
    return [Text(example.where, parts[0])], [Text(example.where, parts[1])]


def split(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Split examples into train and held out, each in file order; at least one is held out if ``share`` is above 0.

    A single document is cut where a line ends, and its end is held out.
    """
    if not share:
        return list(examples), []
    if len(examples) == 1 and (cut := _cut(examples[0], share)):
        return cut
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
