"""One training step walked through by hand: which bytes are alive at which instant, and where their sum is largest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparing.layersample.price.activations import FLOAT, INDEX, Trained, Work, at_forward_end, ffn, head, inside, kept
from sparing.layersample.price.shape import Shape
from sparing.memory import Bytes, Profile
from sparing.memory.sizes import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes beside activations and gradients."""

    params: int  # weights of the model and of adapters (bytes)
    optimizer: int  # optimizer state, masters included (bytes)
    step: int  # temporaries of the optimizer's step (bytes)


def walk(shape: Shape, work: Work, trained: Trained, held: Held, *, accumulates: bool = False) -> Profile:
    """Find the peak of one step in the steady state, and the composition at the end of each phase.

    The instants looked at: the end of the forward pass, the backward passes of loss and head, of feed-forward part and
    attention of every block from the top down to the lowest trained one, and the optimizer's step. The embedding's is
    omitted: it has all gradients alive and at most one table more, and AdamW's step has that too. Of a step that
    accumulates, a later micro-batch is walked: the gradients of the earlier ones are there when its activations come.
    """
    forward = at_forward_end(shape, work, trained)
    grads = _grads(shape, work, trained)
    batch = 2 * INDEX * work.tokens  # token ids and labels
    phases: dict[Phase, Bytes] = {
        "forward": Bytes(held.params, accumulates * grads, held.optimizer, forward, 0),
        "backward": Bytes(held.params, grads, held.optimizer, batch, 0),
        "step": Bytes(held.params, grads, held.optimizer, batch, 0),
    }
    instants = [
        *(Bytes(held.params, g, held.optimizer, a, t) for g, a, t in _backward(shape, work, trained, forward)),
        Bytes(held.params, grads, held.optimizer, batch, held.step),
        phases["forward"],
    ]
    if accumulates:
        instants.append(Bytes(held.params, grads, held.optimizer, forward, _loss_gradients(shape, work)))
    peak = max(instants, key=lambda instant: instant.total)
    return Profile(peak.params, peak.grads, peak.optimizer, peak.activations, peak.transient, phases=phases)


def _loss_gradients(shape: Shape, work: Work) -> int:
    """The gradients of the log-softmax's result and of its input."""
    return 2 * FLOAT * work.tokens * shape.vocab


def _grads(shape: Shape, work: Work, trained: Trained) -> int:
    """Gradients when the backward pass is over."""
    adapters = trained.lora.params(shape) * trained.lora.element(work) if trained.lora else 0
    return (trained.outside(shape) + len(trained.blocks) * shape.block) * work.element + adapters


def _backward(shape: Shape, work: Work, trained: Trained, forward: int) -> Iterator[tuple[int, int, int]]:
    """Walk backward: (gradients, activations, temporaries) at each instant (bytes)."""
    logits, stream = work.tokens * shape.vocab, work.tokens * shape.width * work.element
    yield 0, forward, _loss_gradients(shape, work)
    grads = trained.head * shape.vocab * shape.width * work.element
    alive = forward - FLOAT * logits
    yield grads, alive, logits * work.element + stream
    alive = forward - head(shape, work, trained)
    grads += trained.tail * shape.tail * work.element
    adapter = (_grads(shape, work, trained) if trained.lora else 0) // max(shape.layers, 1)
    for block in range(shape.layers - 1, trained.lowest(shape.layers) - 1, -1):
        alive -= kept(shape, work, trained, block)
        active, computed = block in trained.blocks, alive + inside(shape, work, trained, block)
        # the feed-forward part comes first: only its last matrix has its gradient yet
        last = grads + active * shape.ffn * shape.width * work.element
        yield last, computed, (2 + shape.gated) * work.tokens * shape.ffn * work.element + stream
        grads += adapter + active * shape.block * work.element
        scores = (work.attention == "eager") * work.scores(shape)  # formed as a whole, in float32 for the softmax
        heads = 3 * work.tokens * shape.queries * work.element  # gradients of queries, keys and values
        temporaries = heads + scores * (work.element + 2 * FLOAT) + 2 * stream
        yield grads, computed - ffn(shape, work, active=active), temporaries
