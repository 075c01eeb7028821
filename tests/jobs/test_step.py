"""Clipping by the norm of all gradients together."""

from __future__ import annotations

import math

import pytest
import torch

from sparing.jobs.step import clip_


def test_the_norm_is_that_of_all_gradients_together() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 4, 2)]
    parameters[0].grad, parameters[1].grad = torch.full((3,), 2.0).double(), torch.full((4,), 3.0).double()
    assert float(clip_(parameters, 0.0)) == pytest.approx(math.sqrt(48), rel=1e-15)
    assert float(clip_(parameters, 1.0)) == pytest.approx(math.sqrt(48), rel=1e-15)
    # torch divides by norm + 1e-6
    assert float(clip_(parameters, 0.0)) == pytest.approx(1.0, rel=1e-6)
    assert parameters[2].grad is None
