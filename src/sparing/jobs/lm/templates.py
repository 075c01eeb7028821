"""Chat templates are programs that come with a model: they run in a fork with little time and memory.

Jinja's sandbox keeps a template from files and from Python's insides, not from loops without end or texts without
bounds. Those are ended by the kernel, whatever the template does, and a run pays one fork for all its rows.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Messages = Sequence[tuple[str, str]]  # (role, content) in order

SECONDS = 10.0  # processor time of one conversation (s)

MEMORY = 1 << 30  # memory of the fork beside what it is born with (bytes)

CHARACTERS, TIMES = 1 << 17, 100  # the longest text is so many letters and so many times the contents


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a conversation was not rendered."""

    why: str


def rendered(tokenizer: Any, requests: Sequence[tuple[Messages, bool]]) -> list[str | Refusal]:
    """Render conversations, none empty, with a tokenizer's chat template; where one is refused, it is the last."""
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # of forks beside threads: this one runs no thread's code
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(read_end)
        _serve(write_end, lambda request: _one(tokenizer, *request), requests)
    # the parent's own copy: while one is open, the reading below finds no end
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as pipe:
        lines = pipe.read().split("\n")
    # after the reading: a fork that fills the pipe waits for its reader, and both would wait for good
    os.waitpid(child, 0)
    answers = [json.loads(line) for line in lines[:-1]]
    found = [text if kind == "text" else Refusal(text) for kind, text in answers]
    if len(found) < len(requests) and not (found and isinstance(found[-1], Refusal)):
        found.append(Refusal(f"it takes more than {SECONDS:g} s or {MEMORY >> 30} GiB"))
    return found


def _one(tokenizer: Any, messages: Messages, opened: bool) -> str:
    rows = [{"role": role, "content": content} for role, content in messages]
    text: str = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=opened)
    if len(text) > CHARACTERS + TIMES * sum(len(content) for _, content in messages):
        raise ValueError(f"it makes {len(text)} letters of a short conversation")
    return text


def _serve(write_end: int, render: Callable[[Any], str], requests: Sequence[Any]) -> None:
    """What the fork does; it does not return."""
    try:
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
                kind, text = _try_render(render, request)
                pipe.write(json.dumps((kind, text)) + "\n")
                if kind == "refusal":
                    break
    finally:
        # Not ``sys.exit``: the exit handlers and buffers belong to the parent.
        os._exit(0)


def _try_render(render: Callable[[Any], str], request: Any) -> tuple[str, str]:
    try:
        return "text", render(request)
    except MemoryError:
        return "refusal", f"it takes more than {MEMORY >> 30} GiB"
    except RecursionError:
        return "refusal", "it calls itself without end"
    except Exception as error:  # noqa: BLE001  a template may raise what it likes
        return "refusal", str(error)[:80]
