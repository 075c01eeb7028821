"""Bytes that autograd keeps for the backward pass of a transformer, counted operation by operation.

A frozen linear map keeps nothing of its input, that is where layer sampling saves activations; norms, products and
attention keep theirs as long as anything below them trains. Counted are the Hugging Face implementations without
dropout and without key-value cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sparing.errors import require
from sparing.layersample.price.shape import Shape

FLOAT = 4  # bytes
INDEX = 8  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRA:
    """The rival: low-rank adapters on every linear map of the blocks, optionally on embedding and head.

    Source: Hu et al. 2022 (arXiv:2106.09685); what is kept for the backward pass is that of peft.
    """

    rank: int = 16  # rank r of every adapter (count)
    embed: bool = False  # adapt the embedding too
    head: bool = False  # adapt the head too
    dropout: bool = False  # dropout before each adapter; every adapter then keeps its own masked copy of its input

    # adapters in float32 beside a half-precision model (peft's default): every adapter keeps a float32 copy of its
    # input
    float_adapters: bool = False

    def __post_init__(self) -> None:
        """Refuse a rank below one."""
        require(self.rank >= 1, "LoRA.rank", self.rank, "an adapter needs a rank", "pass rank >= 1")

    def element(self, work: Work) -> int:
        """Bytes of an element of the adapters."""
        return FLOAT if self.float_adapters else work.element

    def params(self, shape: Shape) -> int:
        """Trainable parameters (count): ``r·(inputs + outputs)`` for each adapted matrix."""
        ends = (self.embed + self.head) * (shape.vocab + shape.width)
        return self.rank * (ends + shape.layers * sum(inputs + outputs for inputs, outputs in shape.linears))


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One forward and backward pass, as far as memory goes."""

    batch: int  # sequences at once (count)
    length: int  # tokens of a sequence (count)
    dtype: torch.dtype  # type of weights and activations
    attention: Literal["sdpa", "eager"] = "sdpa"  # fused attention, or the whole matrix of scores

    # the batch has a padding mask: fused attention then repeats grouped keys and values, and each block keeps the mask
    # as numbers to add
    padded: bool = False
    checkpointing: bool = False  # keep only the input of each block and compute it again in the backward pass

    # the loop keeps the logits while it goes backward; ``model(**batch).loss`` and the Trainer do not
    logits: bool = False

    # tokens whose logits exist at once, each part turned into its gradients as it comes; 0: those of all tokens
    at_once: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the batch (count)."""
        return self.batch * self.length

    @property
    def parts(self) -> int:
        """Parts in which the loss is taken (count)."""
        return -(-self.tokens // self.at_once) if self.at_once else 1

    @property
    def element(self) -> int:
        """Bytes of an element of ``dtype``."""
        return self.dtype.itemsize

    def scores(self, shape: Shape) -> int:
        """Elements of the attention scores of one block."""
        return self.batch * shape.heads * self.length**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What trains at one instant."""

    embed: bool = True  # the embedding
    blocks: frozenset[int] = frozenset()  # indices of the body blocks
    tail: bool = True  # the final norm
    head: bool = True  # the head
    lora: LoRA | None = None  # adapters in every block, or none

    def outside(self, shape: Shape) -> int:
        """Trained parameters outside the blocks, adapters apart (count)."""
        assert not (shape.tied and self.head and not self.embed), "a tied head trains with its embedding"
        return self.embed * shape.embed + self.tail * shape.tail + self.head * shape.head

    def lowest(self, layers: int) -> int:
        """Index of the first block whose backward pass runs (the number of blocks if none does)."""
        if self.embed or self.lora is not None:
            return 0
        return min(self.blocks, default=layers)

    def enters(self, block: int) -> bool:
        """Whether the input of a block carries a gradient."""
        return (
            self.embed
            or (self.lora is not None and (self.lora.embed or block > 0))
            or any(b < block for b in self.blocks)
        )


def at_forward_end(shape: Shape, work: Work, trained: Trained) -> int:
    """Bytes alive when the loss is known: what every block keeps, what the head keeps, and the batch."""
    blocks = sum(kept(shape, work, trained, block) for block in range(shape.layers))
    return blocks + _positions(shape, work, trained) + head(shape, work, trained) + 3 * INDEX * work.tokens


def kept(shape: Shape, work: Work, trained: Trained, block: int) -> int:
    """Bytes that stay alive for one block after the forward pass."""
    if block < trained.lowest(shape.layers):
        return 0
    if work.checkpointing:
        return work.tokens * shape.width * work.element
    return inside(shape, work, trained, block)


def inside(shape: Shape, work: Work, trained: Trained, block: int) -> int:
    """Bytes that one block keeps without checkpointing, or holds while it is computed again."""
    active, enters = block in trained.blocks, trained.enters(block)
    norms = _norm(shape, work, entered=enters, active=active) + _norm(shape, work, entered=True, active=active)
    return (
        norms
        + _attention(shape, work, active=active)
        + ffn(shape, work, active=active)
        + _inputs(shape, work, trained, entered=enters, active=active)
    )


def head(shape: Shape, work: Work, trained: Trained) -> int:
    """Bytes that final norm, head and loss keep, the log-softmax of the logits in float32 above all.

    A loss in parts keeps two gradients instead: of its input, and of the head's weight.
    """
    entered = trained.enters(shape.layers)
    norm = _norm(shape, work, entered=entered, active=trained.tail)
    if work.parts > 1:
        rows = (entered or trained.tail) * work.tokens + trained.head * shape.vocab
        return norm + rows * shape.width * work.element
    adapters, lora = 0, trained.lora
    # adapters of embedding and head keep their inner vectors, that of the head its input as well
    if lora is not None:
        element = lora.element(work)
        inner = (lora.embed + lora.head) * lora.rank * element
        adapters = work.tokens * (inner + lora.head * shape.width * (element + lora.dropout))
    graph = entered or trained.tail or trained.head or adapters > 0
    logits = (work.element * work.logits + FLOAT * graph) * work.tokens * shape.vocab
    return norm + logits + adapters + trained.head * work.tokens * shape.width * work.element


def _norm(shape: Shape, work: Work, *, entered: bool, active: bool) -> int:
    """A norm over the stream: its input in float32 if a gradient passes, the normed input if its weight trains."""
    elements, rows = work.tokens * shape.width, work.tokens
    if shape.norm == "layer":
        return (entered or active) * (elements * work.element + 2 * rows * work.element)
    if shape.norm == "rms":
        return entered * FLOAT * (elements + rows) + active * work.element * elements
    return entered * FLOAT * (elements + rows + shape.width) + active * FLOAT * elements


def _attention(shape: Shape, work: Work, *, active: bool) -> int:
    """Queries, keys, values, the result, and either a number per row of scores or the scores themselves."""
    tokens, element = work.tokens, work.element
    scores = work.scores(shape)
    if work.attention == "sdpa":
        keys, mask = (shape.queries, scores // shape.heads) if work.padded else (shape.keys, 0)
        total = tokens * (element * 2 * (shape.queries + keys) + max(element, FLOAT) * shape.heads) + element * mask
    else:
        # keys and values are repeated for every query head; the result is kept as the next map's input only
        softmax = element if shape.norm == "layer" or element == FLOAT else element + FLOAT
        total = tokens * element * (3 + active) * shape.queries + softmax * scores
    if shape.qk_norm:
        wide = tokens * (shape.queries + shape.keys)
        total += FLOAT * (wide + tokens * (shape.heads + shape.kv_heads)) + active * element * wide
    return total


def second(shape: Shape, work: Work, trained: Trained, *, active: bool) -> int:
    """What the second half of a block keeps: its norm, the normed stream, and the feed-forward part."""
    normed = _norm(shape, work, entered=True, active=active) + active * work.tokens * shape.width * work.element
    adapted = last_input(shape, work, trained, active=active) if trained.lora else 0
    return normed + ffn(shape, work, active=active) + adapted


def last_input(shape: Shape, work: Work, trained: Trained, *, active: bool) -> int:
    """What the last matrix of a block, or its adapter, keeps of its input."""
    element = trained.lora.element(work) if trained.lora else active * work.element
    return element * work.tokens * shape.ffn


def ffn(shape: Shape, work: Work, *, active: bool) -> int:
    """The operands of the activation function and of the product with the gate."""
    count = 3 if shape.gated else 4 if shape.split_activation else 1
    return (count + active) * work.tokens * shape.ffn * work.element


def _inputs(shape: Shape, work: Work, trained: Trained, *, entered: bool, active: bool) -> int:
    """Inputs of trained linear maps that nothing else keeps: the two normed streams, or what adapters keep."""
    tokens, element, lora = work.tokens, work.element, trained.lora
    if lora is None:
        return active * 2 * tokens * shape.width * element
    inner = len(shape.linears) * lora.rank * lora.element(work)
    copies = sum(inputs for inputs, _ in shape.linears)
    # with dropout: the masked copy in the adapter's type, and the mask of one byte if a gradient passes
    if lora.dropout:
        masks = copies - (not entered) * sum(inputs for inputs, _ in shape.entrance)
        return tokens * (inner + masks + copies * lora.element(work))
    if lora.float_adapters and element != FLOAT:
        return tokens * (inner + copies * FLOAT)
    return tokens * (inner + (2 * shape.width + shape.ffn) * element)


def _positions(shape: Shape, work: Work, trained: Trained) -> int:
    """Indices of learned positions, or one table of cosines and sines for all blocks and sequences."""
    if shape.positions:
        return trained.embed * INDEX * work.length
    used = trained.lowest(shape.layers) < shape.layers
    return used * 2 * work.length * shape.head_dim * work.element
