"""A condensation over several processes: each takes some of the directions, and only their weights travel.

Every process runs the same outer loop on the same images. In each outer step a process pushes its own directions
through the inner run and leaves one number for each; from all numbers every process makes the same hypergradient. The
first writes, prints and judges. One that is lost is waited for once; its directions of that step are dropped, and from
the next step on the others take them.

with join_ranks(settings) as ranks:        # of one process: nothing is met and nothing travels
    ranks.begin_step(0, phi)               # all go on together, or learn why not
    method = ranks.shared(method)          # with a place to leave weights
    ...
    ranks.end_step()                       # who did not deliver?
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # a builtin, not in its list of names

from sparing.errors import RunError, require
from sparing.hypergrad.forward import ForwardGradient
from sparing.hypergrad.spread import Spread
from sparing.jobs import ranks
from sparing.jobs.condense.settings import Condense
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.rank_monitor import first_line, of_network
from sparing.sharding.network.consistency import checksum
from sparing.sharding.network.mesh import Mesh, make_mesh
from sparing.sharding.network.rendezvous import join, launched

SHARED: Final = ("forward-gradient", "two-phase")

DELIVERY = 300.0  # how long the first waits for another's weights once it has its own (s)
PATIENCE = 86400.0  # how long the others wait for a step of the first, which judges images meanwhile (s)
GRACE = 5.0  # how long the first keeps the store for those who have not finished (s)

LOOK = 0.1  # longest sleep of those who wait for the first (s)
OVER: Final = "over"  # key under which the first leaves why it ends

_RUNS = itertools.count()
_Answer = TypeVar("_Answer")


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


class Ranks(ranks.Ranks):
    """The processes of a run as one of them sees them; they meet before the first step and never after."""

    def __init__(self, mesh: Mesh | None = None, store: Any = None, living: Sequence[int] = ()) -> None:
        """``store`` is what they share, apart from other runs; directions are shared out by place in ``living``."""
        super().__init__(mesh)
        self.store, self.living = store, list(living)  # by first rank
        self.step = -1  # outer step started last
        self.spread: Delivery | None = None  # of that step

    def in_turn(self, work: Callable[[], _Answer]) -> _Answer:
        """Let the first work, then the others at once, who find what it has fetched; a failure is everybody's."""
        answers: list[_Answer] = []
        for turn in (True, False):
            self.on_all_ranks((lambda: answers.append(work())) if self.first is turn else lambda: None)
        return answers[0]

    def broadcast(self, *numbers: int) -> list[int]:
        """Numbers of the first process, on all."""
        if self.mesh is None:
            return list(numbers)
        found: list[int] = self.mesh.broadcast_(torch.tensor(numbers)).tolist()
        return found

    def begin_step(self, step: int, phi: Tensor) -> None:
        """All that live go on together; the first says who they are, and that φ must be the same on all."""
        self.step, self.spread = step, None
        if self.mesh is None:
            return
        mark = checksum(phi)
        if self.first:
            self.store.set(f"step/{step}", json.dumps({"living": self.living, "images": mark}))
        else:
            self._follow(json.loads(wait_for_first(self.store, f"step/{step}", PATIENCE)), mark)
        places = {"rank": self.living.index(self.rank), "size": len(self.living)}
        self.spread = Delivery(store=self.store, key=str(step), timeout=DELIVERY, **places)

    def _follow(self, word: Mapping[str, Any], mark: int) -> None:
        """Take up what the first has said of a step."""
        at = f"outer step {self.step}"
        if self.rank not in word["living"]:
            raise RunError(f"rank {self.rank} came too late before {at}, and the others go on without it")
        if word["images"] != mark:
            why = "their arithmetic differs, or they began with other images"
            raise RunError(f"rank {self.rank} has other images than rank 0 before {at}: {why}; use equal machines")
        self.living = word["living"]

    def shared(self, method: Any) -> Any:
        """A method with its directions shared out, in the step that was started."""
        apart = self.spread is not None and isinstance(method, ForwardGradient)
        return replace(method, spread=self.spread) if apart else method

    def per_rank(self, method: Any) -> Any:
        """What one process does of a method, for measuring it alone: as many directions as it takes at most."""
        if self.mesh is None or not isinstance(method, ForwardGradient):
            return method
        count = -(-method.directions // self.mesh.world)
        return replace(method, directions=count, chunk=method.chunk and min(method.chunk, count))

    def end_step(self) -> dict[str, int]:
        """The first sees who did not deliver, and goes on without them; how many took part, unless one process."""
        if self.spread is None:
            return {}
        found = {"ranks": len(self.living)}
        missing = self.spread.missing() if self.first else []
        # rank 0 is missing only in a step without directions, in which nobody delivers
        if 0 not in missing:
            self.living = [rank for place, rank in enumerate(self.living) if place not in missing]
        return found

    def agree_to_stop(self, signals: list[int]) -> list[int]:
        """Signals of this process; the first also hears that another one got some."""
        if self.mesh is None:
            return signals
        if signals and not self.first:
            self.store.set("signal", "yes")
        return [1] if signals or (self.first and self.store.check(["signal"])) else []

    def leave(self, error: BaseException | None) -> None:
        """Part: the first says why there is no further step, and keeps the store until the others have heard."""
        if self.mesh is None:
            return
        # the store may be gone with the process that kept it
        with contextlib.suppress(RuntimeError):
            if not self.first:
                self.store.set(f"bye/{self.rank}", "yes")
                return
            if error is not None:
                stopped = isinstance(error, StoppedError)
                words = str(error) if stopped else f"rank 0 failed: {first_line(error)}"
                self.store.set(OVER, json.dumps({"words": words, "stopped": stopped}))
            until = time.monotonic() + GRACE
            others = [f"bye/{rank}" for rank in self.living if rank]
            while others and time.monotonic() < until and not self.store.check(others):
                time.sleep(0.02)


@contextlib.contextmanager
def join_ranks(settings: Condense) -> Iterator[Ranks]:
    """Meet the processes that the environment tells of, and part in order."""
    world = launched()
    if world == 1:
        yield Ranks()
        return
    fits, why = settings.method in SHARED, f"it has no directions, and each of {world} processes would do all the work"
    require(fits, "method", settings.method, why, "start one process, or pass --method forward-gradient")
    fits, why = settings.forward.directions >= world, f"there are {world} processes, and one would have none"
    require(fits, "forward.directions", settings.forward.directions, why, f"pass {world} or more, or start fewer")
    started = not dist.is_initialized()
    if started:
        join(30.0, backend="gloo")
    mesh = make_mesh(groups=1)
    store = PrefixStore(f"sparing/condense/{next(_RUNS)}", dist.distributed_c10d._get_default_store())
    made = Ranks(mesh, store, list(range(world)))
    try:
        yield made
    except BaseException as error:
        # the first tells the others why before its error travels on
        made.leave(error)
        if not isinstance(error, RunError) and of_network(error):
            raise RunError(f"the network broke ({first_line(error)}); is every rank there?") from error
        raise
    else:
        made.leave(None)
    finally:
        mesh.close()
        # on every way out: an interpreter that ends with live groups hangs
        if started:
            dist.destroy_process_group()
