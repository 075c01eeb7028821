"""Chat templates are programs that come with a model: they run in a fork with little time and memory.

Jinja's sandbox keeps a template from files and from Python's insides, not from loops without end or texts without
bounds. Those are ended by the kernel, whatever the template does, and a run pays one fork for all its rows.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import resource
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparing.jobs.lm.messages import Message

SECONDS = 10.0  # processor time of one conversation (s)

MEMORY = 1 << 30  # memory of the fork beside what it is born with (bytes)

CHARACTERS, TIMES = 1 << 17, 100  # the longest text is so many letters and so many times the contents


# The day that templates write as today, so that the same run has the same rows on any day. Llama's own templates fall
# back to it where there is no clock.
TODAY = datetime.datetime(2024, 7, 26, tzinfo=datetime.UTC)


class Request(NamedTuple):
    """A conversation to render."""

    messages: Sequence[Message]  # none: an empty text
    tools: Sequence[Message] = ()  # JSON schemas of what may be called
    opened: bool = False  # whether the start of an assistant's turn follows


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marked: tuple[tuple[int, int], ...] = ()  # what the template itself marks as generated (first letter, one past)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a conversation was not rendered."""

    why: str
    last: bool = False  # whether no more were tried after it


def tells_date(tokenizer: Any) -> bool:
    """Whether a tokenizer's chat template asks for the day."""
    return "strftime_now" in json.dumps(getattr(tokenizer, "chat_template", None))


def rendered(tokenizer: Any, requests: Sequence[Request]) -> list[Rendered | Refusal]:
    """Render conversations with a tokenizer's chat template; one that takes too much is the last."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # of forks beside threads: this one runs no thread's code
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(read_end)
        _serve(write_end, lambda request: _one(tokenizer, request), requests)
    # the parent's own copy: while one is open, the reading below finds no end
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        lines = pipe.read().split("\n")
    # after the reading: a fork that fills the pipe waits for its reader, and both would wait for good
    os.waitpid(child, 0)
    found = [_read(json.loads(line)) for line in lines[:-1]]
    if len(found) < len(requests) and not (found and isinstance(found[-1], Refusal) and found[-1].last):
        found.append(Refusal(f"it takes more than {SECONDS:g} s or {MEMORY >> 30} GiB", last=True))
    return found


def _read(answer: Any) -> Rendered | Refusal:
    kind, *parts = answer
    return Rendered(parts[0], tuple(map(tuple, parts[1]))) if kind == "text" else Refusal(*parts)


def _one(tokenizer: Any, request: Request) -> Rendered:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, tools, opened = request
    if not messages:
        # transformers renders no empty conversation
        return Rendered("")
    template = tokenizer.get_chat_template(None, list(tools) or None)
    # the spans of letters, which ``apply_chat_template`` turns into tokens for fast tokenizers alone
    marks = bool(re.search(r"\{%-?\s*generation\s*-?%\}", template)) and not opened
    (text,), spans = render_jinja_template(
        [list(messages)],
        tools=list(tools) or None,
        chat_template=template,
        return_assistant_tokens_mask=marks,
        add_generation_prompt=opened,
        **tokenizer.special_tokens_map,
    )
    if len(text) > CHARACTERS + TIMES * len(json.dumps([*messages, *tools])):
        raise ValueError(f"it makes {len(text)} letters of a short conversation")
    return Rendered(text, tuple(map(tuple, spans[0])) if marks else ())


class _Clock:
    """What stands for ``datetime`` where templates ask for the day."""

    @staticmethod
    def now() -> datetime.datetime:
        """The day of every run."""
        return TODAY


def _serve(write_end: int, render: Callable[[Any], Rendered], requests: Sequence[Any]) -> None:
    """What the fork does; it does not return."""
    try:
        from transformers.utils import chat_template_utils

        # here only, where no other code runs: a function given to a template arrives there as a text
        chat_template_utils.datetime = _Clock
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    except (OSError, ValueError):
        # a system without this; time is bounded all the same
        pass
    try:
        # The default action kills the fork, which no ``except`` in a template can stop.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        with os.fdopen(write_end, "w", encoding="utf-8") as pipe:
            for request in requests:
                # anew for each conversation, and in processor time: a busy machine is no reason to refuse one
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                answer = _try_render(render, request)
                pipe.write(json.dumps(answer) + "\n")
                if answer[-1] is True:
                    break
    finally:
        # Not ``sys.exit``: the exit handlers and buffers belong to the parent.
        os._exit(0)


def _try_render(render: Callable[[Any], Rendered], request: Any) -> tuple[Any, ...]:
    try:
        return "text", *render(request)
    except MemoryError:
        return "refusal", f"it takes more than {MEMORY >> 30} GiB", True
    except RecursionError:
        return "refusal", "it calls itself without end", True
    except Exception as error:  # noqa: BLE001  a template may raise what it likes
        return "refusal", str(error)[:80], False
