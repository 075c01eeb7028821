"""A condensation over several processes: each takes some of the directions, and only their weights travel.

Every process runs the same outer loop on the same images. In each outer step a process pushes its own directions
through the inner run and leaves one number for each; from all numbers every process makes the same hypergradient. The
first writes, prints and judges. One that is lost is waited for once; its directions of that step are dropped, and from
the next step on the others take them.

with join_ranks(settings) as ranks:        # of one process: nothing is met and nothing travels
    ranks.begin_step(0, images)            # all go on together, or learn why not
    method = ranks.shared(method)          # with a place to leave weights
    ...
    ranks.end_step()                       # who did not deliver?
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # a builtin, not in its list of names

from sparing.errors import RunError, require
from sparing.hypergrad.forward import ForwardGradient
from sparing.jobs.condense.delivery import OVER, Delivery, wait_for_first
from sparing.jobs.condense.settings import Condense
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.roll import first_line, of_network
from sparing.sharding.consistency import check_same, checksum
from sparing.sharding.mesh import Mesh, make_mesh
from sparing.sharding.on_ranks import on_all_ranks
from sparing.sharding.rendezvous import join

SHARED: Final = ("forward-gradient", "two-phase")

DELIVERY = 300.0  # how long the first waits for another's weights once it has its own (s)
PATIENCE = 86400.0  # how long the others wait for a step of the first, which judges images meanwhile (s)
GRACE = 5.0  # how long the first keeps the store for those who have not finished (s)

_RUNS = itertools.count()
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class Ranks:
    """The processes of a run as one of them sees them; without a mesh there is one."""

    mesh: Mesh | None = None  # all processes, which meet before the first step and never after
    store: Any = None  # what they share, apart from other runs
    living: list[int] = field(default_factory=list)  # by first rank; directions are shared out by place in this list
    step: int = -1  # outer step started last
    spread: Delivery | None = None  # of that step

    @property
    def rank(self) -> int:
        """This process, from 0."""
        return 0 if self.mesh is None else self.mesh.rank

    @property
    def first(self) -> bool:
        """Whether this process writes, prints and judges."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there were others at the beginning."""
        return self.mesh is not None

    # ---- before the first step

    def in_turn(self, work: Callable[[], _Answer]) -> _Answer:
        """Let the first work, then the others at once, who find what it has fetched; a failure is everybody's."""
        if self.mesh is None:
            return work()
        answers: list[_Answer] = []
        for turn in (True, False):
            on_all_ranks(self.mesh, (lambda: answers.append(work())) if self.first is turn else _nothing)
        return answers[0]

    def on_first_rank(self, work: Callable[[], object]) -> None:
        """Let the first work, and the others wait for it and share its failure."""
        if self.mesh is None:
            work()
        else:
            on_all_ranks(self.mesh, work if self.first else _nothing)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuse to start where processes differ."""
        if self.mesh is not None:
            check_same(self.mesh, facts, "run")

    def broadcast(self, *numbers: int) -> list[int]:
        """Numbers of the first process, on all."""
        if self.mesh is None:
            return list(numbers)
        found: list[int] = self.mesh.broadcast_(torch.tensor(numbers)).tolist()
        return found

    # ---- the outer loop

    def begin_step(self, step: int, images: Tensor) -> None:
        """All that live go on together; the first says who they are, and that φ must be the same on all."""
        self.step, self.spread = step, None
        if self.mesh is None:
            return
        mark = checksum(images)
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

    def heard(self, signals: Sequence[int]) -> list[int]:
        """Signals of this process; the first also hears that another one got some."""
        if self.mesh is None:
            return list(signals)
        if signals and not self.first:
            self.store.set("signal", "yes")
        return [1] if signals or (self.first and self.store.check(["signal"])) else []

    # ---- the end

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


def _nothing() -> None:
    pass


@contextlib.contextmanager
def join_ranks(settings: Condense) -> Iterator[Ranks]:
    """Meet the processes that the environment tells of, and part in order."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    _check(settings, world)
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


def _check(settings: Condense, world: int) -> None:
    """Refuse what cannot be shared out."""
    fits, why = settings.method in SHARED, f"it has no directions, and each of {world} processes would do all the work"
    do = "start one process, or pass --method forward-gradient"
    require(fits, "method", settings.method, why, do)
    fits, why = settings.directions >= world, f"there are {world} processes, and one would have none"
    require(fits, "directions", settings.directions, why, f"pass {world} or more, or start fewer")
