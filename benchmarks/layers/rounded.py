"""Is it the rounding? Ladder 1 from weights that were rounded to four bits, as those of ladder 2 were.

The packaged weights of SmolLM2 lie on a grid of four bits. Fine-tuning that reaches every layer may mend that rounding,
which fine-tuning of a few layers cannot, and so look better than it is. Here the matrices of the body of ladder 1's
model are rounded in the same way before anything trains; if the order of the arms turns round, it is the rounding.

``python -m benchmarks.layers.rounded`` goes on where it stopped; ``--list`` says what is left.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.layers import base
from benchmarks.layers.arms import ARMS
from benchmarks.layers.study import ENDS, LADDER_1, SEEDS, command
from sparing.blocks import find_blocks, submodule

GROUP, LEVELS = 32, 15
COMPARED = ("no training", "full", "LoRA, rank 8", "LISA")


def four_bits(weight: Tensor) -> Tensor:
    """Round to sixteen levels between least and most of every 32 weights, step and least in 16 bits (Q4_1).

    Example:
        >>> four_bits(torch.arange(32.0))[:4]
        tensor([0.0000, 0.0000, 2.0664, 2.0664])
    """
    groups = weight.detach().reshape(-1, GROUP)
    least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step, least = ((most - least) / LEVELS).half().float(), least.half().float()
    level = ((groups - least) / step.clamp_min(torch.finfo(torch.float32).tiny)).round().clamp(0, LEVELS)
    return (least + step * level).reshape(weight.shape)


@functools.cache
def load() -> nn.Module:
    """The model of ladder 1 with the matrices of its blocks rounded; tables as they are."""
    model = base.load()
    for block in find_blocks(model):
        if block.role == "body":
            for layer in submodule(model, block.name).modules():
                if isinstance(layer, nn.Linear):
                    layer.weight.data.copy_(four_bits(layer.weight))
    return model


STUDY = replace(
    LADDER_1, name="ladder 1, four bits", load=load, seeds=SEEDS[:4],
    arms=(*(arm for arm in ARMS if arm.name in COMPARED), ENDS[0]),
)  # fmt: skip


def main() -> None:
    """Do what is missing, or say what it is."""
    command(__doc__, lambda rows: STUDY)


if __name__ == "__main__":
    main()
