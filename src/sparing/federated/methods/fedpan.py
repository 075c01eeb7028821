"""FedPAN: neurons that know their position, so that clients do not permute them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sparing.errors import require
from sparing.federated.methods.fedavg import FedAvg


@dataclass(frozen=True, slots=True)
class FedPAN(FedAvg):
    """FedAvg on a network in which hidden channel j of n is h_j + A sin(2π T j/n) or h_j (1 + A sin(2π T j/n)).

    What changes is the input of the activation: the output of a convolution or linear layer, or of the norm that is
    registered right after it; never that of the output layer. Nothing is trained or sent for it, and A = 0 is FedAvg.

    Source: Li et al. 2022, "Federated Learning with Position-Aware Neurons" (arXiv:2203.14666), §4.
    """

    operation: Literal["mul", "add"] = "mul"
    """Whether the pattern multiplies or is added; the authors pair (T, A) = (1, 0.05), (4, 0.1), (8, 0.15) with "mul"
    and (1, 0.15), (4, 0.25), (8, 0.5) with "add"."""

    periods: float = 1.0
    """Periods of the sine across the channels of a layer (count), T."""

    amplitude: float = 0.05
    """Amplitude A of the sine, ≥ 0."""

    output: str | None = None
    """Path of the output layer; None is the convolution or linear layer registered last."""

    def __post_init__(self) -> None:
        known = self.operation in {"mul", "add"}
        require(known, "FedPAN.operation", repr(self.operation), "no such operation", 'pass "mul" or "add"')
        finite = 0 <= self.amplitude < math.inf
        require(finite, "FedPAN.amplitude", self.amplitude, "it is a height", "pass A >= 0, such as 0.05")
        require(math.isfinite(self.periods), "FedPAN.periods", self.periods, "it is a count", "pass T, such as 1")

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model with the pattern in forward hooks; parameter names stay.

        Args:
            model: At least one hidden convolution or linear layer.

        Returns:
            The copy; the model itself if A = 0.

        Raises:
            UserError: If there is no hidden layer, or no output layer at that path.
        """
        if self.amplitude == 0:
            return model
        # The hooks would stay on the caller's model.
        model = copy.deepcopy(model)
        places = positions(model, self.output)
        why, do = "it has no convolution or linear layer before its output", "pass a model with a hidden layer"
        require(bool(places), "FedPAN model", type(model).__name__, why, do)
        for module, dim in places:
            module.register_forward_hook(Position(self.operation, self.periods, self.amplitude, dim))
        return model


@dataclass(frozen=True, slots=True)
class Position:
    """The forward hook of a layer; picklable, so that worker processes get it."""

    operation: Literal["mul", "add"]
    periods: float
    amplitude: float
    dim: int  # of the channels, from the end

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Return the output with the pattern in it."""
        count = output.shape[self.dim]
        # In float64: half precision cannot hold j/n, and all dtypes then round the same pattern.
        place = torch.arange(count, dtype=torch.float64) / count
        wave = self.amplitude * torch.sin(2 * math.pi * self.periods * place)
        wave = wave.to(output).view([count] + [1] * (-self.dim - 1))
        return output + wave if self.operation == "add" else output * (1 + wave)


def positions(model: nn.Module, output: str | None = None) -> list[tuple[nn.Module, int]]:
    """Return the modules whose outputs enter hidden activations, each with its channel dimension from the end."""
    leaves = [(name, module) for name, module in model.named_modules() if not any(True for _ in module.children())]
    layers = [(i, name, module) for i, (name, module) in enumerate(leaves) if isinstance(module, _ConvNd | nn.Linear)]
    last = layers[-1][1] if layers and output is None else output
    known = not layers or last in {name for _, name, _ in layers}
    why, do = "no convolution or linear layer has that path", "pass one of model.named_modules()"
    require(known, "FedPAN.output", repr(output), why, do)
    found: list[tuple[nn.Module, int]] = []
    for index, name, layer in layers:
        if name == last:
            continue
        # Registration order stands for the order of the forward pass, which a module does not record.
        after = leaves[index + 1][1] if index + 1 < len(leaves) else None
        dim = -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)
        found.append((after if after is not None and _is_norm_of(after, layer) else layer, dim))
    return found


def _is_norm_of(after: nn.Module, layer: nn.Linear | _ConvNd) -> bool:
    """Whether a module is a norm over as many channels as the layer has."""
    width = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    if isinstance(after, _NormBase):
        return after.num_features == width
    if isinstance(after, nn.GroupNorm):
        return after.num_channels == width
    return isinstance(after, nn.LayerNorm) and after.normalized_shape == (width,)
