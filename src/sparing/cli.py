"""The command line: settings dataclasses in, one job run, an exit status out.

Tables go to standard output, progress and logs to standard error. Exit status 0: done; 1: the run failed; 2: the
user's mistake, said in one line; 130: interrupted after saving.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparing.errors import RunError, UserError

if TYPE_CHECKING:
    from sparing.report import Record


@dataclass(frozen=True, slots=True)
class Verb:
    """One command: where its job lives and what it is for."""

    module: str
    """Import path of the job; it exports ``Settings``, ``run(settings) -> Record`` and ``show(record)``."""

    summary: str
    """One line for the list of commands."""


VERBS: dict[str, Verb] = {
    "demo": Verb("sparing.jobs.demo", "the whole mission in miniature, on real data, with a report page"),
    "plan": Verb("sparing.jobs.plan", "what fits this memory or cluster: full, LISA, LoRA, 14 ways to split; the pick"),
    "probe": Verb("sparing.jobs.probe", "measure the links of a cluster under torchrun, for `plan --topology`"),
    "fetch": Verb("sparing.jobs.fetch", "list the known data sets and models; fetch one into the cache"),
    "finetune": Verb("sparing.jobs.finetune", "fine-tune a local Hugging Face causal language model on JSONL"),
    "pretrain": Verb("sparing.jobs.pretrain", "train a dense or sparse language model from scratch on text"),
    "transfer": Verb("sparing.jobs.transfer", "find the best learning rate at every width and density, rule by rule"),
    "condense": Verb("sparing.jobs.condense", "distil a data set into a few images per class"),
    "adapt": Verb("sparing.jobs.adapt", "learn which tokens of a document a language model should learn from"),
    "scan": Verb("sparing.jobs.scan", "walk away from a finished model: which side of its valley is flat, and why"),
    "merge": Verb("sparing.jobs.merge", "predict whether models merge, merge them from disk, measure what it loses"),
    "federate": Verb("sparing.jobs.federate", "train over clients that keep their data: FedSign and rivals, priced"),
    "invert": Verb("sparing.jobs.invert", "find coefficients of a differential equation through its solver"),
}


SHELLS = ("bash", "zsh")
"""Shells that completion is written for."""


class MisuseError(ValueError):
    """Arguments that do not fit a verb's settings; the message is one line."""


def _overview() -> str:
    """The text of ``sparing --help``."""
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: sparing VERB [OPTIONS]",
            "",
            "Train deep networks with little: little memory, few tuning runs, a slow network.",
            "",
            *lines,
            "",
            "sparing VERB --help shows every setting with its unit and default; --json prints one JSON document.",
            "sparing --print-completion bash prints what completes all this in your shell.",
        ]
    )


def _one_line(complaint: str) -> str:
    """The words of a parser's framed complaint, without the frame.

    Args:
        complaint: What the parser wrote, boxes and line breaks included.

    Returns:
        One line.
    """
    words = " ".join(re.sub(r"[│╭╮╰╯─]+", " ", complaint).split())
    words = re.sub(r"For full helptext.*", "", words)
    words = re.sub(r"^(Value error|Required options|Unrecognized options|Parsing error)\s*", "", words)
    return re.sub(r"Error parsing \S+: ", "", words).strip()


def _parse(name: str, settings: type, arguments: Sequence[str]) -> Any:
    """Read one verb's settings from its arguments.

    Args:
        name: The verb.
        settings: Its settings dataclass.
        arguments: What follows the verb.

    Returns:
        An instance of ``settings``.

    Raises:
        MisuseError: If the arguments do not fit.
        SystemExit: After printing the help that was asked for.
    """
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(settings, args=list(arguments), prog=f"sparing {name}")
    except SystemExit as stop:
        if not stop.code:
            raise
        raise MisuseError(f"{_one_line(complaint.getvalue())}; see `sparing {name} --help`") from None


def _document(record: Record) -> str:
    """A record as one JSON document: the header, and the rows by table.

    Args:
        record: What a job returned.

    Returns:
        Strict JSON.
    """
    return json.dumps(record.document(), indent=2, allow_nan=False)


def _print_completion(shell: str) -> None:
    """Print what a shell needs to complete verbs, settings and choices.

    Args:
        shell: One of ``SHELLS``.

    Raises:
        UserError: If it is none of them.
    """
    if shell not in SHELLS:
        why = f"completion is written for {', '.join(SHELLS)}"
        raise UserError("sparing", got=f"--print-completion {shell}", why=why, do="name one of them")
    import tyro

    jobs = {name: importlib.import_module(verb.module).Settings for name, verb in VERBS.items()}
    asked = ["--tyro-print-completion", shell]
    with contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(jobs, prog="sparing", args=asked)


def _run(arguments: list[str]) -> int:
    """Dispatch to a verb.

    Args:
        arguments: The command line without the program.

    Returns:
        The exit status.

    Raises:
        UserError: If the verb is unknown.
    """
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        sys.stdout.write(_overview() + "\n")
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(importlib.metadata.version("sparing") + "\n")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--print-completion":
        _print_completion(rest[0] if rest else "bash")
        return 0
    if name not in VERBS:
        raise UserError("sparing", got=name, why=f"the verbs are {', '.join(VERBS)}", do="see `sparing --help`")
    as_json = "--json" in rest
    job = importlib.import_module(VERBS[name].module)
    record = job.run(_parse(name, job.Settings, [argument for argument in rest if argument != "--json"]))
    if int(os.environ.get("RANK", "0")):  # of several processes under torchrun the first one speaks
        return 0
    if as_json:
        sys.stdout.write(_document(record) + "\n")
    else:
        job.show(record)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Defaults to the process's own.

    Returns:
        The exit status (see the module).
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except (UserError, MisuseError) as mistake:
        sys.stderr.write(f"sparing: {mistake}\n")
        return 2
    except BrokenPipeError:  # the reader had enough; nothing more may be flushed into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (RunError, OSError) as failure:
        sys.stderr.write(f"sparing: {failure}\n")
        return 1
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"sparing: {stop or 'interrupted'}\n")
        return 130
