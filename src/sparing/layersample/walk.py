"""One training step walked through by hand: which bytes are alive at which instant, and where their sum is largest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparing.layersample.activations import Trained, Work, at_forward_end, ffn, head, inside, kept
from sparing.layersample.shape import Shape
from sparing.memory import Bytes, Profile
from sparing.memory.sizes import Phase

_FLOAT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Bytes beside activations and gradients."""

    params: int  # weights of the model and of adapters (bytes)
    optimizer: int  # optimizer state, masters included (bytes)
    step: int  # temporaries of the optimizer's step (bytes)


def walk(shape: Shape, work: Work, trained: Trained, held: Held) -> Profile:
    """Find the peak of one step in the steady state, and the composition at the end of each phase.

    The instants looked at: the end of the forward pass, the backward passes of loss and head, of feed-forward part and
    attention of every block from the top down to the lowest trained one, and the optimizer's step. The embedding's is
    left out: it has all gradients alive and at most one table more, and AdamW's step has that too.
    """
    forward = at_forward_end(shape, work, trained)
    grads = _grads(shape, work, trained)
    phases: dict[Phase, Bytes] = {
        "forward": Bytes(held.params, 0, held.optimizer, forward, 0),
        "backward": Bytes(held.params, grads, held.optimizer, _batch(work), 0),
        "step": Bytes(held.params, grads, held.optimizer, _batch(work), 0),
    }
    instants = [
        *(Bytes(held.params, g, held.optimizer, a, t) for g, a, t in _backward(shape, work, trained, forward)),
        Bytes(held.params, grads, held.optimizer, _batch(work), held.step),
        phases["forward"],
    ]
    peak = max(instants, key=lambda instant: instant.total)
    return Profile(peak.params, peak.grads, peak.optimizer, peak.activations, peak.transient, phases=phases)


def _batch(work: Work) -> int:
    """Token ids and labels."""
    return 2 * 8 * work.tokens


def _grads(shape: Shape, work: Work, trained: Trained) -> int:
    """Gradients when the backward pass is over."""
    ends = trained.embed * shape.embed + trained.tail * shape.tail + trained.head * shape.head
    adapters = 0
    if trained.lora is not None:
        adapters = trained.lora.params(shape) * (_FLOAT if trained.lora.float_adapters else work.element)
    return (ends + len(trained.blocks) * shape.block) * work.element + adapters


def _backward(shape: Shape, work: Work, trained: Trained, forward: int) -> Iterator[tuple[int, int, int]]:
    """Walk backward: (gradients, activations, temporaries) at each instant (bytes)."""
    logits, stream = work.tokens * shape.vocab, work.tokens * shape.width * work.element
    yield 0, forward, 2 * _FLOAT * logits  # the gradients of the log-softmax's result and of its input
    grads = trained.head * shape.vocab * shape.width * work.element
    alive = forward - _FLOAT * logits
    yield grads, alive, logits * work.element + stream
    alive = forward - head(shape, work, trained)
    grads += trained.tail * shape.tail * work.element
    adapter = (_grads(shape, work, trained) if trained.lora else 0) // max(shape.layers, 1)
    for block in range(shape.layers - 1, trained.lowest(shape.layers) - 1, -1):
        alive -= kept(shape, work, trained, block)
        active, computed = block in trained.blocks, alive + inside(shape, work, trained, block)
        last = grads + active * shape.ffn * shape.width * work.element  # only the last matrix has its gradient yet
        yield last, computed, (2 + shape.gated) * work.tokens * shape.ffn * work.element + stream
        grads += adapter + active * shape.block * work.element
        yield grads, computed - ffn(shape, work, active=active), _attention(shape, work) + 2 * stream


def _attention(shape: Shape, work: Work) -> int:
    """Temporaries of attention's backward pass: three gradients, and those of the scores if they are formed."""
    scores = work.batch * shape.heads * work.length**2
    eager = work.attention == "eager"
    return 3 * work.tokens * shape.queries * work.element + eager * scores * (work.element + 2 * _FLOAT)
