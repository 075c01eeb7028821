"""``sparing attribute``: which training rows made a prediction, by exact metagradients, held against retraining.

Source: Ilyas & Engstrom 2025 (MAGIC, arXiv:2504.16430); Engstrom et al. 2025 (arXiv:2503.13751).

    record = run(Settings(data="mnist", train_rows=1000, predictions=(0, 1)))
    record.table("rows")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.attribute.job import run, show
    from sparing.jobs.attribute.settings import Settings

__all__ = ["Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Settings="settings")
