"""RegMean: linear layers merged so that they answer their models' inputs as their models do, by least squares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.valley.merging.linear import Linear
from sparing.valley.merging.method import Method, Slices, slice_lengths


@dataclass(frozen=True, slots=True)
class RegMean(Method):
    """Merge each linear layer by W = (Σ W_t G_t) (Σ G_t)⁻¹, where G_t is the mean of x xᵀ over its inputs in model t.

    With ``shrink`` = 1 it is the W that minimises Σ_t E‖W x − W_t x‖² over the inputs of each model. Where the inputs
    do not determine W, it is the one nearest to the mean. Tensors without G (embeddings, norms, biases, convolutions)
    are averaged.

    Source: Jin et al. 2023, "Dataless Knowledge Fusion by Merging Weights of Language Models" (arXiv:2212.09849), whose
    α is ``shrink``.

    Example:
        >>> grams = [{"w": torch.diag(torch.tensor([3.0, 1.0]))}, {"w": torch.diag(torch.tensor([1.0, 1.0]))}]
        >>> RegMean(grams).tensor("w", [torch.zeros(1, 2), torch.ones(1, 2)])
        tensor([[0.2500, 0.5000]])
    """

    grams: Sequence[Mapping[str, Tensor]]
    """G of each model in order, shape (inputs, inputs), by the name of the weight; may be read when asked for."""
    _: KW_ONLY
    shrink: float = 0.9
    """Factor of the elements of G off its diagonal, 0 to 1, α; below 1 the inverse is well conditioned."""
    inputs_first: Collection[str] = ()
    """Weights of shape (inputs, outputs), as transformers' GPT-2 stores them; all others are (outputs, inputs)."""

    def __post_init__(self) -> None:
        why, do = "it is a factor of what lies off the diagonal", "pass 0 <= shrink <= 1, such as 0.9"
        require(0 <= self.shrink <= 1, "shrink", self.shrink, why, do)

    @classmethod
    def of(
        cls, models: Sequence[nn.Module], batches: Iterable[Any], call: Callable[[nn.Module, Any], object],
        *, shrink: float = 0.9,
    ) -> RegMean:  # fmt: skip
        """Measure models that ``call(model, batch)`` runs forward; memory holds G of all layers of all models."""
        known = list(batches)
        layers = [linear_weights(model) for model in models]
        grams = [
            input_grams(model, each, lambda model: [call(model, batch) for batch in known])
            for model, each in zip(models, layers, strict=True)
        ]
        first = {name for name, layer in layers[0].items() if not isinstance(layer, nn.Linear)} if layers else set()
        return cls(grams, shrink=shrink, inputs_first=frozenset(first))

    @property
    def needs_base(self) -> bool:
        """False: a mean needs no ancestor."""
        return False

    def slices(self, name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
        """Merge the tensors of one name; a linear layer is whole in memory, in float64."""
        why, do = "each model has its own", "pass one mapping for each, in order"
        require(len(self.grams) == len(models), "grams", len(self.grams), why, do)
        if any(name not in one for one in self.grams):
            yield from Linear().slices(name, models)
            return
        whole = [torch.cat(list(one())).view(one.shape) for one in models]
        turned = name in self.inputs_first
        weights = [(one.T if turned else one).double() for one in whole]
        mean = torch.stack(weights).mean(0)
        total = torch.zeros(mean.shape[1], mean.shape[1], dtype=mean.dtype, device=mean.device)
        wanted = torch.zeros_like(mean)
        for weight, one in zip(weights, self.grams, strict=True):
            gram = self._shrunk(name, one[name], total)
            total += gram
            # Of the difference from the mean, so that the mean is what inputs that tell nothing leave
            wanted += (weight - mean) @ gram
        merged = mean + _divided(wanted, total, exact=self.shrink < 1)
        flat = (merged.T if turned else merged).to(whole[0].dtype).reshape(-1)
        yield from torch.split(flat, slice_lengths(flat.numel()))

    def _shrunk(self, name: str, gram: Tensor, like: Tensor) -> Tensor:
        why, do = "it is that of the inputs of the weight", "measure these very models"
        require(gram.shape == like.shape, f"grams at {name!r}", tuple(gram.shape), why, do)
        why, do = "least squares needs the inputs of the layer", "measure again, without rows that give such inputs"
        require(bool(gram.isfinite().all()), f"grams at {name!r}", "what is not finite", why, do)
        wide = gram.to(like)
        return self.shrink * wide + (1 - self.shrink) * torch.diag(wide.diagonal())


def _divided(wanted: Tensor, total: Tensor, *, exact: bool) -> Tensor:
    """X of X · total = wanted, zero where total tells nothing; ``exact``: total is definite on inputs that occur."""
    live = total.diagonal() > 0
    inner = total[live][:, live]
    found = torch.zeros_like(wanted)
    if exact:
        factor = torch.linalg.cholesky(inner)
        found[:, live] = torch.cholesky_solve(wanted[:, live].T, factor).T
    else:
        found[:, live] = wanted[:, live] @ torch.linalg.pinv(inner, hermitian=True)
    return found


def linear_weights(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers by the name of their weight; those whose weight another module has too, as a tied head, are not."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = {}
    for path, module in model.named_modules():
        # transformers' Conv1D is a linear layer of weights (inputs, outputs)
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            weight = module._parameters.get("weight")
            if weight is not None and weight.ndim == 2 and uses[id(weight)] == 1:
                found[f"{path}.weight" if path else "weight"] = module
    return found


def width_of(layer: nn.Module) -> int:
    """Inputs of a linear layer (count)."""
    weight = layer.get_parameter("weight")
    return int(weight.shape[1] if isinstance(layer, nn.Linear) else weight.shape[0])


@torch.no_grad()
def input_grams(
    model: nn.Module, layers: Mapping[str, nn.Module], run: Callable[[nn.Module], object]
) -> dict[str, Tensor]:
    """The mean of x xᵀ over the inputs that each layer gets while ``run(model)`` goes on, in evaluation mode."""
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(layers, 0)

    def add(name: str, given: Tensor) -> None:
        inputs = given.detach().reshape(-1, given.shape[-1])
        inputs = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        if name not in sums:
            sums[name] = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
        sums[name].addmm_(inputs.T, inputs)
        counts[name] += len(inputs)

    hooks = [
        layer.register_forward_pre_hook(lambda module, args, name=name: add(name, args[0]))
        for name, layer in layers.items()
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        run(model)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return {name: total / max(1, counts[name]) for name, total in sums.items()}


def passes(layers: Mapping[str, nn.Module], budget: int) -> list[dict[str, nn.Module]]:
    """Cut layers into groups whose matrices fit into ``budget`` bytes in float32, one layer at least in each."""

    def joined(groups: list[dict[str, nn.Module]], name: str) -> list[dict[str, nn.Module]]:
        size = 4 * sum(width_of(layer) ** 2 for layer in (*groups[-1].values(), layers[name])) if groups else 0
        if not groups or size > budget:
            return [*groups, {name: layers[name]}]
        groups[-1][name] = layers[name]
        return groups

    return reduce(joined, layers, list[dict[str, nn.Module]]())
