"""Valleys: scan the loss along unbiased directions, measure its asymmetry, and say which merges work.

``scan`` walks to both sides of a minimum with batch-norm statistics that belong to every point, and gives the asymmetry
a number with an interval; ``sign_agreement``, ``predict_merge`` and ``interpolate`` say what two models have in common,
what their average will lose and what it does lose; ``soup`` and ``merge`` make one model of several.

Li, Dai, Li, Li & Zhan, "Exploring and Exploiting the Asymmetric Valley of Deep Neural Networks", NeurIPS 2024
(arXiv:2405.12489).

    found = scan(model, Classification(inputs, classes), Noise("gaussian", sign="consistent"), calibrate=[train_inputs])
    found.asymmetry["error"].value, found.asymmetry["error"].interval, found.consistency
    predict_merge(a, b, base=pretrained).verdict
"""

from sparing.valley.agreement import sign_agreement
from sparing.valley.better import Better
from sparing.valley.config import Direction, Given, Group, Noise, Norm, OneD, Signs, Special, difference
from sparing.valley.curvature import along, gradient, hessian_trace, top_eigenpairs
from sparing.valley.curve import Curve
from sparing.valley.dare import Dare
from sparing.valley.directions import Resolved, direction_of
from sparing.valley.evaluators import Classification, NextToken
from sparing.valley.interpolate import interpolate
from sparing.valley.intervals import Index
from sparing.valley.linear import Linear, TaskArithmetic
from sparing.valley.merge import merge
from sparing.valley.noises import expected_consistency
from sparing.valley.predict import MergeForecast, predict_merge
from sparing.valley.scan import scan
from sparing.valley.sign_aware import SignAware
from sparing.valley.soup import soup
from sparing.valley.steer import steer
from sparing.valley.surface import scan2d
from sparing.valley.ties import Ties

__all__ = [
    "Better",
    "Classification",
    "Curve",
    "Dare",
    "Direction",
    "Given",
    "Group",
    "Index",
    "Linear",
    "MergeForecast",
    "NextToken",
    "Noise",
    "Norm",
    "OneD",
    "Resolved",
    "SignAware",
    "Signs",
    "Special",
    "TaskArithmetic",
    "Ties",
    "along",
    "difference",
    "direction_of",
    "expected_consistency",
    "gradient",
    "hessian_trace",
    "interpolate",
    "merge",
    "predict_merge",
    "scan",
    "scan2d",
    "sign_agreement",
    "soup",
    "steer",
    "top_eigenpairs",
]
