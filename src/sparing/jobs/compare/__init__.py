"""Several records of runs on one page, made of ``record.jsonl`` alone and without loading torch.

record = run(Settings(runs=(Path("runs/lisa"), Path("runs/lora"))))
record.table("settings")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.compare.job import run, show
    from sparing.jobs.compare.settings import Settings

__all__ = ["Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Settings="settings")
