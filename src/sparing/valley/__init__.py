"""Valleys: scan the loss along unbiased directions, measure its asymmetry, and say which merges work.

``scan`` walks to both sides of a minimum with batch-norm statistics that belong to every point, and gives the asymmetry
a number with an interval; ``sign_agreement``, ``predict_merge`` and ``interpolate`` say what two models have in common,
what their average will lose and what it does lose; ``align`` brings strangers into one order; ``soup`` and ``merge``
make one model of several.

Li, Dai, Li, Li & Zhan, "Exploring and Exploiting the Asymmetric Valley of Deep Neural Networks", NeurIPS 2024
(arXiv:2405.12489).

Example:
    >>> import torch
    >>> model, inputs = torch.nn.Linear(4, 3), torch.randn(50, 4)
    >>> evaluate = Classification(inputs, model(inputs).argmax(1))
    >>> found = scan(model, evaluate, Noise("gaussian", sign="consistent"), points=5, draws=1)
    >>> found.consistency  # of each draw: the share of equal signs
    array([1.])
"""

from sparing.valley.aligning.align import Alignment, align
from sparing.valley.directions.config import Direction, Given, Group, Noise, Norm, Special, difference
from sparing.valley.directions.elements import expected_consistency
from sparing.valley.directions.resolve import Resolved, direction_of
from sparing.valley.forecast.agreement import sign_agreement
from sparing.valley.forecast.predict import MergeForecast, predict_merge
from sparing.valley.merging.breadcrumbs import Breadcrumbs
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.della import Della
from sparing.valley.merging.fisher import Fisher
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.merging.method import Method
from sparing.valley.merging.regmean import RegMean
from sparing.valley.merging.sce import Sce
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.soup import soup
from sparing.valley.merging.spherical import ModelStock, MultiSlerp, Slerp
from sparing.valley.merging.ties import Ties
from sparing.valley.recipes.apply import merge_recipe
from sparing.valley.scans.better import Better
from sparing.valley.scans.curvature import along, gradient, hessian_trace, top_eigenpairs
from sparing.valley.scans.curve import Curve
from sparing.valley.scans.evaluators import Classification, NextToken
from sparing.valley.scans.interpolate import interpolate
from sparing.valley.scans.intervals import Index
from sparing.valley.scans.plane import plane
from sparing.valley.scans.scan import scan
from sparing.valley.scans.sharpness import sharpness
from sparing.valley.scans.steer import steer
from sparing.valley.scans.surface import scan2d

__all__ = [
    "Alignment",
    "Better",
    "Breadcrumbs",
    "Classification",
    "Curve",
    "Dare",
    "Della",
    "Direction",
    "Fisher",
    "Given",
    "Group",
    "Index",
    "Linear",
    "MergeForecast",
    "Method",
    "ModelStock",
    "MultiSlerp",
    "NextToken",
    "Noise",
    "Norm",
    "RegMean",
    "Resolved",
    "Sce",
    "SignAware",
    "Slerp",
    "Special",
    "TaskArithmetic",
    "Ties",
    "align",
    "along",
    "difference",
    "direction_of",
    "expected_consistency",
    "gradient",
    "hessian_trace",
    "interpolate",
    "merge",
    "merge_recipe",
    "plane",
    "predict_merge",
    "scan",
    "scan2d",
    "sharpness",
    "sign_agreement",
    "soup",
    "steer",
    "top_eigenpairs",
]
