"""One training step walked through by hand: which bytes are alive at which instant, and where their sum is largest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparing.layersample.price.activations import (
    FLOAT,
    INDEX,
    Trained,
    Work,
    at_forward_end,
    head,
    inside,
    kept,
    last_input,
    second,
)  # fmt: skip
from sparing.layersample.price.flops import flops
from sparing.layersample.price.shape import Shape
from sparing.memory import CATEGORIES, Bytes, Profile
from sparing.memory.passes import Passes
from sparing.memory.sizes import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes beside activations and gradients."""

    params: int  # weights of the model and of adapters (bytes)
    optimizer: int  # optimizer state, masters included (bytes)
    step: int  # temporaries of the optimizer's step (bytes)


def walk(shape: Shape, work: Work, trained: Trained, held: Held, *, accumulates: bool = False) -> Profile:
    """Find the peak of one step in the steady state, and the composition at the end of each phase."""
    found = passes(shape, work, trained, held.params, accumulates=accumulates)
    state = Bytes(optimizer=held.optimizer)
    after = found.backward + state
    peak = max(found.peak + state, after + Bytes(transient=held.step), key=lambda instant: instant.total)
    phases: dict[Phase, Bytes] = {"forward": found.forward + state, "backward": after, "step": after}
    return Profile(**{name: getattr(peak, name) for name in CATEGORIES}, phases=phases)


def passes(shape: Shape, work: Work, trained: Trained, params: int, *, accumulates: bool = False) -> Passes:
    """Both passes of a step whose model holds ``params`` bytes.

    The instants looked at: the end of the forward pass, the backward passes of loss and head, of feed-forward part and
    attention of every block from the top down to the lowest trained one, and of the embedding. Of a step that
    accumulates, a later micro-batch is walked: the gradients of the earlier ones are there when its activations come.
    """
    end = at_forward_end(shape, work, trained)
    grads = _grads(shape, work, trained)
    before = accumulates * grads
    forward = Bytes(params, before, 0, end, 0)
    stretches = {"forward": forward, "loss": Bytes(params, before, 0, end, _at_the_loss(shape, work))}
    # what comes with a later micro-batch stands beside what is there: of a matrix until it is added, of a tied table
    # until the embedding's comes
    table = trained.embed * shape.tied * shape.vocab * shape.width * work.element
    instants = [
        Bytes(params, max(g, before + accumulates * table), 0, a, t) for g, a, t in _backward(shape, work, trained, end)
    ]
    stretches["body"] = max(instants, key=lambda instant: instant.total)
    # Head and embedding of a tied table have a gradient each, beside their sum; a loss in parts makes one that the
    # other is added to.
    count = (1 + (work.parts == 1)) * shape.tied + accumulates
    tables = trained.embed * count * shape.vocab * shape.width * work.element
    stretches["embedding"] = Bytes(params, grads, 0, 2 * INDEX * work.tokens, tables)
    return Passes(
        stretches=stretches,
        forward=forward,
        backward=Bytes(params, grads, 0, 2 * INDEX * work.tokens, 0),  # token ids and labels
        flops=flops(shape, work, trained).total,
    )


def _at_the_loss(shape: Shape, work: Work) -> int:
    """The gradients of the log-softmax's result and of its input, or of a part: its logits twice, and all its input."""
    if work.parts == 1:
        return 2 * FLOAT * work.tokens * shape.vocab
    narrow = work.element if work.element < FLOAT else 0
    return (FLOAT + narrow) * work.at_once * shape.vocab + work.tokens * shape.width * work.element


def _grads(shape: Shape, work: Work, trained: Trained) -> int:
    """Gradients when the backward pass is over."""
    adapters = trained.lora.params(shape) * trained.lora.element(work) if trained.lora else 0
    return (trained.outside(shape) + len(trained.blocks) * shape.block) * work.element + adapters


def _backward(shape: Shape, work: Work, trained: Trained, forward: int) -> Iterator[tuple[int, int, int]]:
    """Walk backward: (gradients, activations, temporaries) at each instant (bytes)."""
    logits, stream = work.tokens * shape.vocab, work.tokens * shape.width * work.element
    grads = trained.head * shape.vocab * shape.width * work.element
    if work.parts == 1:
        yield 0, forward, _at_the_loss(shape, work)
        yield grads, forward - FLOAT * logits, logits * work.element + stream
    else:
        # the last norm, in float32 but for that of GPT-2
        wide = 2 * stream if shape.norm == "layer" else 3 * FLOAT * work.tokens * shape.width + stream
        yield grads, forward - grads, wide
    alive = forward - head(shape, work, trained)
    grads += trained.tail * shape.tail * work.element
    adapter = (_grads(shape, work, trained) if trained.lora else 0) // max(shape.layers, 1)
    for block in range(shape.layers - 1, trained.lowest(shape.layers) - 1, -1):
        alive -= kept(shape, work, trained, block)
        active, computed = block in trained.blocks, alive + inside(shape, work, trained, block)
        # a block that runs again holds its input, and a mask of a byte a pair
        computed += work.checkpointing * (stream + work.padded * work.batch * work.length**2)
        if work.checkpointing and shape.gated and trained.lora and trained.lora.element(work) > work.element:
            # what the last wide adapter adds, before and after its scale, when nothing of the last map is there yet
            yield grads, computed + work.tokens * shape.ffn * FLOAT + 2 * stream, 4 * stream
        # the feed-forward part comes first: only its last matrix has its gradient yet, and let its input go
        last = grads + active * shape.ffn * shape.width * work.element
        inner = (2 + shape.gated) * work.tokens * shape.ffn * work.element
        yield last, computed - last_input(shape, work, trained, active=active), inner + stream
        grads += adapter + active * shape.block * work.element
        scores = (work.attention == "eager") * work.scores(shape)  # formed as a whole, in float32 for the softmax
        heads = 3 * work.tokens * shape.queries * work.element  # gradients of queries, keys and values
        temporaries = heads + scores * (work.element + 2 * FLOAT) + 2 * stream
        yield grads, computed - second(shape, work, trained, active=active), temporaries
