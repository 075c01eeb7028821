"""Distil a data set into a few images per class: (FG)²U and its rivals behind one outer loop.

``run`` does what the command line does, files and all; ``loop.advance_`` takes a run to its end and touches no file.

    record = run(Condense(data="mnist", width=16, unroll=10, seconds=60, method="checkpointed"))
    record.table("methods")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.condense.job import run, show
    from sparing.jobs.condense.settings import Condense
    from sparing.jobs.condense.settings import Condense as Settings
    from sparing.jobs.interrupts import StoppedError

__all__ = ["Condense", "Settings", "StoppedError", "run", "show"]

__getattr__ = names_from(
    __name__,
    run="job",
    show="job",
    Condense="settings",
    Settings="settings:Condense",
    StoppedError="sparing.jobs.interrupts",
)
