"""What an outer step changes, as one tree φ: images, soft labels and learning rates, and how each begins.

Images are 0 to 1, labels are logits of a distribution over classes, rates are logarithms, one an inner step or one an
inner step and weight tensor.

Source: Wang et al. 2018 (arXiv:1811.10959) for learned rates; Bohdal et al. 2020 (arXiv:2006.08572) and Sucholutsky &
Schonlau 2021 (arXiv:1910.02551) for soft labels; Feng et al. 2024 (arXiv:2310.01317) for random windows of the unroll,
which ``state.problem_at`` draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from sparing.errors import require
from sparing.jobs.condense.inputs import Inputs, Pair, floats
from sparing.jobs.condense.settings import Condense
from sparing.seeds import stream

Phi = dict[str, Tensor]

SURE = 4.0  # logit of an image's own class at the start, 0 of the others: of ten classes it has 86 %


def real_images(pair: Pair, classes: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` real images of each class, drawn without replacement, sorted by class, 0 to 1."""
    members = [of_class(pair, kind, count) for kind in range(classes)]
    chosen = [each[torch.randperm(len(each), generator=generator)[:count]] for each in members]
    return floats(pair[0][torch.cat(chosen)])


def of_class(pair: Pair, kind: int, count: int) -> Tensor:
    """Numbers of the images of a class, of which there must be ``count``."""
    members = torch.nonzero(pair[1] == kind)[:, 0]
    why = f"class {kind} has {len(members)} training images"
    require(len(members) >= count, "per_class", count, why, "ask for fewer, or set fewer aside")
    return members


def start_images(settings: Condense, inputs: Inputs) -> Tensor:
    """Condensed images at outer step 0, (classes · per_class, channels, side, side); drawn ones belong to the seed."""
    classes, count = len(inputs.classes), settings.per_class
    generator = stream(settings.seed, "condense", "images")
    if settings.start == "real":
        return real_images(inputs.train, classes, count, generator)
    size = (classes * count, inputs.channels, inputs.side, inputs.side)
    return torch.rand(size, generator=generator) if settings.start == "noise" else torch.full(size, 0.5)


def start_phi(settings: Condense, inputs: Inputs, classes: Tensor, tensors: int) -> Phi:
    """φ at outer step 0, for condensed images of these classes and a net of so many weight tensors.

    The images are there even if they stay.
    """
    labels = SURE * F.one_hot(classes, len(inputs.classes)).float()
    each = (settings.inner_steps, tensors) if settings.rates_per == "tensor" else (settings.inner_steps,)
    rates = torch.full(each, math.log(settings.inner_rate))
    phi = {"images": start_images(settings, inputs), "labels": labels, "rates": rates}
    return {name: leaf for name, leaf in phi.items() if name == "images" or name in settings.learn}


def targets(phi: Mapping[str, Tensor], classes: Tensor) -> Tensor:
    """What a net is taught of the condensed images: probabilities (N, classes), or their classes (N,) if fixed."""
    return phi["labels"].softmax(1) if "labels" in phi else classes


def shifted(images: Tensor, by: tuple[int, int]) -> Tensor:
    """Images moved down and right by whole pixels; what comes in is 0, what goes out is lost."""
    down, right = by
    # negative padding cuts: one operation with derivatives of all orders in both modes
    return F.pad(images, (right, -right, down, -down)) if down or right else images


def draw_shift(most: int, generator: torch.Generator) -> tuple[int, int]:
    """Pixels down and right, each from −most to most."""
    down, right = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
    return down, right


def average_(mean: Phi, phi: Phi, *, share: float, step: int) -> None:
    """Move the average after outer step ``step`` (from 1): the plain mean at first, later one that forgets."""
    # without the plain mean the start would be in it for 1 / (1 − share) steps
    kept = min(share, 1 - 1 / step)
    for name, leaf in mean.items():
        leaf.mul_(kept).add_(phi[name], alpha=1 - kept)
