"""How good condensed images are: fresh nets trained on them alone, judged on real images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.jobs.condense.inputs import Pair, floats
from sparing.jobs.condense.net import Weights, init_weights, logits
from sparing.jobs.condense.state import TrainState, inner_problem
from sparing.seeds import stream

AT_ONCE = 500  # real images judged at once (count): what stays in a processor's cache


def accuracy(weights: Weights, real: Pair) -> float:
    """Share of real images that a net puts in the right class (%)."""
    images, labels = real
    with torch.no_grad():
        parts = [logits(weights, floats(images[at : at + AT_ONCE])).argmax(1) for at in range(0, len(images), AT_ONCE)]
    return 100 * float((torch.cat(parts) == labels).double().mean())


def fresh_net(state: TrainState, images: Tensor, number: int) -> Weights:
    """Train a net that the outer loop has not seen; the same number is the same start for every method and seed."""
    settings = state.settings
    start = init_weights(state.shape, stream(0, "condense", "judge", number))
    run = inner_problem(settings, state.labels, start, steps=settings.eval_steps, lr=settings.eval_lr)
    # a problem needs an outer loss, which solving it never asks for
    none = lambda theta, phi: theta["linear.bias"].sum() * 0  # noqa: E731
    weights: Any = hg.solve(hg.Bilevel(outer=none, **run), {"images": images})
    return {name: weight.detach() for name, weight in weights.items()}


def accuracies(state: TrainState, images: Tensor, *, nets: int, first: int = 0, most: int | None = None) -> list[float]:
    """Accuracy (%) of fresh nets on the real images that the settings name, or on the first ``most`` of them."""
    real = state.inputs.test if state.settings.judge == "test" else state.inputs.held_out
    real = (real[0][:most], real[1][:most])
    return [accuracy(fresh_net(state, images, number), real) for number in range(first, first + nets)]
