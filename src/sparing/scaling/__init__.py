"""Tune once on a small dense model, train wide and sparse: sparse maximal update parameterization on any model.

``plan`` compares a model with a narrower one and gives every parameter its role, initial scale, learning rate, decay, ε
and forward multiplier; ``apply_`` draws masks and rescales once; the groups of the plan go into any torch optimizer.
``coordinate_check`` shows whether it holds, ``Evolution`` moves masks while training, ``convert_`` runs sparse layers
sparsely, ``fold_`` gives an ordinary model back, ``predict`` says the price first.

Dey, Bergsma & Hestness, "Sparse maximal update parameterization: A holistic approach to sparse training dynamics",
NeurIPS 2024 (arXiv:2405.15743).

Example:
    >>> import torch
    >>> from torch import nn
    >>> net = lambda d: nn.Sequential(nn.Linear(8, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 2))
    >>> model = net(64)
    >>> planned = plan(model, base=lambda: net(32), density=1 / 4, rule=SuPar())
    >>> masks = apply_(model, planned, seed=0)
    >>> optimizer = torch.optim.AdamW(planned.groups(model, lr=2**-6, weight_decay=0.1))
    >>> planned.entries["2.weight"].factors.lr, int(model[2].weight.count_nonzero())
    (2.0, 1024)
"""

from typing import TYPE_CHECKING, Any

from sparing.scaling.apply import apply_, restore_
from sparing.scaling.check.coordinate import coordinate_check
from sparing.scaling.masks.density import ER, ERK
from sparing.scaling.masks.dynamic import GMP, SET, RigL
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.masks.laws import Bernoulli, Blocks, ConstantFanIn, ExactCount, NofM
from sparing.scaling.masks.mask_set import Masks
from sparing.scaling.model.fold import fold_
from sparing.scaling.plans.entries import Entry
from sparing.scaling.plans.planning import Plan, plan
from sparing.scaling.plans.price import predict
from sparing.scaling.rules import RULES, SP, CompleteP, InitOnly, MuP, RateOnly, SuPar
from sparing.scaling.sparse.backends import convert_
from sparing.scaling.spectral import Spectral

if TYPE_CHECKING:
    from sparing.scaling.callback import SparseCallback

__all__ = [
    "ER",
    "ERK",
    "GMP",
    "RULES",
    "SET",
    "SP",
    "Bernoulli",
    "Blocks",
    "CompleteP",
    "ConstantFanIn",
    "Entry",
    "Evolution",
    "ExactCount",
    "InitOnly",
    "Masks",
    "MuP",
    "NofM",
    "Plan",
    "RateOnly",
    "RigL",
    "SparseCallback",
    "Spectral",
    "SuPar",
    "apply_",
    "convert_",
    "coordinate_check",
    "fold_",
    "plan",
    "predict",
    "restore_",
]


def __getattr__(name: str) -> Any:
    """Import the callback, and with it transformers, on first use."""
    if name == "SparseCallback":
        from sparing.scaling.callback import SparseCallback

        return SparseCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
