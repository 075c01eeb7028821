"""What a run has finished, unit by unit, so that an interrupted one goes on after the last: a memory on the disk."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sparing.jobs.folder import Folder
from sparing.jobs.interrupts import save_when_due
from sparing.report import Progress

SECONDS: Final = 10  # seconds between checkpoints at least, so that the disk does not slow down small models


class Ledger:
    """Results by name; each is worked out once in the life of a run, however often it is interrupted."""

    def __init__(self, folder: Folder, tree: Mapping[str, Any] | None, signals: Sequence[int]) -> None:
        """Resume from what ``Folder.latest`` returned."""
        self.done: dict[str, Any] = dict(tree["done"]) if tree else {}
        self.bar: Progress | None = None
        self._folder, self._signals, self._saved = folder, signals, -math.inf

    @property
    def counted(self) -> int:
        """Units finished so far (count)."""
        return len(self.done)

    def forget(self, name: str) -> None:
        """Have a unit done again."""
        self.done.pop(name, None)

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of a unit of work, from the ledger where it is there."""
        if name not in self.done:
            self.done[name] = work()
            if self.bar is not None:
                self.bar.advance()
            due = time.monotonic() - self._saved >= SECONDS
            save_when_due(self._save, self._signals, step=len(self.done), every=int(due), done=name)
        return self.done[name]

    def _save(self) -> Path:
        path = self._folder.save(len(self.done), {"done": self.done})
        self._saved = time.monotonic()
        return path
