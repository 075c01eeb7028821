"""What travels between the processes of a condensation: a number for each direction, and why the first one ends."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from sparing.errors import RunError
from sparing.hypergrad.spread import Spread
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.roll import first_line

LOOK = 0.1  # longest sleep of those who wait for the first (s)
OVER: Final = "over"  # key under which the first leaves why it ends


@dataclass(frozen=True, kw_only=True)
class Delivery(Spread):
    """A spread whose ranks can be seen to have delivered."""

    def exchange(self, weights: Tensor, count: int, run: Sequence[float] = ()) -> Tensor:
        """Say that this rank has its weights, then do as every spread, unless the first has ended."""
        self.store.set(self._delivered_key(self.rank), "yes")
        if self.rank:
            self.leave(weights, run)
            wait_for_first(self.store, self._key("all"), self.timeout * (self.size + 1))
        return super().exchange(weights, count, run)

    def missing(self) -> list[int]:
        """Ranks that have not delivered."""
        return [rank for rank in range(self.size) if not self.store.check([self._delivered_key(rank)])]

    def _delivered_key(self, rank: int) -> str:
        return f"delivered/{self.key}/{rank}"


def wait_for_first(store: Any, key: str, seconds: float) -> str:
    """Wait at most ``seconds`` for what the first leaves; raise if it fails, is interrupted or is gone."""
    until, pause = time.monotonic() + seconds, 0.001
    words, last = "it left nothing", None
    try:
        while time.monotonic() < until and last is None:
            if store.check([key]):
                return str(store.get(key).decode())
            last = json.loads(store.get(OVER)) if store.check([OVER]) else None
            # polled: a store that is asked to wait complains when time is up
            time.sleep(pause)
            pause = min(2 * pause, LOOK)
    except RuntimeError as error:
        words = first_line(error)
    if last is not None:
        raise (StoppedError if last["stopped"] else RunError)(last["words"])
    do = "run the same command with --resume to go on from the last checkpoint"
    raise RunError(f"rank 0 is gone ({words}); {do}")
