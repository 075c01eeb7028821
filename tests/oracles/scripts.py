"""Scripts run as users run them, but forked from ``oracles.server``, which has imported torch and transformers."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patience import PATIENCE


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said."""

    code: int
    out: str
    err: str


def forked(script: Path, *words: str, folder: Path, strict: bool = False) -> Ended:
    """Run a script with these arguments to its end in its own process, inside ``folder``; modules are found as here."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as there:
        said = Path(there, "out"), Path(there, "err")
        process: Any = context.Process(target=_run, args=(script, words, folder, said, strict))
        process.start()
        process.join(PATIENCE)
        if process.exitcode is None:
            process.kill()
            return Ended(-9, "", f"still running after {PATIENCE:g} s")
        return Ended(process.exitcode, *(path.read_text() if path.exists() else "" for path in said))


def ran(script: Path, folder: Path, *, strict: bool = False) -> str | None:
    """None, or what the script wrote to standard error if it failed; ``strict`` makes warnings errors."""
    ended = forked(script, folder=folder, strict=strict)
    return None if ended.code == 0 else ended.err


def _run(script: Path, words: tuple[str, ...], folder: Path, said: tuple[Path, Path], strict: bool) -> None:
    os.chdir(folder)
    for stream, target in zip((sys.stdout, sys.stderr), said, strict=True):
        os.dup2(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream.fileno())
    sys.argv = [str(script), *words]
    warnings.resetwarnings()
    warnings.simplefilter("error" if strict else "default")
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:  # noqa: BLE001 - whatever it was, its words are wanted
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
