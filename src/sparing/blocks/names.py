"""Canonical names: where a parameter or module sits in the model its author wrote, whatever wraps it now."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, cast

from torch import Tensor, nn

from sparing.errors import UserError

# Module that defines the wrapper, its class, the attribute that holds what it wraps. A class whose module was never
# imported has no instances, so nothing needs to be imported to ask.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",  # of which CheckpointWrapper and OffloadWrapper are kinds
        "_checkpoint_wrapped_module",
    ),
)


class Place(NamedTuple):
    """One place in the model where a module is reachable."""

    path: str  # canonical dotted path, empty for the model itself
    module: nn.Module  # the module there, without wrappers


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside any wrappers, known by type: a user's attribute called ``module`` is no wrapper."""
    for _, inner in _wrappers(module):
        module = inner
    return module


@lru_cache(maxsize=2**12)
def _held_by(kind: type) -> str | None:
    """The attribute in which a class of wrappers holds a module; None for other classes, once and for all."""
    for source, name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(source), name, None)
        if wrapper is not None and issubclass(kind, wrapper):
            return attribute
    return None


def join(path: str, name: str) -> str:
    """Append one name to a dotted path, which may be empty."""
    return f"{path}.{name}" if path else name


def children(place: Place) -> Iterator[Place]:
    """Yield the children of a place in registration order, unwrapped."""
    # not ``named_children``, which omits a module that is registered a second time
    for name, child in place.module._modules.items():
        if child is not None:
            yield Place(join(place.path, name), unwrap(child))


def walk(model: nn.Module) -> Iterator[Place]:
    """Yield every place in the model, parents first, in registration order; a shared module once for each path."""
    stack = [Place("", unwrap(model))]
    while stack:
        place = stack.pop()
        yield place
        # reversed, because the stack is popped from its end
        stack.extend(reversed(list(children(place))))


def all_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter under each of its canonical names, in registration order."""
    for path, module in walk(model):
        # not ``named_parameters``, which gives a tied parameter once and under wrapped names
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield join(path, name), parameter


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter once, by canonical name, in registration order.

    For a bare model these are the names of ``model.named_parameters()``. Wrappers (``DistributedDataParallel``,
    ``DataParallel``, ``torch.compile`` of the model or of a block, activation checkpointing, FSDP1 with
    ``use_orig_params=True``) leave no trace; without that option FSDP1 leaves one flat parameter per wrapped module.

    Args:
        model: Any module.

    Returns:
        Canonical name -> parameter. A tied parameter has the name that was registered first; ``tied`` has the others.

    Example:
        >>> list(named_parameters(nn.DataParallel(nn.Linear(1, 1))))
        ['weight', 'bias']
    """
    owners: dict[int, str] = {}
    return {name: parameter for name, parameter in all_names(model) if owners.setdefault(id(parameter), name) == name}


def tied(model: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters.

    Args:
        model: Any module; call after ``tie_weights()`` and after sharding, which may tie again.

    Returns:
        Canonical alias -> the name under which ``named_parameters`` has the parameter.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> tied(nn.Sequential(layer, nn.ReLU(), layer))
        {'2.weight': '0.weight', '2.bias': '0.bias'}
    """
    owners: dict[int, str] = {}
    return {
        name: owner for name, parameter in all_names(model) if (owner := owners.setdefault(id(parameter), name)) != name
    }


def plain_name(model: nn.Module, name: str) -> str:
    """The canonical form of a name that torch gives a parameter or buffer of a model, such as a key of its state dict.

    Args:
        model: Any module, wrapped or not.
        name: Dotted name, with the attributes of wrappers or, as state dicts of some have it, without.

    Returns:
        The name without wrappers' attributes.

    Example:
        >>> plain_name(nn.Sequential(nn.DataParallel(nn.BatchNorm1d(1))), "0.module.running_mean")
        '0.running_mean'
    """
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        around = [] if module is None else list(_wrappers(module))
        # the outer ones may be left out of the names of a state dict
        within = next((inner for held, inner in around if held == part), None)
        if within is None:
            kept.append(part)
            within = None if module is None else unwrap(module)._modules.get(part)
        module = within
    return ".".join(kept)


def _wrappers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The attribute of each wrapper around a module, the outermost first, and what it holds."""
    kind: type = type(module)
    while (held := _held_by(kind)) is not None:
        module = cast("nn.Module", getattr(module, held))
        yield held, module
        kind = type(module)


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return every buffer once, by canonical name, in registration order, as ``named_parameters`` does parameters."""
    return {plain_name(model, name): buffer for name, buffer in model.named_buffers()}


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return the module at a canonical path, itself without wrappers.

    Args:
        model: Any module, wrapped or not.
        name: Canonical dotted path, such as the name of a body block; empty for the model.

    Returns:
        The module of the author's class: its hooks run also when a wrapper around it is called.

    Raises:
        UserError: If there is no module at that path.
    """
    module = unwrap(model)
    # step by step, because wrappers may sit at any depth and get_submodule knows nothing of them
    for depth, part in enumerate(parts := name.split(".") if name else []):
        child = module._modules.get(part)
        if child is None:
            here = ".".join(parts[:depth]) or "the model"
            known = ", ".join(module._modules) or "no modules at all"
            raise UserError("module path", got=repr(name), why=f"{here} holds {known}", do=f"replace {part!r} by one")
        module = unwrap(child)
    return module
