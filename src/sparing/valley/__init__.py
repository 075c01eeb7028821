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
from sparing.valley.better import Better as Better
from sparing.valley.config import Direction as Direction
from sparing.valley.config import Given as Given
from sparing.valley.config import Group as Group
from sparing.valley.config import Noise
from sparing.valley.config import Norm as Norm
from sparing.valley.config import OneD as OneD
from sparing.valley.config import Signs as Signs
from sparing.valley.config import Special as Special
from sparing.valley.config import difference as difference
from sparing.valley.curvature import along as along
from sparing.valley.curvature import gradient as gradient
from sparing.valley.curvature import hessian_trace as hessian_trace
from sparing.valley.curvature import top_eigenpairs as top_eigenpairs
from sparing.valley.curve import Curve as Curve
from sparing.valley.dare import Dare as Dare
from sparing.valley.directions import Resolved as Resolved
from sparing.valley.directions import direction_of as direction_of
from sparing.valley.evaluators import Classification as Classification
from sparing.valley.evaluators import NextToken as NextToken
from sparing.valley.interpolate import interpolate
from sparing.valley.intervals import Index as Index
from sparing.valley.linear import Linear as Linear
from sparing.valley.linear import TaskArithmetic as TaskArithmetic
from sparing.valley.merge import merge
from sparing.valley.noises import expected_consistency as expected_consistency
from sparing.valley.predict import MergeForecast as MergeForecast
from sparing.valley.predict import predict_merge
from sparing.valley.scan import scan
from sparing.valley.sign_aware import SignAware as SignAware
from sparing.valley.soup import soup
from sparing.valley.steer import steer as steer
from sparing.valley.surface import scan2d
from sparing.valley.ties import Ties as Ties

__all__ = ["Noise", "interpolate", "merge", "predict_merge", "scan", "scan2d", "sign_agreement", "soup"]
