"""Which hypergradient method a setting means, at which outer step, and how each is plotted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sparing import hypergrad as hg
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.forward import ForwardGradient
from sparing.hypergrad.implicit import ConjugateGradient, HessianFree, Neumann
from sparing.hypergrad.reverse import Reverse, Truncated
from sparing.jobs.condense.settings import Condense, Method
from sparing.report import plots

ROLES: Final[dict[str, plots.Role]] = {
    "(FG)²U": "ours", "two-phase": "extension", "reverse": "reference", "checkpointed": "good", "truncated": "rival",
    "Neumann": "second_rival", "conjugate gradient": "warning", "Hessian-free": "baseline",
}  # fmt: skip

TITLES: Final[dict[Method, str]] = {
    "forward-gradient": "(FG)²U", "two-phase": "two-phase", "reverse": "reverse", "checkpointed": "checkpointed",
    "truncated": "truncated", "neumann": "Neumann", "conjugate-gradient": "conjugate gradient",
    "hessian-free": "Hessian-free",
}  # fmt: skip

_COLUMNS = ("truncated", "Hessian-free", "Neumann", "(FG)²U", "reverse")
_TABLE = {
    ("mnist", 1): (73.76, 65.98, 68.37, 82.44, 92.32),
    ("mnist", 10): (94.05, 94.97, 95.75, 96.12, 96.79),
    ("mnist", 50): (96.63, 96.34, 96.78, 97.01, 97.72),
    ("cifar10", 1): (20.78, 19.72, 21.33, 29.37, 34.08),
    ("cifar10", 10): (44.01, 45.32, 47.67, 50.10, 53.15),
    ("cifar10", 50): (49.22, 48.73, 50.02, 51.98, 56.37),
}
PAPER: Final = {key: dict(zip(_COLUMNS, row, strict=True)) for key, row in _TABLE.items()}
"""Test accuracy (%) by (data, images per class) and method. Source: Shen et al. 2024, Table 1."""

SOURCE: Final = "Shen et al. 2024, Table 1"


def window(settings: Condense) -> int:
    """Inner steps that truncated reverse looks at."""
    return min(settings.truncated.steps, settings.inner_steps)


def build_method(settings: Condense, name: Method | None = None) -> Any:
    """The method of a run that has one, or another by name; of a two-phase run, the second."""
    forward, neumann, conjugate = settings.forward, settings.neumann, settings.conjugate_gradient
    methods = {
        "truncated": Truncated(steps=window(settings)),
        "hessian-free": HessianFree(),
        "neumann": Neumann(step=neumann.step, terms=neumann.terms),
        "conjugate-gradient": ConjugateGradient(terms=conjugate.iterations, damping=conjugate.damping),
        "reverse": Reverse(),
        "checkpointed": Checkpointed(states="sqrt"),
    }
    return methods.get(name or settings.method) or ForwardGradient(directions=forward.directions, chunk=forward.chunk)


def schedule(settings: Condense, turn: int) -> Callable[[int], Any]:
    """The method of each outer step; ``turn`` is where the second phase of a two-phase run begins."""
    second = build_method(settings)
    if settings.method != "two-phase" or turn == 0:
        return lambda step: second
    return hg.phases((HessianFree(), turn), (second, None))
