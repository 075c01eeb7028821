"""Whether models can be averaged at all: the same names, shapes and kinds of tensors, all finite."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.blocks.names import unwrap
from sparing.errors import UserError, require

State = Mapping[str, Tensor]  # name -> tensor, as ``state_dict()`` gives it: parameters and buffers

Model = nn.Module | State  # a live model, or its state

Layout = tuple[tuple[int, ...], bool, str]  # of a tensor: its shape, whether it is floating, its dtype in words
T = TypeVar("T")
_LORA_NAME = re.compile(r"^(?P<module>.*?)\.?lora_(?:embedding_)?(?P<factor>A|B|up|down)\b")


# Vectors of torch's two spectral norms, new and old, of which ``weight_v`` is weight norm's direction too
_ITERATED = re.compile(r"(^|\.)(parametrizations\.\w+\.\d+\._[uv]|weight_u)$")


def is_statistic(name: str) -> bool:
    """Whether a tensor holds running statistics of a norm layer, which are averaged or re-estimated, never merged."""
    return name.rpartition(".")[2] in {"running_mean", "running_var"}


def state_of(model: Model) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model without copying them."""
    state = unwrap(model).state_dict() if isinstance(model, nn.Module) else model
    for name, value in state.items():
        why, do = "only tensors can be merged", "leave this entry out"
        require(isinstance(value, Tensor), f"state at {name!r}", type(value).__name__, why, do)
    return {name: value.detach() for name, value in state.items()}


def vectors_of(*models: Model) -> list[dict[str, Tensor]]:
    """Return the parameters of models under common names, detached, tied ones once.

    A live model says which of its tensors are parameters. In bare states they are the floating tensors that are no
    running statistics; names that share memory are one parameter.
    """
    live = next((model for model in models if isinstance(model, nn.Module)), None)
    vectors = []
    for model in models:
        if isinstance(model, nn.Module):
            vectors.append({name: value.detach() for name, value in named_parameters(model).items()})
        elif live is not None:
            state = state_of(model)
            vectors.append({name: state[name] for name in named_parameters(live) if name in state})
        else:
            found: dict[object, tuple[str, Tensor]] = {}
            for name, value in state_of(model).items():
                if value.is_floating_point() and not is_statistic(name):
                    found.setdefault(storage_key(name, value), (name, value))
            vectors.append(dict(found.values()))
    require_compatible(vectors)
    return vectors


def require_compatible(states: Sequence[State], labels: Sequence[str] | None = None) -> None:
    """Refuse states (a base among them) that are not of one architecture, or that hold what cannot be averaged."""
    require(bool(states), "models", "none", "there is nothing to merge", "pass at least one")
    names = list(labels or (f"model {at}" for at in range(1, len(states) + 1)))
    layouts = [{n: (tuple(x.shape), x.is_floating_point(), str(x.dtype)) for n, x in one.items()} for one in states]
    for layout, label in zip(layouts[1:], names[1:], strict=True):
        require_same_tensors(layouts[0], layout, names[0], label)
    for name in states[0]:
        require_averageable(name, [state[name] for state in states], names)


def require_averageable(name: str, tensors: Sequence[Tensor], labels: Sequence[str]) -> None:
    """Refuse tensors of one name, one of each model, that cannot be averaged."""
    for tensor, label in zip(tensors, labels, strict=True):
        where = f"{label} at {name!r}"
        # Floating numbers of one byte (float8) are packed: their scales lie elsewhere
        packed = tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() == 1)
        require(not packed, where, tensor.dtype, "such numbers cannot be averaged", "convert it to a floating dtype")
        if tensor.is_floating_point():
            require_finite(where, [tensor])
    if _ITERATED.search(name):
        same = all(torch.equal(tensors[0], tensor.to(tensors[0])) for tensor in tensors[1:])
        why = "vectors of spectral norm belong to a weight, and the mean of two is no vector of the merged one"
        do = "fold it in first: torch.nn.utils.parametrize.remove_parametrizations, or remove_spectral_norm"
        require(same, f"models at {name!r}", "vectors that differ", why, do)
    # A single integer is a counter, of which a merge takes the largest
    if must_agree(name, floating=tensors[0].is_floating_point()) and (tensors[0].numel() > 1 or name.endswith("_mask")):
        same = all(torch.equal(tensors[0], tensor.to(tensors[0].device)) for tensor in tensors[1:])
        why = "indices, masks and quantised weights have no average"
        do = "dequantise the weights, or give the models the same masks"
        require(same, f"models at {name!r}", f"{tensors[0].dtype} tensors that differ", why, do)


def must_agree(name: str, *, floating: bool) -> bool:
    """Whether a tensor has no average, so that all models must have the same."""
    return not floating or name.endswith("_mask") or _ITERATED.search(name) is not None


def surely_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite, by their sum, which is many times as fast to find out as each.

    False says nothing: finite numbers may add up to more than their dtype holds.
    """
    return not tensor.is_floating_point() or math.isfinite(float(tensor.sum()))


def require_finite(where: str, parts: Iterable[Tensor]) -> None:
    """Refuse floating numbers, given in parts, of which one is NaN or infinite."""
    bad = sum(part.numel() - int(torch.isfinite(part).sum()) for part in parts if not surely_finite(part))
    got, why = f"{bad} values that are NaN or infinite", "an average with it is not finite either"
    require(bad == 0, where, got, why, "use a checkpoint before it diverged")


def lora_pairs(names: Iterable[str]) -> list[str]:
    """Return the modules of which both LoRA factors are among the names (of peft, diffusers or kohya).

    The model depends on their product only, which (A, B) and (−A, −B) share: neither the signs nor the mean of the
    factors say anything about a merge.

    Example:
        >>> lora_pairs(["h.0.q.lora_A.default.weight", "h.0.q.lora_B.default.weight", "h.0.q.weight"])
        ['h.0.q']
    """
    found: dict[str, set[str]] = {}
    for name in names:
        if match := _LORA_NAME.match(name):
            found.setdefault(match["module"], set()).add("in" if match["factor"] in {"A", "down"} else "out")
    return [module for module, factors in found.items() if len(factors) == 2]


def first_difference(mine: Mapping[str, T], theirs: Mapping[str, T], same: Callable[[T, T], bool]) -> str | None:
    """Return the first key that one of two mappings lacks, or whose values are not the same."""
    keys = dict.fromkeys([*mine, *theirs])
    return next((key for key in keys if key not in mine or key not in theirs or not same(mine[key], theirs[key])), None)


def require_same_tensors(first: Mapping[str, Layout], other: Mapping[str, Layout], name: str, label: str) -> None:
    """Refuse two models, called ``name`` and ``label``, by the first tensor in which they differ."""
    if (key := first_difference(first, other, lambda x, y: x[:2] == y[:2])) is None:
        return
    mine, theirs = first.get(key), other.get(key)
    if mine is not None and theirs is not None and mine[0] == theirs[0]:
        got, why = [mine[2], theirs[2]], "one of them is quantised or is a counter"
        do = "pass the unquantised model"
    else:
        got = ["nothing" if one is None else f"shape {one[0]}" for one in (mine, theirs)]
        why, do = "only models of one architecture can be merged", "pass checkpoints of the same model"
    where = f"{got[0]} in {name} and {got[1]} in {label}"
    raise UserError(f"models, which first differ at {key!r}", got=where, why=why, do=do)


def storage_key(name: str, value: Tensor) -> object:
    """Return what tensors that share their memory have in common; an empty one shares none."""
    return (value.data_ptr(), value.device, value.shape, value.stride()) if value.numel() else name
