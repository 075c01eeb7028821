"""``sparing plan``: what fits on this hardware, before anything is loaded; the pick, and why each other lost.

On one device the ways to fine-tune compete; on a cluster each of them with every way to split it over groups of GPUs.
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.plan.job import run, show
    from sparing.jobs.plan.settings import Settings

__all__ = ["Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Settings="settings")
