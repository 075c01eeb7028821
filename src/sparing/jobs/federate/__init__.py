"""``sparing federate``: train one model over clients that keep their data, by one method or several.

FedAvg, FedProx, MOON, FedDyn, FedPAN, SCAFFOLD, FedSign and its controls, on the same split and schedule, embedded or
on Flower. Source: Li et al. 2024 (arXiv:2405.12489).

    record = run(Settings(methods=("fedavg", "fedsign"), data="mnist-1d", rounds=50))
    record.table("methods")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.federate.job import run, show
    from sparing.jobs.federate.settings import Settings

__all__ = ["Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Settings="settings")
