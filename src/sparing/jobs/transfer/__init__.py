"""Find the best rate at every width and density under several rules, and what re-using the dense one costs.

``run`` does what the command line does; several processes may work on one study.

    record = run(Transfer(densities=(1, 0.25), rules=("sp", "supar"), seeds=(0,)))
    record.table("summary")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.interrupts import StoppedError
    from sparing.jobs.transfer.job import run, show
    from sparing.jobs.transfer.settings import Transfer
    from sparing.jobs.transfer.settings import Transfer as Settings

__all__ = ["Settings", "StoppedError", "Transfer", "run", "show"]

__getattr__ = names_from(
    __name__,
    run="job",
    show="job",
    Transfer="settings",
    Settings="settings:Transfer",
    StoppedError="sparing.jobs.interrupts",
)
