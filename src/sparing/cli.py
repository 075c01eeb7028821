"""The command line: settings dataclasses in, one job run, an exit status out.

Tables go to standard output, progress and logs to standard error. Exit status 0: done; 1: the run failed; 2: the
user's mistake, reported in one line; 130: interrupted, after saving where there was something to save.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from sparing.errors import RunError, UserError, require, shown
from sparing.jobs import run_file
from sparing.jobs.interrupts import catch_interrupts
from sparing.jobs.limits import Group
from sparing.jobs.renamed import new_name


@dataclass(frozen=True, slots=True)
class Verb:
    """One command: where its job lives and what it is for."""

    module: str  # import path of the job; it exports ``Settings``, ``run(settings) -> Record`` and ``show(record)``
    summary: str  # one line for the list of commands


VERBS: dict[str, Verb] = {
    "demo": Verb("sparing.jobs.demo", "the whole mission in miniature, on real data, with a report page"),
    "plan": Verb("sparing.jobs.plan", "what fits this memory or cluster: full, LISA, LoRA, 14 ways to split; the pick"),
    "probe": Verb("sparing.jobs.probe", "measure the links of a cluster under torchrun, for `plan --topology`"),
    "fetch": Verb("sparing.jobs.fetch", "list the known data sets and models; fetch one into the cache"),
    "finetune": Verb("sparing.jobs.finetune", "fine-tune a Hugging Face causal language model on your files"),
    "pretrain": Verb("sparing.jobs.pretrain", "train a dense or sparse language model from scratch on text"),
    "transfer": Verb("sparing.jobs.transfer", "find the best learning rate at every width and density, rule by rule"),
    "condense": Verb("sparing.jobs.condense", "distil a data set into a few images per class"),
    "adapt": Verb("sparing.jobs.adapt", "learn which tokens of a document a language model should learn from"),
    "attribute": Verb("sparing.jobs.attribute", "which training rows made a prediction, checked by retraining"),
    "scan": Verb("sparing.jobs.scan", "walk away from a finished model: which side of its valley is flat, and why"),
    "merge": Verb("sparing.jobs.merge", "predict whether models merge, merge them from disk, measure what it loses"),
    "federate": Verb("sparing.jobs.federate", "train over clients that keep their data: FedSign and rivals, priced"),
    "invert": Verb("sparing.jobs.invert", "find coefficients of a differential equation through its solver"),
    "evaluate": Verb("sparing.jobs.evaluate", "held-out loss and tasks of a language model, alone or against another"),
    "compare": Verb(
        "sparing.jobs.compare", "put several finished runs on one page: curves, tables, settings that differ"
    ),
}


SHELLS = ("bash", "zsh")

# written by `make completions`: what all verbs can be asked takes seconds to gather
COMPLETIONS = Path(__file__).parent / "completions"


# either shows the traceback of an error: a flag of every verb, or an environment variable
DEBUG, DEBUG_VARIABLE = "--debug", "SPARING_DEBUG"

CONFIG = "--config"  # a flag of every verb too: a TOML file that gives settings

# below the help of a verb, which is made of its settings alone
ALSO = f"""
{CONFIG} FILE reads these settings from a TOML file, and the command line wins over it; --json prints one JSON
document; {DEBUG} shows where an error came from.
"""

UNEXPECTED = "this is a bug of sparing"  # in the line of every unforeseen error; tests look for it


class MisuseError(ValueError):
    """Arguments that do not fit a verb's settings; the message is one line."""


def _overview() -> str:
    """The text of ``sparing --help``."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return f"""usage: sparing VERB [OPTIONS]

Train deep networks with little: little memory, few tuning runs, a slow network.

{verbs}

sparing VERB --help shows every setting with its unit and default; --config FILE reads settings from a TOML file,
--json prints one JSON document, --debug shows where an error came from.
sparing --print-completion bash prints what completes all this in your shell."""


def _parse(name: str, settings: type, arguments: Sequence[str]) -> Any:
    """Read one verb's settings from its arguments, and from the file that they name."""
    arguments, path = _without_config(arguments)
    # before tyro, which answers an old flag with others of similar spelling
    if renamed := new_name(name, arguments):
        raise MisuseError(renamed)
    import tyro

    file = path and run_file.Settings(path, name, settings, tyro.MISSING)
    told: dict[str, Any] = {"default": file.defaults} if file else {}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(own_first(settings), args=list(arguments), prog=f"sparing {name}", **told)
    except SystemExit as stop:
        # help has been printed: status 0 is no mistake
        if not stop.code:
            sys.stdout.write(ALSO)
            raise
        # the parser's message without its box
        words = " ".join(re.sub(r"[│╭╮╰╯─]+|-{4,}", " ", complaint.getvalue()).split())
        words = re.sub(r"For full helptext.*", "", words)
        words = re.sub(r"^(Value error|Required options|Unrecognized options|Parsing error)\s*", "", words)
        words = re.sub(r"Error parsing \S+: ", "", words).strip()
        # a value that the file gives and the command line does not
        key = words.partition(":")[0]
        if file and file.has(key) and not any(word.partition("=")[0] == _flag_of(key) for word in arguments):
            words = words.replace(key, file.where(key), 1)
        raise MisuseError(f"{words}; see `sparing {name} --help`") from None


def _without_config(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """The words without ``--config FILE``, and the file."""
    rest, path, words = list[str](), None, iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != CONFIG:
            rest.append(word)
            continue
        value = value if equals else next(words, "")
        named = bool(value) and not value.startswith("--")
        require(named, "config", value or "nothing", "it names no file", "pass a TOML file with settings")
        require(path is None, "config", "two files", "one is read", "pass one of them")
        path = Path(value)
    return rest, path


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@contextlib.contextmanager
def _exiting_at_interrupt() -> Iterator[None]:
    """While modules are imported, Ctrl-C ends the process at once: third-party modules swallow it or print a trace."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"sparing: interrupted\n")
        os._exit(130)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """While modules are imported next to nothing is garbage, and looking at all of them again takes half a second."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def own_first(settings: type) -> type:
    """Have help show what is a verb's own before what it shares with others."""
    shared = {name for base in settings.__mro__[1:-1] for name in inspect.get_annotations(base)}
    own = {field.name for field in fields(settings)} - shared
    known: dict[str, Any] = settings.__dict__["__dataclass_fields__"]
    for name in [name for name in known if name not in own]:
        # dataclasses keep their fields in this dict, and help follows its order: what is taken out comes back last
        known[name] = known.pop(name)
    return settings


def unused(settings: Any) -> Iterator[str]:
    """Settings of methods that are not chosen, where they differ from their defaults: a run takes no notice of them."""
    for field in fields(settings):
        group = getattr(settings, field.name)
        if not isinstance(group, Group) or group.in_use(settings):
            continue
        usual = type(group)()
        for part in fields(group):
            value = getattr(group, part.name)
            if value != getattr(usual, part.name):
                flag = f"--{group.name}.{part.name}".replace("_", "-")
                yield f"{flag} {value} is not used: it belongs to --{group.flag} {' or '.join(group.choices)}"


def write_completions() -> None:
    """Write the files of completion anew, from the settings of all verbs: ``make completions``."""
    import tyro

    verbs: dict[str, Any] = {
        name: own_first(importlib.import_module(verb.module).Settings) for name, verb in VERBS.items()
    }
    for shell in SHELLS:
        written = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(written):
            asked = ["--tyro-print-completion", shell]
            tyro.extras.subcommand_cli_from_dict(verbs, prog="sparing", args=asked)
        COMPLETIONS.joinpath(f"sparing.{shell}").write_text(written.getvalue(), encoding="utf-8")


def _run(arguments: list[str]) -> int:
    """Dispatch to a verb."""
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        sys.stdout.write(_overview() + "\n")
        return 0
    if arguments[0] == "--version":
        # 50 ms, which other answers need not wait for
        from sparing.report.environment import version

        sys.stdout.write(version() + "\n")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--print-completion":
        shell = rest[0] if rest else "bash"
        if shell not in SHELLS:
            why = f"completion is written for {', '.join(SHELLS)}"
            raise UserError("sparing", got=f"--print-completion {shell}", why=why, do="name one of them")
        sys.stdout.write(COMPLETIONS.joinpath(f"sparing.{shell}").read_text(encoding="utf-8"))
        return 0
    if name not in VERBS:
        raise UserError("sparing", got=name, why=f"the verbs are {', '.join(VERBS)}", do="see `sparing --help`")
    as_json = "--json" in rest
    with _exiting_at_interrupt(), _uncollected():
        job = importlib.import_module(VERBS[name].module)
        settings = _parse(name, job.Settings, [word for word in rest if word not in {"--json", DEBUG}])
        # named inside the guard, because most jobs import torch only here
        run = job.run
    # under torchrun only the first process prints
    first = int(os.environ.get("RANK", "0")) == 0
    for note in unused(settings) if first else ():
        sys.stderr.write(f"note: {shown(note)}\n")
    record = _finished(run, settings)
    if not first:
        return 0
    if as_json:
        sys.stdout.write(json.dumps(record.document(), indent=2, allow_nan=False) + "\n")
    else:
        job.show(record)
    return 0


def _finished(run: Callable[[Any], Any], settings: Any) -> Any:
    """The record of a run; a pipe that breaks in its midst is not `| head`, which reads results."""
    try:
        return run(settings)
    except BrokenPipeError as error:
        raise RunError("standard error has no reader any more, and the run ended in its midst") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with catch_interrupts(for_good=arguments is None) as keys:
            try:
                return _run(given)
            except SystemExit as stop:
                return _say(stop.code, 1) if isinstance(stop.code, str) else int(stop.code or 0)
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the one guard: no traceback is shown
                keys.during = "the line"
                return _report(error, given, interrupted=keys.pressed)
    except KeyboardInterrupt:
        # a signal between two of the lines above
        return _say("interrupted", 130)


def _report(error: BaseException, given: Sequence[str], *, interrupted: bool) -> int:
    """Say in one line why a run ended."""
    # the reader closed the pipe (`| head`): Python's flush at exit must find another file, or it fails aloud
    if isinstance(error, BrokenPipeError):
        _discard(sys.stdout)
        return 0
    if DEBUG in given or DEBUG_VARIABLE in os.environ:
        traceback.print_exception(error)
    if isinstance(error, UserError | MisuseError):
        return _say(str(error), 2)
    if isinstance(error, KeyboardInterrupt) or interrupted:
        return _say(str(error) if str(error) and isinstance(error, KeyboardInterrupt) else "interrupted", 130)
    if isinstance(error, RunError | OSError):
        return _say(str(error), 1)
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    # on the CPU torch raises a plain RuntimeError that only its words tell apart
    words = ("can't allocate memory", "out of memory", "Cannot allocate memory", "Unable to allocate")
    if isinstance(error, MemoryError) or any(word in str(error) for word in words):
        return _say(f"memory: got {said}; this machine has no more for it; pass smaller sizes", 1)
    return _say(f"{given[0]}: got {said}; {UNEXPECTED}; run it again with {DEBUG} and tell us", 1)


def _say(line: str, status: int) -> int:
    """Write the line, if anybody reads it; returns the status."""
    try:
        sys.stderr.write(f"sparing: {shown(line)}\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    return status


def _discard(stream: TextIO) -> None:
    """Send what a stream still holds nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
