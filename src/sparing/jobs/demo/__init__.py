"""``sparing demo``: the whole mission in miniature, on real data; one chapter per technique, one page to read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Final

from sparing.errors import UserError
from sparing.jobs.demo import condense, federate, memory, shard, transfer, valley
from sparing.jobs.demo.chapter import OmittedError
from sparing.jobs.demo.overview import FILES, write_overview
from sparing.jobs.demo.page import chapters_of, finished, show, write_page
from sparing.jobs.demo.settings import NAMES, Name, Settings
from sparing.jobs.disk import refusing_to_write
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.run import Run
from sparing.report import Record

LOG = logging.getLogger("sparing.demo")

UNITS: Final = {
    "dev_loss": "nat/token", "loss_before": "nat/token", "loss_after": "nat/token", "seconds": "s",
    "seconds_per_step": "s", "params": "B", "grads": "B", "optimizer": "B", "activations": "B", "transient": "B",
    "peak": "B", "peak_predicted": "B", "peak_measured": "B", "accuracy": "%", "loss": "nat",
}  # fmt: skip

WRITES: Final = (*FILES, *condense.FILES.values(), *valley.FILES.values(), "tiny-model", federate.FOLDER)

QUESTION: Final = "What do six methods for training with little save, and what does it cost?"

WORK: Final[dict[Name, Callable[[Run], None]]] = {
    "memory": memory.run_chapter, "condense": condense.run_chapter, "transfer": transfer.run_chapter,
    "shard": shard.run_chapter, "valley": valley.run_chapter, "federate": federate.run_chapter,
}  # fmt: skip


def run(settings: Settings) -> Record:
    """Run the chapters and write record and page."""
    kept = {"seed": settings.seed, "scale": settings.scale, "source": settings.source}
    with Run(settings, writes=WRITES, ignore={"chapters"}) as run:
        # rows of an earlier layout lack what the page shows: since the third, repetitions over seeds; or were made in
        # another way: since the fourth, condensed images are moved
        run.resume(Record(question=QUESTION, settings=kept, seed=settings.seed, units=dict(UNITS)), also={"layout": 4})
        # a part may last half a minute: it is dropped at a signal, and done again
        run.claim(defer_signals=False)
        try:
            for name in NAMES:
                if name in settings.chapters:
                    run_one(name, run)
        except KeyboardInterrupt:
            do = "run the same command with --resume to go on"
            raise StoppedError(f"interrupted; what was finished some seconds ago is saved; {do}") from None
        done = finished(run.record)
        if not done:
            why, do = "none of them could be run", "see the warnings above; `sparing fetch` tells what is available"
            raise UserError("chapters", got=" ".join(settings.chapters), why=why, do=do)
        for name in done:
            spent = run.results(f"{name} took ").values()
            sums = {unit: sum(one[unit] for one in spent) for unit in ("seconds", "cpu_seconds")}
            run.record.add("chapters", chapter=name, **sums)
        with refusing_to_write("saving", settings.out):
            condense.write_files(run)
            valley.write_files(run)
            if len(done) == len(NAMES) and run.record.table("shard_runs"):
                write_overview(run.record, settings.out, chapters_of(run.record, settings.out))
        return run.finish(write_page)


def run_one(name: Name, run: Run) -> None:
    """Do what is left of a chapter; everything that it found is saved at its end, with the time that it took."""
    before, clock, worked = run.finished, time.monotonic(), _cpu_seconds()
    try:
        WORK[name](run)
    except OmittedError as missing:
        LOG.warning("demo: the chapter on %s is left out (%s)", name, missing)
    if run.finished > before:
        spent = {"seconds": time.monotonic() - clock, "cpu_seconds": _cpu_seconds() - worked}
        run.once(f"{name} took {before}", lambda: spent)
        run.save()


def _cpu_seconds() -> float:
    """Seconds that the processors worked for this process and for those it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


__all__ = ["Settings", "run", "show"]
