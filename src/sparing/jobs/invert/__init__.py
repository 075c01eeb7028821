"""``sparing invert``: find the coefficient of a differential equation through a solver that nobody can differentiate.

(FG)²U in its zeroth-order form: central differences along random directions for the solver, the exact derivative for
the loss. Source: Shen et al. 2024 (arXiv:2406.14095), section 4.3.

    record = run(Settings(equation="burgers", seeds=(0,)))
    record.table("summary")
"""

from typing import TYPE_CHECKING

from sparing.jobs.lazy import names_from

if TYPE_CHECKING:
    from sparing.jobs.invert.job import run, show
    from sparing.jobs.invert.settings import Settings

__all__ = ["Settings", "run", "show"]

__getattr__ = names_from(__name__, run="job", show="job", Settings="settings")
