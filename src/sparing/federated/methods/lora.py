"""Averages of low-rank additions that are the average of the models: FedEx-LoRA, FLoRA and FFA-LoRA.

A layer adds s B A to its weight W. The mean of the factors, which ``FedAvg`` takes, is no mean of the models:
mean(B) mean(A) is not mean(B A). Layers are those of peft; it is not imported here.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.federated.methods.fedavg import FedAvg
from sparing.federated.methods.interface import State, Update, Vector
from sparing.federated.server.optimizers import Replace
from sparing.federated.server.robust import Mean, mean, sorted_by_client
from sparing.seeds import stream

_SCALE, _BASE, _A, _B = "lora_scale", "base_layer.weight", "lora_A.", "lora_B."
_ROUNDS = "lora"  # the part of FLoRA's state on the server that counts rounds


@dataclass(frozen=True, slots=True)
class Merging(FedAvg):
    """What the two share whose base weights change: these travel to the clients, and never back.

    In ``adapt`` a base weight becomes a buffer, since buffers are the part of a global model that nobody trains.
    """

    def __post_init__(self) -> None:
        why = "of other rules than the mean, and of steps towards it, no change of the base weights makes up for"
        for name, plain in (("combine", Mean()), ("server", Replace())):
            got = getattr(self, name)
            require(got == plain, f"{type(self).__name__}.{name}", got, why, f"pass {name}={plain}, or FFALoRA()")

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model in which the base weights under LoRA are buffers, each with its scale s.

        Args:
            model: With LoRA on linear layers, as peft adds it.

        Returns:
            The copy.

        Raises:
            UserError: If there is no LoRA, or of a kind whose mean cannot be made exact.
        """
        _check_products(model, self.name)
        model = copy.deepcopy(model)
        for _, layer in lora_layers(model):
            base, (scale,) = layer.base_layer, layer.scaling.values()
            weight = base.weight.detach()
            del base.weight
            base.register_buffer("weight", weight)
            layer.register_buffer(_SCALE, torch.tensor(scale, dtype=torch.float64, device=weight.device))
        return model

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """Combine buffers as FedAvg does, and add to each base weight what the next factors leave out."""
        merged = self.combine.buffers(global_buffers, updates)
        ordered = sorted_by_client(updates)
        for name, scale in global_buffers.items():
            path = name.removesuffix(_SCALE)
            # With drawn blocks a layer comes from some clients only, or from none.
            factors = [(*pair, update.weight) for update in ordered if (pair := _factors(path, update.params))]
            if path == name or not factors:
                continue
            weight = global_buffers[path + _BASE]
            merged[path + _BASE] = (weight.double() + scale * self._left_out(*zip(*factors, strict=True))).to(weight)
        return merged

    def _left_out(self, a: Sequence[Tensor], b: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """What the mean of the products has and the product of the next factors has not, in float64."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FedExLoRA(Merging):
    """Average A and B, and add to each base weight the residual s (mean(B A) − mean(B) mean(A)).

    The global model is then the mean of the clients' models, to rounding of the base weight. Base weights under LoRA
    travel to the clients whole in every round, for a client may have missed any number of rounds; uplinks have the
    factors alone.

    Source: Singhal et al. 2024, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
    Models" (arXiv:2410.09432).

    Example:
        >>> FedExLoRA().name
        'fedex-lora'
    """

    @property
    def name(self) -> str:
        """Name for tables and files."""
        return "fedex-lora"

    def _left_out(self, a: Sequence[Tensor], b: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        # Of the rounded means, which are what is sent: their own rounding goes into the base weight too.
        mean_a, mean_b = (mean(factors, weights).to(factors[0].dtype).double() for factors in (a, b))
        return mean_product(a, b, weights) - mean_b @ mean_a


@dataclass(frozen=True, slots=True)
class FLoRA(Merging):
    """Add s mean(B A) to each base weight, and begin every round with B = 0 and a fresh A.

    The mean is that of the clients' factors, stacked: [w₁B₁ … w_kB_k] [A₁; …; A_k], of rank up to k r, where one LoRA
    keeps rank r. All clients have the same rank. Traffic is that of ``FedExLoRA``.

    Source: Wang et al. 2024, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
    Adaptations" (arXiv:2409.05976).

    Example:
        >>> FLoRA(seed=3).name
        'flora'
    """

    seed: int = 0
    """Of the fresh A, uniform in ±1/√inputs, as peft draws it."""

    def server_state(self, params: Vector) -> State:
        """Return the number of rounds made."""
        return {_ROUNDS: {"rounds": torch.zeros((), dtype=torch.int64)}}

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Average what is no factor; factors that somebody trained begin anew."""
        made = int(server_state[_ROUNDS]["rounds"])
        params = self.combine.params(global_params, updates)
        trained = {name for update in updates for name in update.params}
        for name in filter(trained.__contains__, params):
            if f".{_B}" in f".{name}":
                params[name] = torch.zeros_like(params[name])
            elif f".{_A}" in f".{name}":
                source = stream(self.seed, "federated", "lora", made, name)
                drawn = torch.rand(params[name].shape, generator=source, dtype=torch.float64)
                params[name] = ((2 * drawn - 1) / math.sqrt(drawn.shape[1])).to(params[name])
        return params, {_ROUNDS: {"rounds": torch.tensor(made + 1)}}, {}

    def _left_out(self, a: Sequence[Tensor], b: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return mean_product(a, b, weights)


@dataclass(frozen=True, slots=True)
class FFALoRA(FedAvg):
    """Freeze A at its first values, the same at every client, and average B: mean(B) A is mean(B A).

    Half the factors neither train nor travel, and the base weights stay. Robust means, server optimizers, ``Private``
    and ``SecureSum`` act on B as on any parameter.

    Source: Sun et al. 2024, "Improving LoRA in Privacy-preserving Federated Learning" (arXiv:2403.12313).

    Example:
        >>> FFALoRA().name
        'ffa-lora'
    """

    @property
    def name(self) -> str:
        """Name for tables and files."""
        return "ffa-lora"

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model in which no A trains.

        Args:
            model: With LoRA, as peft adds it.

        Returns:
            The copy.

        Raises:
            UserError: If there is no LoRA, or of a kind that is not linear in B.
        """
        _check_kind(model, self.name)
        model = copy.deepcopy(model)
        for _, layer in lora_layers(model):
            layer.lora_A.requires_grad_(False)
        return model


def mean_product(a: Sequence[Tensor], b: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ w_k B_k A_k / Σ w_k in float64, as one product of stacked factors; of one client exactly B A.

    Example:
        >>> one, two = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])
        >>> mean_product([one, two], [one.T, two.T], [3.0, 1.0])
        tensor([[3.0000, 1.5000],
                [1.5000, 3.0000]], dtype=torch.float64)
    """
    whole = math.fsum(weights)
    left = torch.cat([factor.double() * (weight / whole) for factor, weight in zip(b, weights, strict=True)], 1)
    return left @ torch.cat([factor.double() for factor in a], 0)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every layer that has factors A and B beside its base, as peft makes them."""
    for path, module in model.named_modules():
        found: Any = module
        if hasattr(module, "base_layer") and (len(getattr(found, "lora_A", ())) or _embeds(found)):
            yield path, found


def one_way_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of buffers that go to the clients and never come back: base weights, and their scales."""
    paths = [f"{path}." if path else "" for path, layer in lora_layers(model) if hasattr(layer, _SCALE)]
    return frozenset(f"{path}{name}" for path in paths for name in (_BASE, _SCALE))


def refuse_signs(model: nn.Module, method: str) -> None:
    """Refuse a method that pushes along signs, on a model with LoRA."""
    why = "B A is (−B)(−A), so signs of its factors mean nothing"
    require(
        not any(lora_layers(model)), f"{method} model", "one with LoRA", why, "pass FedExLoRA(), or the model without"
    )


def _factors(path: str, params: Vector) -> tuple[Tensor, Tensor] | None:
    """A and B of a layer, where both are there."""
    name = next((name for name in params if name.startswith(path + _A)), None)
    return None if name is None else (params[name], params[path + _B + name.removeprefix(path + _A)])


def _embeds(layer: Any) -> bool:
    return bool(len(getattr(layer, "lora_embedding_A", ())))


def _check_kind(model: nn.Module, method: str) -> None:
    """Refuse models without LoRA, with several in one layer, on embeddings, or with DoRA."""
    layers, what = list(lora_layers(model)), f"{method} model"
    do = "add LoRA to its linear layers by peft's get_peft_model"
    require(bool(layers), what, type(model).__name__, "it has no LoRA", do)
    for path, layer in layers:
        require(not _embeds(layer), what, f"LoRA on the embedding {path}", "its factors are named otherwise", do)
        require(len(layer.lora_A) == 1, what, f"{len(layer.lora_A)} adapters in {path}", "one trains", "keep one")
        dora = any(getattr(layer, "use_dora", {}).values())
        require(
            not dora, what, f"DoRA in {path}", "a norm makes the model no linear function of B", "pass use_dora=False"
        )


def _check_products(model: nn.Module, method: str) -> None:
    """Refuse base weights that cannot take up what the factors leave out."""
    _check_kind(model, method)
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    do = "pass FFALoRA(), or linear layers of 32 bits"
    for path, layer in lora_layers(model):
        base, what = layer.base_layer, f"{method} model"
        kind = isinstance(base, nn.Linear) and "weight" in base._parameters
        require(kind, what, f"{type(base).__name__} under {path}", "its weight has no shape of B A", do)
        size = f"{base.weight.dtype}".removeprefix("torch.")
        require(base.weight.dtype.itemsize >= 4, what, f"{size} under {path}", "it would round residuals away", do)
        require(holders[id(base.weight)] == 1, what, f"{path}", "its weight is tied to another's", do)
        bias = any(getattr(factor, "bias", None) is not None for factor in layer.lora_B.values())
        require(not bias, what, f"a bias beside B in {path}", "the base would need one too", "pass lora_bias=False")
