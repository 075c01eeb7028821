"""Scripts run as a person runs them, but forked from a server that has imported torch and transformers already."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from oracles.processes import PRELOAD
from patience import PATIENCE


def ran(script: Path, folder: Path, *, strict: bool = False) -> str | None:
    """Run a script to its end in a process of its own.

    Args:
        script: A Python file.
        folder: Working directory, which must exist.
        strict: Whether a warning is an error.

    Returns:
        None, or what it wrote to standard error if it failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    said = folder / ".stderr"
    process: Any = context.Process(target=_run, args=(script, folder, said, strict))
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        return f"still running after {PATIENCE:g} s"
    return None if process.exitcode == 0 else said.read_text()


def _run(script: Path, folder: Path, said: Path, strict: bool) -> None:
    os.chdir(folder)
    for stream, target in ((sys.stdout, os.devnull), (sys.stderr, said)):
        number = os.open(target, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(number, stream.fileno())
    sys.argv = [str(script)]
    warnings.resetwarnings()
    warnings.simplefilter("error" if strict else "default")
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:  # noqa: BLE001 - whatever it was, its words are wanted
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
