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

PAPER: Final = {
    ("mnist", 1): {
        "truncated": 73.76, "Hessian-free": 65.98, "Neumann": 68.37, "(FG)²U": 82.44, "reverse": 92.32,
    },
    ("mnist", 10): {
        "truncated": 94.05, "Hessian-free": 94.97, "Neumann": 95.75, "(FG)²U": 96.12, "reverse": 96.79,
    },
    ("mnist", 50): {
        "truncated": 96.63, "Hessian-free": 96.34, "Neumann": 96.78, "(FG)²U": 97.01, "reverse": 97.72,
    },
    ("cifar10", 1): {
        "truncated": 20.78, "Hessian-free": 19.72, "Neumann": 21.33, "(FG)²U": 29.37, "reverse": 34.08,
    },
    ("cifar10", 10): {
        "truncated": 44.01, "Hessian-free": 45.32, "Neumann": 47.67, "(FG)²U": 50.10, "reverse": 53.15,
    },
    ("cifar10", 50): {
        "truncated": 49.22, "Hessian-free": 48.73, "Neumann": 50.02, "(FG)²U": 51.98, "reverse": 56.37,
    },
}  # fmt: skip
"""Test accuracy (%) by (data, images per class) and method. Source: Shen et al. 2024, Table 1."""

SOURCE: Final = "Shen et al. 2024, Table 1"


def build_method(settings: Condense) -> Any:
    """The method of a run that has one; of a two-phase run, the second."""
    makers: dict[str, Callable[[], Any]] = {
        "truncated": lambda: Truncated(steps=min(settings.truncate, settings.unroll)),
        "hessian-free": HessianFree,
        "neumann": lambda: Neumann(step=settings.neumann_step, terms=settings.terms),
        "conjugate-gradient": lambda: ConjugateGradient(terms=settings.terms, damping=settings.damping),
        "reverse": Reverse,
        "checkpointed": lambda: Checkpointed(states="sqrt"),
    }
    if settings.method in makers:
        return makers[settings.method]()
    return ForwardGradient(directions=settings.directions, chunk=settings.chunk)


def schedule(settings: Condense, turn: int) -> Callable[[int], Any]:
    """The method of each outer step; ``turn`` is where the second phase of a two-phase run begins."""
    second = build_method(settings)
    if settings.method != "two-phase" or turn == 0:
        return lambda step: second
    return hg.phases((HessianFree(), turn), (second, None))
