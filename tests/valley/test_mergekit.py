"""The tensor function behind the mergekit method, and what is said where mergekit is not installed."""

from __future__ import annotations

import sys

import pytest
import torch

from refusals import refused
from sparing.valley.mergekit import merge_tensor, register


def test_the_tensor_function_by_hand() -> None:
    """Base (1, 1, −1); changes (−3, 1, 0.5) and (1, 1, 0.5), all kept.

    First: the sum −2 elects minus, whose only change is −3, which would flip the sign; it holds ¾ of all change and
    may. With a majority of 0.8 it may not, and the base stays. Second and third: the mean.
    """
    base = torch.tensor([1.0, 1.0, -1.0])
    models = [base + torch.tensor([-3.0, 1.0, 0.5]), base + torch.tensor([1.0, 1.0, 0.5])]
    got = merge_tensor(models, base, weights=[1.0, 1.0], density=1.0)
    assert got.tolist() == [-2.0, 2.0, -0.5]
    assert merge_tensor(models, base, weights=[1.0, 1.0], density=1.0, majority=0.8).tolist() == [1.0, 2.0, -0.5]
    assert merge_tensor(models, base, weights=[1.0, 1.0], density=1.0, scale=0.5).tolist() == [-0.5, 1.5, -0.75]
    assert merge_tensor(models, base, weights=[0.0, 1.0], density=1.0).tolist() == [2.0, 2.0, -0.5]
    assert merge_tensor([], base, weights=[]).equal(base)
    refused("weights", merge_tensor, models, base, weights=[1.0])


def test_without_mergekit_its_install_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mergekit", None)
    refused(r"pip install mergekit==0\.1\.5", register)
