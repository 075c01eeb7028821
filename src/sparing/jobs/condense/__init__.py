"""Distil a data set into a few images per class: (FG)²U and its rivals behind one outer loop.

``run`` does what the command line does, files and all; ``loop.advance_`` takes a run to its end and touches no file.

    record = run(Condense(data="mnist", width=16, unroll=10, seconds=60, method="checkpointed"))
    record.table("methods")
"""

from sparing.jobs.condense.job import run, show
from sparing.jobs.condense.settings import Condense
from sparing.jobs.interrupts import StoppedError

Settings = Condense

__all__ = ["Condense", "Settings", "StoppedError", "run", "show"]
