"""Train a language model from scratch on real text, dense or sparse, by a rule that transfers learning rates.

record = run(Pretrain(data=("notes.txt",), width=256, density="1/16"))
record.table("held_out")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.interrupts import StoppedError
    from sparing.jobs.pretrain.job import run, show
    from sparing.jobs.pretrain.settings import Pretrain
    from sparing.jobs.pretrain.settings import Pretrain as Settings
    from sparing.jobs.step import DivergedError

__all__ = ["DivergedError", "Pretrain", "Settings", "StoppedError", "run", "show"]

__getattr__ = names_from(
    __name__,
    run="job",
    show="job",
    Pretrain="settings",
    Settings="settings:Pretrain",
    StoppedError="sparing.jobs.interrupts",
    DivergedError="sparing.jobs.step",
)
