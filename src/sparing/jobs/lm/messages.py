"""The turns of a conversation, from the ways they are written in the world to what chat templates of transformers take.

That is ``{"role", "content"}``, of an assistant also ``tool_calls`` and ``reasoning_content``; or ShareGPT's ``{"from",
"value"}``. Tools are JSON schemas. https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from sparing.errors import UserError

Message = Mapping[str, Any]

# ShareGPT's names of who speaks, with those that LLaMA-Factory added for tools
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip

REASONING = ("reasoning_content", "reasoning", "thinking")  # transformers gives a template each of them
_PASSED_ON = ("name", "tool_call_id", *REASONING)  # what templates know beside role, content and calls


def refuse(where: str, got: str, why: str, do: str) -> NoReturn:
    """Refuse a record."""
    raise UserError(where, got=got, why=why, do=do) from None


def brief(value: object) -> str:
    """A value of a record, cut to what fits in a line."""
    try:
        # default: parquet has dates and bytes
        return json.dumps(value, default=str)[:60]
    except RecursionError:
        return type(value).__name__


def string(row: Mapping[str, Any], name: str, where: str) -> str:
    """A field that must be a text."""
    value = row[name]
    if not isinstance(value, str):
        refuse(where, f"{name} = {brief(value)[:40]}", f'"{name}" must be a string', "quote it")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        refuse(where, f"half a character in {name}", "it cannot be written as UTF-8", "escape both halves, or drop it")
    return value


def _content(row: Mapping[str, Any], where: str) -> str:
    """A text, or its parts as the interface of OpenAI has them, joined."""
    value = row["content"]
    if not isinstance(value, list):
        return string(row, "content", where)
    for part in value:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            refuse(where, brief(part), "a language model reads text alone", "drop pictures and sounds")
    return "".join(string(part, "text", where) for part in value)


def _call(call: object, where: str) -> dict[str, Any]:
    """One call of a tool, its arguments as a mapping: templates write them as JSON themselves."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        do = 'write {"function": {"name": "…", "arguments": {…}}}'
        refuse(where, brief(call), "a call names a function", do)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json(arguments, "arguments", where)
    if not isinstance(arguments, Mapping):
        refuse(where, f"arguments = {brief(arguments)}", "they must be a JSON object", 'write {"name": value}')
    known = {"id": call["id"]} if isinstance(call, Mapping) and isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _json(text: str, name: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        refuse(where, f"{name} = {text[:40]!r}", "it must be JSON", "write it as JSON")


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        refuse(where, f"tool_calls = {brief(value)}", "it must be a list of calls", "put it into brackets")
    return [_call(call, where) for call in value]


def _shared(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A turn of ShareGPT as one of transformers."""
    speaker, value = string(row, "from", where), string(row, "value", where)
    if speaker not in SPEAKERS:
        refuse(where, f"from {speaker!r}", "nobody knows who speaks", f"write one of {', '.join(SPEAKERS)}")
    if speaker != "function_call":
        return {"role": SPEAKERS[speaker], "content": value}
    calls = _json(value, "function_call", where)
    return {"role": "assistant", "tool_calls": _calls(calls if isinstance(calls, list) else [calls], where)}


def turn(row: object, where: str, ignored: set[str]) -> tuple[dict[str, Any], bool]:
    """One turn, and whether it may be learnt: not with ``"weight": 0``, as OpenAI's files have it."""
    if not isinstance(row, Mapping):
        refuse(where, brief(row), 'a message has "role" and "content"', "give each message these two strings")
    given = {name: value for name, value in row.items() if value is not None}
    used = {"weight", *(("from", "value") if "from" in given and "role" not in given else ("role", "content"))}
    calls = given.get("tool_calls") or []
    if not used - {"weight"} <= set(given) and not (calls and "role" in given):
        refuse(where, brief(row), 'a message has "role" and "content"', "give each message these two strings")
    weight = given.get("weight", 1)
    if weight not in (0, 1):
        refuse(where, f"weight = {brief(weight)}", "a turn is learnt (1) or only read (0)", "write 0 or 1")
    found: dict[str, Any]
    if "from" in used:
        found = _shared(given, where)
    else:
        role = string(given, "role", where)
        if role != "assistant" and role.strip().lower() == "assistant":
            refuse(where, f"role {role!r}", "its turns would be read and not learnt", 'write "assistant"')
        found = {"role": role, **({"content": _content(given, where)} if "content" in given else {})}
        if calls:
            found["tool_calls"] = _calls(calls, where)
        found |= {name: string(given, name, where) for name in _PASSED_ON if name in given}
        used |= {"tool_calls", *_PASSED_ON}
    ignored.update(f"{name} of messages" for name in set(given) - used)
    return found, bool(weight) and found["role"] == "assistant" and ("tool_calls" in found or bool(found["content"]))


def tools(value: object, where: str) -> tuple[Message, ...]:
    """The functions that a conversation may call, as JSON schemas; files hold them as JSON or as a text of it."""
    found: Any = _json(value, "tools", where) if isinstance(value, str) and value else value or []
    fine = isinstance(found, list) and all(
        isinstance(tool, Mapping) and isinstance(tool.get("function", tool), Mapping) for tool in found
    )
    if not fine:
        refuse(where, f"tools = {brief(value)}", '"tools" must be a list of JSON schemas', "put them into brackets")
    return tuple(tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in found)
