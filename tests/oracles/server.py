"""The server of processes is a fork of the test process from before its first test: whatever the tests import, it has.

A fresh interpreter, as ``multiprocessing`` starts one, would import all that again, and each process forked from it
what it lacks still: most of the seconds of a short one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import select
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module, reload
from multiprocessing import forkserver, resource_tracker, util
from unittest import mock

import torch

NEEDED = [
    "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "sklearn.datasets", "matplotlib.figure", "sparing.hypergrad",
    "sparing.scaling", "sparing.valley", "sparing.federated", "sparing.report", "sparing.sharding.checkpoint", "peft",
]  # fmt: skip
"""What a process may want beside; nothing new where many tests were collected."""


def start(*, silent: bool) -> None:
    """Fork it; it sleeps until it is needed. No test has run yet: no thread is lost, and nothing is patched.

    ``silent`` is what pytest would do with words of processes: failures are told by files, scripts have their own.
    """
    resource_tracker.ensure_running()  # an interpreter of its own
    with mock.patch.object(util, "spawnv_passfds", partial(_forked, silent)):
        forkserver.ensure_running()


def _forked(silent: bool, path: object, words: Sequence[object], fds: Sequence[int]) -> int:
    """Instead of an interpreter that is given a line of code: a fork that runs the line."""
    del path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the thread of pytest-xdist that listens stays behind
        pid = os.fork()
    if pid == 0:
        try:
            _become(str(words[-1]), fds, silent)
        finally:
            os._exit(0)
    return pid


def _become(code: str, fds: Sequence[int], silent: bool) -> None:
    """Let go of what belongs to the tests, wait for the first request, import what is missing, and serve."""
    reload(warnings)  # with the filters of a fresh interpreter
    for fd in (1, 2) if silent else ():
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    faulthandler.disable()  # it would write where pytest has its own files
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    kept = sorted({2, *fds})
    for below, above in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(below + 1, above)  # among them the pipe that tells pytest-xdist whether a worker lives
    requests, end = fds[:2]
    if end in select.select([requests, end], [], [])[0]:
        return
    for name in NEEDED:
        with contextlib.suppress(ImportError):
            import_module(name)
    torch.manual_seed(torch.initial_seed())  # as if nothing had been drawn
    gc.collect()
    gc.freeze()  # else each process would walk over all that, and copy it as it goes
    exec(code, {})
