"""One run at a time in a directory: a lock on the directory itself, which the kernel gives back however a run ends.

The lock is ``flock`` on the open directory: it leaves no file behind, dies with its process, and does not reach over
network file systems that cannot lock directories; there, nothing is promised.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path
from typing import Any

from sparing.errors import UserError

_HELD: dict[Path, int] = {}  # open directories of this process, by resolved path


def hold_(folder: Path, *, shared: bool = False) -> None:
    """Take a directory for this run until ``release_`` or the end of the process; taken already, it is kept.

    Of several ranks the first one takes it for all. Other runs may work in a ``shared`` one if they share it too.
    """
    if not is_first():
        return
    place = folder.resolve()
    # the same handle again: flock belongs to the open file, and a second one would be refused to this very process
    handle = _HELD.get(place)
    if handle is None:
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        _HELD.pop(place, None)
        why, do = "another run is at work in it", "wait for that run, or pass another --out"
        raise UserError("out", got=folder, why=why, do=do) from None
    except OSError:
        # a file system without such locks, for one that is taken is a BlockingIOError, above
        pass
    _HELD[place] = handle


def refuse_if_taken(folder: Path) -> None:
    """Refuse a directory that another run has, without taking it: a run that then fails leaves nothing held."""
    if folder.resolve() not in _HELD:
        hold_(folder)
        release_(folder)


def release_(*folders: Path) -> None:
    """Give directories back; without any, all that this process has."""
    for place in [folder.resolve() for folder in folders] or list(_HELD):
        if place in _HELD:
            os.close(_HELD.pop(place))


def is_first() -> bool:
    """Whether this is the one process of a run, or the first rank of several."""
    # not imported: who has not loaded it has not met other processes
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    # torchrun says it before the processes have met
    return os.environ.get("RANK", "0") == "0"


def _forget() -> None:
    """A fork works for its parent: it holds nothing of its own, and must not outlive the lock."""
    for handle in _HELD.values():
        with contextlib.suppress(OSError):
            os.close(handle)
    _HELD.clear()


# a fork shares the open file, and with it the lock: the workers of a data loader would keep it after a crash
os.register_at_fork(after_in_child=_forget)
