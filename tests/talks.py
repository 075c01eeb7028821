"""Conversations as tests write them: who says what."""

from __future__ import annotations

from sparing.jobs.lm.messages import Message
from sparing.jobs.lm.records import Chat


def messages(*turns: tuple[str, str]) -> tuple[Message, ...]:
    """Turns as chat templates take them."""
    return tuple({"role": role, "content": content} for role, content in turns)


def talk(where: str, turns: tuple[tuple[str, str], ...]) -> Chat:
    """A conversation of which all that the assistant says is learnt."""
    return Chat(where, messages(*turns), tuple(at for at, (role, _) in enumerate(turns) if role == "assistant"))
