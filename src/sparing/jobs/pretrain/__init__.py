"""Train a language model from scratch on real text, dense or sparse, by a rule that transfers learning rates.

record = run(Pretrain(data=("notes.txt",), width=256, density="1/16"))
record.table("held_out")
"""

from sparing.jobs.interrupts import StoppedError
from sparing.jobs.pretrain.job import run, show
from sparing.jobs.pretrain.settings import Pretrain
from sparing.jobs.step import DivergedError

Settings = Pretrain

__all__ = ["DivergedError", "Pretrain", "Settings", "StoppedError", "run", "show"]
