"""Tune once on a small dense model, train wide and sparse: sparse maximal update parameterization on any model.

``plan`` compares a model with a narrower one and gives every parameter its role, initial scale, learning rate, decay, ε
and forward multiplier; ``apply_`` draws masks and rescales once; the groups of the plan go into any torch optimizer.
``coordinate_check`` shows whether it holds, ``Evolution`` moves masks while training, ``convert_`` runs sparse layers
sparsely, ``fold_`` gives an ordinary model back, ``predict`` says the price first.

Dey, Bergsma & Hestness, "Sparse maximal update parameterization: A holistic approach to sparse training dynamics",
NeurIPS 2024 (arXiv:2405.15743).

    planned = plan(model, base=256, density=1 / 16, rule=SuPar())
    masks = apply_(model, planned, seed=0)
    optimizer = torch.optim.AdamW(planned.groups(model, lr=2**-6, weight_decay=0.1))
"""

from sparing.scaling.apply import apply_, restore_
from sparing.scaling.backends import convert_
from sparing.scaling.coordinate import coordinate_check
from sparing.scaling.density import ER as ER
from sparing.scaling.density import ERK as ERK
from sparing.scaling.dynamic import GMP as GMP
from sparing.scaling.dynamic import METHODS as METHODS
from sparing.scaling.dynamic import SET as SET
from sparing.scaling.dynamic import RigL as RigL
from sparing.scaling.entries import Entry as Entry
from sparing.scaling.evolve import Evolution
from sparing.scaling.fold import fold_
from sparing.scaling.live import Masks as Masks
from sparing.scaling.masks import LAWS as LAWS
from sparing.scaling.masks import Bernoulli as Bernoulli
from sparing.scaling.masks import Blocks as Blocks
from sparing.scaling.masks import ConstantFanIn as ConstantFanIn
from sparing.scaling.masks import ExactCount as ExactCount
from sparing.scaling.masks import NofM as NofM
from sparing.scaling.planning import Plan as Plan
from sparing.scaling.planning import plan
from sparing.scaling.price import predict
from sparing.scaling.rules import RULES as RULES
from sparing.scaling.rules import SP as SP
from sparing.scaling.rules import CompleteP as CompleteP
from sparing.scaling.rules import InitOnly as InitOnly
from sparing.scaling.rules import MuP as MuP
from sparing.scaling.rules import RateOnly as RateOnly
from sparing.scaling.rules import SuPar as SuPar
from sparing.scaling.spectral import Spectral

__all__ = ["Evolution", "Spectral", "apply_", "convert_", "coordinate_check", "fold_", "plan", "predict", "restore_"]
