"""``sparing evaluate``: what a language model loses on held-out text, and how it does tasks, alone or against another.

record = run(Settings(model=Path("runs/finetune/model"), data=(Path("held-out.jsonl"),), against=Path("base")))
record.table("loss"), record.table("against")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.evaluate.job import run, show
    from sparing.jobs.evaluate.settings import Settings

__all__ = ["Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Settings="settings")
