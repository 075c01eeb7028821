"""``sparing merge``: will these models average well, make the merge, and measure what it loses.

The prediction from the weights comes first, then the merge, streamed from the disk, then the measured gap beside the
prediction. Source: Li et al. 2024 (arXiv:2405.12489), section 5, for the signs; the ways to merge name their papers.

    record = run(Settings(models=(Path("a"), Path("b")), base=Path("base"), data=("alice",)))
    record.table("gap")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.merge.job import run, show
    from sparing.jobs.merge.settings import Settings

__all__ = ["Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Settings="settings")
