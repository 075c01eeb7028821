"""Fine-tune a local Hugging Face causal language model on JSONL: everything, sampled blocks (LISA), or LoRA.

``run`` does what the command line does, files and all; ``loop.fit`` trains a live model and touches no file.

    record = run(Finetune(model=Path("models/small"), data=Path("notes.jsonl"), method="lisa"))
    record.table("held_out")
"""

from sparing.jobs.finetune.job import run, show
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.step import DivergedError

Settings = Finetune

__all__ = ["DivergedError", "Finetune", "Settings", "StoppedError", "run", "show"]
