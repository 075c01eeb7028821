"""Operations of one training step, from shapes: where freezing blocks saves time and where it does not."""

from __future__ import annotations

from dataclasses import dataclass

from sparing.layersample.price.activations import LoRA, Trained, Work
from sparing.layersample.price.shape import Shape


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one step in matrix products; a multiply-add counts two."""

    forward: int = 0  # forward pass (operations)
    recompute: int = 0  # forward passes of blocks run again under activation checkpointing (operations)
    inputs: int = 0  # gradients with respect to activations (operations): all blocks from the lowest trained one up
    weights: int = 0  # gradients with respect to weights (operations): trained ones only

    @property
    def total(self) -> int:
        """Sum of the parts (operations)."""
        return self.forward + self.recompute + self.inputs + self.weights


def flops(shape: Shape, work: Work, trained: Trained) -> Flops:
    """Count the matrix products of one step; an embedding lookup costs none, attention is counted unmasked.

    For short sequences and n weights per token the total is near the familiar ``6n`` (full), ``4n + 2n_active``
    (embedding trains), ``2n + 2n_above + 2n_active`` (embedding frozen).
    """
    lowest, lora = trained.lowest(shape.layers), trained.lora
    above = shape.layers - lowest
    block = block_forward(shape, work) + 2 * work.tokens * _adapter(shape, lora)
    ends = 2 * work.tokens * (shape.vocab * shape.width)
    adapted = unneeded = 0
    if lora is not None:
        # the first matrix of the embedding's adapter is a lookup, so only its second multiplies
        adapted = 2 * work.tokens * lora.rank * (lora.embed * shape.width + lora.head * (shape.vocab + shape.width))
        # under adapters alone nothing asks for input gradients of the first block's queries, keys and values
        maps = () if trained.enters(0) else shape.entrance
        unneeded = 2 * work.tokens * sum(inputs * (outputs + lora.rank) for inputs, outputs in maps)
    down = trained.enters(shape.layers) or trained.tail
    return Flops(
        forward=shape.layers * block + ends + adapted,
        recompute=above * (block - _last_product(shape, work, lora)) if work.checkpointing else 0,
        inputs=above * block + above * _attention(shape, work) + down * ends + adapted - unneeded,
        weights=2 * work.tokens * (len(trained.blocks) * shape.block_matmul + above * _adapter(shape, lora))
        + trained.head * ends
        + adapted,
    )


def block_forward(shape: Shape, work: Work) -> int:
    """Operations of the forward pass of one block without adapters."""
    return 2 * work.tokens * shape.block_matmul + _attention(shape, work)


def block_backward(shape: Shape, work: Work) -> int:
    """Operations that each further block below the lowest active one would add: input gradients and recomputation."""
    again = work.checkpointing * (block_forward(shape, work) - _last_product(shape, work, None))
    return block_forward(shape, work) + _attention(shape, work) + again


def _last_product(shape: Shape, work: Work, lora: LoRA | None) -> int:
    """The last product of a block is not computed again: nothing after it is needed, and recomputation stops early."""
    return 2 * work.tokens * shape.width * (lora.rank if lora else shape.ffn)


def _attention(shape: Shape, work: Work) -> int:
    """Scores and their product with the values; the backward pass costs twice this."""
    return 4 * work.tokens * work.length * shape.queries


def _adapter(shape: Shape, lora: LoRA | None) -> int:
    """Weights of the adapters of one block."""
    return lora.rank * sum(inputs + outputs for inputs, outputs in shape.linears) if lora else 0
