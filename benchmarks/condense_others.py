"""Architectures that are not the net images are condensed for, taught by those images as ``sparing condense`` judges.

A perceptron, a small convolutional net without norms (LeNet-5 with ReLU and max pooling) and a residual net with group
norm (three blocks of 16, 32 and 64 channels): 300 full-batch steps of SGD with momentum along half a cosine, at the
best rate of a sweep that goes on until it is inside, on held-out images.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.jobs.condense.inputs import floats
from sparing.jobs.condense.learned import targets
from sparing.jobs.condense.loop import AT_ONCE, LOOKED, MULTIPLES
from sparing.jobs.condense.net import CONTRAST, GREY
from sparing.jobs.condense.state import MOMENTUM, TrainState
from sparing.jobs.schedule import rate
from sparing.jobs.sweeps import inside

GROUPS = 4
"""Groups of each norm: ten images are too few for batch norm, whose averages are not those of the test images."""


class Centred(nn.Module):
    """Pixels from −2 to 2, as they enter the net of ``condense``."""

    def forward(self, images: Tensor) -> Tensor:
        """Centre the pixels, 0 to 1."""
        return (images - GREY) / CONTRAST


class Residual(nn.Module):
    """Two convolutions with group norm beside a shortcut, which is a 1 × 1 convolution where the size changes."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        """Of ``into`` and ``out`` channels; the stride is that of the first convolution."""
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.GroupNorm(GROUPS, out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.GroupNorm(GROUPS, out),
        )  # fmt: skip
        alike = into == out and stride == 1
        self.short = nn.Identity() if alike else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways, rectified."""
        return F.relu(self.body(x) + self.short(x))


def perceptron(channels: int, side: int, classes: int) -> nn.Module:
    """One hidden layer of 128."""
    return nn.Sequential(
        Centred(), nn.Flatten(), nn.Linear(channels * side * side, 128), nn.ReLU(), nn.Linear(128, classes)
    )


def lenet(channels: int, side: int, classes: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling."""
    left = (side // 2 - 4) // 2
    return nn.Sequential(
        Centred(), nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * left * left, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip


def residual(channels: int, side: int, classes: int) -> nn.Module:
    """Eight layers (He et al. 2016): a convolution, three residual blocks, the mean over pixels, a linear layer."""
    return nn.Sequential(
        Centred(), nn.Conv2d(channels, 16, 3, stride=2, padding=1, bias=False), nn.GroupNorm(GROUPS, 16), nn.ReLU(),
        Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, classes),
    )  # fmt: skip


ARCHITECTURES: dict[str, Callable[[int, int, int], nn.Module]] = {
    "perceptron": perceptron, "LeNet": lenet, "residual net with group norm": residual,
}  # fmt: skip


def taught(
    make: Callable[[], nn.Module], images: Tensor, goals: Tensor, lr: float, *, steps: int, number: int
) -> nn.Module:
    """A fresh net of a number, trained on all images (N, channels, side, side) at once."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate(step, peak=lr, steps=steps)
        optimizer.zero_grad()
        F.cross_entropy(model(images), goals).backward()
        optimizer.step()
    return model.eval()


def right(model: nn.Module, real: tuple[Tensor, Tensor]) -> float:
    """Share of real images in the right class (%); 0 of a net that diverged, which would name class 0 everywhere."""
    images, labels = real
    with torch.no_grad():
        scores = torch.cat([model(floats(images[at : at + AT_ONCE])) for at in range(0, len(images), AT_ONCE)])
    return 100 * float((scores.argmax(1) == labels).double().mean()) if bool(torch.isfinite(scores).all()) else 0.0


def taught_architecture(state: TrainState, name: str, draw: Callable[[int], Any]) -> dict[str, Any]:
    """Accuracy (%) of an architecture on the images of ``draw``, a net each, at the rate best on held-out images."""
    judge, inputs, shape = state.settings.evaluation, state.inputs, state.shape
    real = inputs.test if state.settings.judge == "test" else inputs.held_out
    looked = (inputs.held_out[0][:LOOKED], inputs.held_out[1][:LOOKED])

    def net(lr: float, number: int) -> nn.Module:
        phi = draw(number)
        make = functools.partial(ARCHITECTURES[name], shape.channels, shape.side, shape.classes)
        images, goals = phi["images"].detach(), targets(phi, state.labels)
        return taught(make, images, goals, lr, steps=judge.steps, number=number)

    # the net and the draw that choose a rate are not among those that are judged
    rates = [judge.lr * multiple for multiple in MULTIPLES]
    best, _ = inside(rates, lambda lr: 100.0 - right(net(lr, judge.nets), looked))
    scores = [right(net(best, number), real) for number in range(judge.nets)]
    return {"accuracy": statistics.fmean(scores), "accuracies": scores, "lr": best}
