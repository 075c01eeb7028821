"""Attention logits as a probe sees them, against the same written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparing.scaling.check.logits import LogitsProbe, changes, live


class Causal(nn.Module):
    """One causal head on its input, and a softmax behind it that is no attention's."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused, self.inner = fused, nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)
        hidden = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        return (x @ x.mT / math.sqrt(x.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1) @ x


class Net(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.attention = Causal(fused=fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x).softmax(-1)


X = torch.randn(2, 1, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fused", [True, False])
def test_logits_of_live_positions_are_kept_and_gradients_flow(fused):
    x = X.clone().requires_grad_()
    net = Net(fused=fused)
    with LogitsProbe(net, ["attention"]) as seen:
        output = net(x)
    expected = (X @ X.mT / math.sqrt(8))[..., torch.ones(4, 4, dtype=torch.bool).tril()]
    (kept,) = live(seen.found["attention"])
    torch.testing.assert_close(kept, expected.flatten(), rtol=1e-12, atol=1e-12)
    output.square().sum().backward()
    assert bool(x.grad.abs().sum() > 0)
    assert not net.attention._forward_hooks
    net(X)
    assert len(seen.found["attention"]) == 1


def test_changes_are_those_of_live_positions():
    before, now = torch.tensor([[1.0, -math.inf], [2.0, 3.0]]), torch.tensor([[1.5, -math.inf], [2.0, 1.0]])
    (found,) = changes([now], [before])
    assert found.tolist() == [0.5, 0.0, -2.0]
