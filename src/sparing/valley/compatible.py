"""Whether models can be averaged at all: the same names, shapes and kinds of tensors, all finite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.blocks.names import unwrap
from sparing.errors import UserError, require

State = Mapping[str, Tensor]  # name -> tensor, as ``state_dict()`` gives it: parameters and buffers

Model = nn.Module | State  # a live model, or its state

_STATISTICS = ("running_mean", "running_var")
_LORA_NAME = re.compile(r"^(?P<module>.*?)\.?lora_(?:embedding_)?(?P<factor>A|B|up|down)\b")


def is_statistic(name: str) -> bool:
    """Say whether a tensor holds running statistics of a norm layer, which are averaged and estimated, never merged."""
    return name.rpartition(".")[2] in _STATISTICS


def state_of(model: Model) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model without copying them."""
    state = unwrap(model).state_dict() if isinstance(model, nn.Module) else model
    for name, value in state.items():
        require(
            isinstance(value, Tensor),
            f"state at {name!r}",
            type(value).__name__,
            "only tensors can be merged",
            "leave this entry out",
        )
    return {name: value.detach() for name, value in state.items()}


def vectors_of(*models: Model) -> list[dict[str, Tensor]]:
    """Return the parameters of models under common names, tied ones once, running statistics and counters left out.

    A live model says which of its tensors are parameters. Of a bare state they are the floating tensors that are not
    running statistics; names that share memory are one parameter.
    """
    live = next((model for model in models if isinstance(model, nn.Module)), None)
    vectors = [_parameters_of_state(model) if live is None else _parameters_of(model, live) for model in models]
    require_compatible(vectors)
    return vectors


def require_compatible(states: Sequence[State], labels: Sequence[str] | None = None) -> None:
    """Refuse states that are not of one architecture, or that hold what cannot be averaged."""
    require(bool(states), "models", "none", "there is nothing to merge", "pass at least one")
    names = list(labels or (f"model {at}" for at in range(1, len(states) + 1)))
    for at in range(1, len(states)):
        _require_alike(states[0], states[at], names[0], names[at])
    for name in states[0]:
        require_averageable(name, [state[name] for state in states], names)


def require_averageable(name: str, tensors: Sequence[Tensor], labels: Sequence[str]) -> None:
    """Refuse tensors of one name that cannot be averaged; merging from disk asks this of one name at a time."""
    for tensor, label in zip(tensors, labels, strict=True):
        where = f"{label} at {name!r}"
        packed = tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() == 1)
        require(not packed, where, tensor.dtype, "such numbers cannot be averaged", "convert it to a floating dtype")
        if tensor.is_floating_point():
            bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            why = "an average with it is not finite either"
            require(
                bad == 0, where, f"{bad} values that are NaN or infinite", why, "use a checkpoint before it diverged"
            )
    counts = not tensors[0].is_floating_point() and tensors[0].numel() > 1
    if (counts or name.endswith("_mask")) and any(
        not torch.equal(tensors[0], tensor.to(tensors[0].device)) for tensor in tensors[1:]
    ):
        raise UserError(
            f"models at {name!r}",
            got=f"{tensors[0].dtype} tensors that differ",
            why="indices, masks and quantised weights have no average",
            do="dequantise the weights, or give the models the same masks",
        )


def lora_pairs(names: Iterable[str]) -> list[str]:
    """Return the modules of which both LoRA factors are among the names.

    The model depends on their product alone, and (A, B) and (−A, −B) have the same: neither the signs nor the mean of
    the factors say anything about a merge.

    Example:
        >>> lora_pairs(["h.0.q.lora_A.default.weight", "h.0.q.lora_B.default.weight", "h.0.q.weight"])
        ['h.0.q']
    """
    found: dict[str, set[str]] = {}
    for name in names:
        if match := _LORA_NAME.match(name):
            found.setdefault(match["module"], set()).add("in" if match["factor"] in {"A", "down"} else "out")
    return [module for module, factors in found.items() if len(factors) == 2]


def _require_alike(first: State, other: State, name: str, label: str) -> None:
    """Name the first key at which two states differ."""
    for key in [*first, *(key for key in other if key not in first)]:
        mine, theirs = first.get(key), other.get(key)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            raise UserError(
                f"models, which first differ at {key!r}",
                got=f"{_shape(mine)} in {name} and {_shape(theirs)} in {label}",
                why="only models of one architecture can be merged",
                do="pass checkpoints of the same model",
            )
        if mine.is_floating_point() != theirs.is_floating_point():
            raise UserError(
                f"models, which first differ at {key!r}",
                got=f"{mine.dtype} in {name} and {theirs.dtype} in {label}",
                why="one of them is quantised or is a counter",
                do="dequantise it first",
            )


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"


def _parameters_of_state(state: Model) -> dict[str, Tensor]:
    """Return what is a parameter in a bare state, as far as names and memory tell."""
    found: dict[object, tuple[str, Tensor]] = {}
    for name, value in state_of(state).items():
        if value.is_floating_point() and not is_statistic(name):
            place = (value.data_ptr(), value.device, value.shape, value.stride()) if value.numel() else name
            found.setdefault(place, (name, value))
    return dict(found.values())


def _parameters_of(model: Model, live: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model, or those entries of a state that are parameters of the live one."""
    if isinstance(model, nn.Module):
        return {name: value.detach() for name, value in named_parameters(model).items()}
    state = state_of(model)
    return {name: state[name] for name in named_parameters(live) if name in state}
