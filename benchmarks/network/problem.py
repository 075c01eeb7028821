"""The problem every arm trains: blocks of Linear–GELU–Linear on noise, some rows of every Linear trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.network.cells import Cell

LEARNING_RATE = 1e-3


class SplitLinear(nn.Module):
    """A Linear whose first rows are trained and whose other rows and bias are frozen.

    Ψ stays what it is at any trainable share, and every block has the same share of it.
    """

    def __init__(self, whole: nn.Linear, rows: int) -> None:
        super().__init__()
        weight = whole.weight.detach()
        self.trained = nn.Parameter(weight[:rows].clone())
        self.frozen = nn.Parameter(weight[rows:].clone(), requires_grad=False)
        self.bias = nn.Parameter(whole.bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """What the whole Linear computes."""
        return torch.cat([F.linear(x, self.trained), F.linear(x, self.frozen)], dim=-1) + self.bias


def linear(width: int, rows: int) -> nn.Module:
    """A square Linear of which ``rows`` rows are trained."""
    whole = nn.Linear(width, width)
    if rows >= width:
        return whole
    if rows == 0:
        return whole.requires_grad_(False)
    return SplitLinear(whole, rows)


def model(cell: Cell) -> nn.Sequential:
    """The model of a cell, equal on all ranks."""
    torch.manual_seed(cell.seed)
    rows = round(2 * cell.width * cell.trainable)  # of the two Linears of a block
    return nn.Sequential(
        *(
            nn.Sequential(linear(cell.width, rows - rows // 2), nn.GELU(), linear(cell.width, rows // 2))
            for _ in range(cell.blocks)
        )
    )


class Data:
    """Micro-batches of one rank, the same in every step."""

    def __init__(self, cell: Cell, rank: int) -> None:
        draw = torch.Generator().manual_seed(1000 * cell.seed + rank + 1)
        size = (cell.accumulate, cell.batch, cell.width)
        self.inputs, self.targets = (torch.randn(size, generator=draw) for _ in range(2))

    def loss(self, net: nn.Module, micro: int) -> Tensor:
        """Mean squared error of one micro-batch."""
        return F.mse_loss(net(self.inputs[micro]), self.targets[micro])


def counts(net: nn.Module) -> tuple[int, int]:
    """Ψ and Ψ'."""
    return sum(p.numel() for p in net.parameters()), sum(p.numel() for p in net.parameters() if p.requires_grad)
