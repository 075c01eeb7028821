"""Masks that change in training where a gradient overflows, as under a gradient scaler."""

from __future__ import annotations

import math

import pytest
import torch

from scaling.test_evolve import METHODS, run, setup


@pytest.mark.parametrize("where", ["live", "dropped"])
def test_a_gradient_that_overflowed_changes_no_moment_for_good(where, monkeypatch):
    """As in a step that a gradient scaler skips: neither masks nor second moments may keep what is not finite."""
    model, masks, optimizer, evolution = setup(METHODS["rigl"])
    real = type(masks).dense_gradient_of

    def overflowed(self, name):
        gradient = real(self, name)
        if gradient is None:
            return None
        at = self[name] if where == "live" else ~self[name]
        return torch.where(at & (at.cumsum(0) == 1), torch.inf, gradient)

    monkeypatch.setattr(type(masks), "dense_gradient_of", overflowed)
    losses = run(model, optimizer, evolution)
    assert all(math.isfinite(loss) for loss in losses)
    for parameter, state in optimizer.state.items():
        assert parameter.isfinite().all()
        assert all(held.isfinite().all() for held in state.values())
    assert any(row["grown"] for row in evolution.history)
