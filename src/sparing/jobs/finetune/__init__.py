"""Fine-tune a Hugging Face causal language model on your files: everything, sampled blocks (LISA), or LoRA.

``run`` does what the command line does, files and all; ``loop.fit`` trains a live model and touches no file.

    record = run(Finetune(model=Path("models/small"), data=Path("notes.jsonl"), method="lisa"))
    record.table("held_out")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.finetune.job import run, show
    from sparing.jobs.finetune.settings import Finetune
    from sparing.jobs.finetune.settings import Finetune as Settings
    from sparing.jobs.interrupts import StoppedError
    from sparing.jobs.step import DivergedError

__all__ = ["DivergedError", "Finetune", "Settings", "StoppedError", "run", "show"]

__getattr__ = names_from(
    __name__,
    run="job",
    show="job",
    Finetune="settings",
    Settings="settings:Finetune",
    StoppedError="sparing.jobs.interrupts",
    DivergedError="sparing.jobs.step",
)
