"""``sparing scan``: walk away from a finished model in chosen directions, and say which side of its valley is flat.

Seven noises as they are drawn and with the signs of the weights, the dose-response of that agreement, groups of
parameters, special directions. Source: Li et al. 2024 (arXiv:2405.12489).

    record = run(Settings(model="my_module:make", noises=("gaussian",), parts=("noises",)))
    record.table("curves")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.scan.job import run, show
    from sparing.jobs.scan.settings import Settings

__all__ = ["Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Settings="settings")
