"""Small nets for clients: a perceptron, and convolutional nets with batch norm, group norm or none.

    make_model = net("cnn-bn", (1, 40), 10)

What ``net`` returns can be sent to worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparing import scaling
from sparing.errors import require

NetName = Literal["mlp", "cnn", "cnn-bn", "cnn-gn"]

HIDDEN: Final = (128, 128, 128)  # neurons of the perceptron's hidden layers (count)

# Channels of each convolution (count), by the axes of a row: signals or images.
CHANNELS: Final = {1: (32, 32, 32), 2: (16, 32, 64)}

_KERNEL: Final = {1: 5, 2: 3}
_GROUPS: Final = 8


def net(name: str, inputs_shape: Sequence[int], classes: int) -> Callable[[], nn.Module]:
    """Return a picklable factory of a net for rows of a shape: (channels, length) or (channels, height, width).

    Weights are normal with variance 2 / fan-in (He et al. 2015) from torch's global generator; ``simulate`` seeds it.

    Example:
        >>> tuple(net("cnn", (1, 40), 10)()(torch.zeros(3, 1, 40)).shape)
        (3, 10)
    """
    known = get_args(NetName)
    require(name in known, "net", name, "no such net", f"pass one of {', '.join(known)}")
    shape = tuple(inputs_shape)
    if name == "mlp":
        return partial(perceptron, torch.Size(shape).numel(), classes)
    why, do = "it convolves over one or two axes beside the channels", "pass mlp, or rows with channels first"
    require(len(shape) in (2, 3), "net", f"{name} for rows of shape {shape}", why, do)
    require(min(shape[1:]) >= 4, "net", f"{name} for rows of shape {shape}", "it halves each axis twice", "pass mlp")
    return partial(Convolutional, shape[0], len(shape) - 1, classes, name.removeprefix("cnn").removeprefix("-"))


def sparse(make_model: Callable[[], nn.Module], density: float, seed: int) -> Callable[[], nn.Module]:
    """Return a factory of the same net with masked hidden weights, scaled by SμPar for its density."""
    return partial(_masked, make_model, density, seed)


def on_device(make_model: Callable[[], nn.Module], device: torch.device) -> Callable[[], nn.Module]:
    """Return a factory of the same model on a device: its first weights are drawn on the CPU, so they are the same."""
    return partial(_moved, make_model, device)


def _moved(make_model: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    return make_model().to(device)


def _masked(make_model: Callable[[], nn.Module], density: float, seed: int) -> nn.Module:
    model = make_model()
    # not the first convolution: it has few inputs
    below_head = ["layers.[12].conv.weight"] if isinstance(model, Convolutional) else None
    # The shifted form puts the factor into the forward pass, not into the weights: plain SGD then needs no rate of its
    # own for any layer, and all methods keep their one learning rate.
    rule = scaling.SuPar(form="shifted")
    chosen = scaling.plan(model, density=density, rule=rule, optimizer="sgd", sparse=below_head)
    masks = scaling.apply_(model, chosen, seed=seed)
    # now, not at the first forward pass: by then the model has what a server sent
    masks.verify()
    return model


def perceptron(inputs: int, classes: int) -> nn.Sequential:
    """Return a perceptron with three hidden layers; ``simulate`` can stack its clients."""
    layers: list[nn.Module] = [nn.Flatten()]
    for into, out in pairwise((inputs, *HIDDEN)):
        layers += [nn.Linear(into, out), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], classes))
    _fill_(model)
    return model


class Unit(nn.Module):
    """A convolution, its norm, and ReLU."""

    def __init__(self, inputs: int, outputs: int, axes: int, norm: str) -> None:
        """Take channels (count), the axes of a row, and "bn", "gn" or ""."""
        super().__init__()
        conv, batch = (nn.Conv1d, nn.BatchNorm1d) if axes == 1 else (nn.Conv2d, nn.BatchNorm2d)
        # Batch norm subtracts the mean, so a bias before it would do nothing.
        self.conv: nn.Module = conv(inputs, outputs, _KERNEL[axes], padding="same", bias=norm != "bn")
        self.norm: nn.Module = nn.Identity()
        if norm:
            self.norm = batch(outputs) if norm == "bn" else nn.GroupNorm(_GROUPS, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, …) -> (N, outputs, …)."""
        return functional.relu(self.norm(self.conv(x)))


class Convolutional(nn.Module):
    """Three units with pooling by two between them, the mean over places, a classifier."""

    def __init__(self, channels: int, axes: int, classes: int, norm: str = "") -> None:
        """Take channels of a row (count), its other axes (count), logits (count), and "bn", "gn" or ""."""
        super().__init__()
        widths = CHANNELS[axes]
        self.layers = nn.ModuleList(Unit(into, out, axes, norm) for into, out in pairwise((channels, *widths)))
        self.head = nn.Linear(widths[-1], classes)
        self.axes = axes
        _fill_(self)

    def forward(self, x: Tensor) -> Tensor:
        """Rows (N, channels, …) -> logits (N, classes)."""
        pool = functional.max_pool1d if self.axes == 1 else functional.max_pool2d
        for index, layer in enumerate(self.layers):
            x = layer(pool(x, 2) if index else x)
        result: Tensor = self.head(x.flatten(2).mean(2))
        return result


def _fill_(model: nn.Module) -> None:
    """Draw the weights of hidden layers; the classifier and all biases keep torch's own draws."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]
    for layer in layers[:-1]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
