"""One function for all merge methods: states in, one state out, tensor by tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from sparing.errors import require
from sparing.valley.merging.compatible import Model, is_statistic, lora_pairs, require_compatible, state_of, storage_key
from sparing.valley.merging.linear import Linear
from sparing.valley.merging.method import Merging, Method, Slices, merge_whole, slices_of, zip_slices
from sparing.valley.merging.model_folders import require_same_function


def merge(states: Sequence[Model], *, base: Model | None = None, method: Method | None = None) -> dict[str, Tensor]:
    """Merge models of one architecture.

    Running statistics of norm layers are averaged whatever the method: re-estimate them before the model is used
    (``soup`` does that). Counters keep their dtype and take the largest value. Arithmetic is in float32, or float64
    where the models are.

    Args:
        states: Models or their states, at least one.
        base: The common ancestor, where the method needs it.
        method: A value such as ``Linear()`` (the default), ``TaskArithmetic(0.4)``, ``Ties(keep=0.2)``,
            ``Dare(drop=0.9)`` or ``SignAware()``.

    Returns:
        New tensors under the names of the first state, in its order and dtypes, for ``load_state_dict``. Names that
        share memory in all of them, as tied weights do, share it in the result.

    Raises:
        UserError: If there are no models, they are of different architectures or settings or not finite, the base is
            missing, or there are not as many weights as models.

    Example:
        >>> merge([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 2.0])}])
        {'w': tensor([2., 2.])}
    """
    method = Linear() if method is None else method
    members, origin = [state_of(state) for state in states], None if base is None else state_of(base)
    labels = [*(f"model {at}" for at in range(1, len(members) + 1)), "the base"]
    require_base(method, origin)
    require(bool(members), "models", "none", "there is nothing to merge", "pass at least one")
    require_compatible(members if origin is None else [*members, origin], labels if origin is not None else None)
    require_same_function([*states, *([] if base is None else [base])])
    warn_of_factors(members[0])
    # Whole-model trimming sees the weights alone: a running statistic is no change that was learned
    weights = [name for name, value in members[0].items() if is_weight(name, value.is_floating_point())]
    sliced = [{name: slices_of(state[name]) for name in weights} for state in members]
    method = method.ready(sliced, None if origin is None else {name: slices_of(origin[name]) for name in weights})
    merged: dict[str, Tensor] = {}
    owners: dict[object, str] = {}
    for name in members[0]:
        tensors, ancestor = [state[name] for state in members], None if origin is None else origin[name]
        every = tensors if ancestor is None else [*tensors, ancestor]
        # Names that share memory in every state are tied weights, and stay tied
        owner = owners.setdefault(tuple(storage_key(name, tensor) for tensor in every), name)
        merged[name] = merged[owner] if owner in merged else merged_tensor(method, name, tensors, ancestor)
    return merged


def merged_tensor(method: Method, name: str, tensors: Sequence[Tensor], base: Tensor | None = None) -> Tensor:
    """Merge the tensors of one name by the rule for its kind, in the dtype of the first; ``merge`` does it for all."""
    return merge_whole(rule_for(method, name, tensors[0].is_floating_point()), name, tensors, base)


def rule_for(method: Method, name: str, floating: bool) -> Merging:
    """Return how tensors are merged: weights by the method, running statistics by a mean, counters by the largest."""
    if not floating:
        return _largest
    if is_statistic(name):
        # A statistic is no change since the base: sign election and trimming mean nothing for it
        weights = getattr(method, "weights", None)
        # a task that is unlearned has a weight below 0, which no mean takes
        means = weights is not None and min(weights) >= 0 and sum(weights) > 0
        return Linear(weights if means else None).slices
    return method.slices


def is_weight(name: str, floating: bool) -> bool:
    """Whether the method merges a tensor: a floating one that holds no running statistics."""
    return floating and not is_statistic(name)


def require_base(method: Method, base: object | None) -> None:
    """Refuse a method that needs a base without one."""
    why, do = f"{type(method).__name__} merges what was learned since", "pass base=..., or use Linear()"
    require(base is not None or not method.needs_base, "base", "none", why, do)


def warn_of_factors(names: Iterable[str]) -> None:
    """Warn where LoRA factors are merged, of which only the product means something."""
    if pairs := lora_pairs(names):
        warnings.warn(
            f"{len(pairs)} LoRA pairs, such as {pairs[0]!r}: (A, B) and (−A, −B) are one model, so the mean of factors "
            "means little; merge the adapters into their weights first",
            RuntimeWarning,
            stacklevel=3,
        )


def _largest(name: str, models: Sequence[Slices], base: Slices | None = None) -> Iterator[Tensor]:
    for parts in zip_slices(models):
        yield torch.stack([part.to(parts[0]) for part in parts]).amax(0)
