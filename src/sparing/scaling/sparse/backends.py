"""Which layers of a live model run masked dense and which as CSR, chosen by timing while training goes on.

    masks = apply_(model, plan, seed=0)
    optimizer = torch.optim.AdamW(plan.groups(model, lr=lr))
    choices = convert_(model, masks, optimizer=optimizer, tokens=batch * length)
    ...
    convert_(model, masks, backend="dense", optimizer=optimizer)

A layer is changed in place: its module stays, with its hooks and buffers, and its parameter keeps its name but becomes
the vector of live values. Gradients and optimizer state move with it, both ways, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from sparing.blocks import named_parameters, submodule, tied
from sparing.errors import UserError, require
from sparing.scaling.masks.mask_set import Masks
from sparing.scaling.sparse.known import OptimizerLike
from sparing.scaling.sparse.layers import SparseLinear, unsupported
from sparing.scaling.sparse.panels import supports
from sparing.scaling.sparse.swap import is_conv1d, is_transposed, to_dense_, to_sparse_
from sparing.scaling.sparse.timing import Seconds, time_layer

Backend = Literal["dense", "csr", "auto"]
"""How masked layers run; for "2:4" and "block" on CUDA see ``sparing.scaling.sparse.cuda``."""

_BY_MATRIX = ("Adafactor", "Muon")  # optimizers whose step of a matrix is not that of its entries


@dataclass(frozen=True, slots=True)
class Choice:
    """How one layer runs, and why; ``why`` names the products of "csr": our kernel's or MKL's."""

    backend: Literal["dense", "csr"]
    seconds_dense: float  # forward and backward pass masked dense (s); NaN where nothing was timed
    seconds_sparse: float  # the same by CSR (s)
    why: str


def convert_(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    *,
    backend: Backend = "auto",
    optimizer: OptimizerLike | None = None,
    tokens: int = 512,
    threshold: float = 1.1,
    prefer: Mapping[str, Choice] | None = None,
) -> dict[str, Choice]:
    """Make every masked layer run dense, by CSR, or by whichever is faster here.

    Under "auto" each distinct (shape, density) is timed once; a layer changes only where the other is ``threshold``
    times faster, and stays dense where CSR cannot run (convolutions, CUDA, float16; without a C compiler, which our
    kernel needs, also bfloat16 and whatever torch has no MKL for).

    Args:
        model: The model, its masks applied; wrap it for data parallelism afterwards.
        masks: Canonical name of a weight -> bool mask of the dense weight's shape.
        backend: "dense", "csr" (refuses where it cannot), or "auto".
        optimizer: The one that steps the model, if there is one already; its state moves along.
        tokens: Rows that a layer sees in one pass (count), to time with.
        threshold: How many times faster the other must be for a change (ratio, >= 1).
        prefer: Earlier choices: what each layer ran as before (a resumed run).

    Returns:
        Canonical name -> choice, for every mask.

    Raises:
        UserError: If a layer is to run by CSR and cannot, the backend is unknown, or the model is wrapped by
            DistributedDataParallel. If the optimizer could not continue with a weight of another shape: Adafactor and
            Muon step matrices, and LBFGS has a history of all weights. No layer was changed then.

    Example:
        >>> layer = nn.Sequential(nn.Linear(4, 4))
        >>> mask = torch.eye(4, dtype=torch.bool)
        >>> _ = layer[0].weight.data.mul_(mask)
        >>> convert_(layer, {"0.weight": mask}, backend="csr")["0.weight"].backend, layer[0].weight.shape
        ('csr', torch.Size([4]))
    """
    require(threshold >= 1, "threshold", threshold, "it is how many times faster a change must be", "give 1 or more")
    if backend not in get_args(Backend):
        raise UserError(
            "backend", got=repr(backend), why="here are dense, csr and auto", do="see sparing.scaling.sparse.cuda"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        why = "its buckets were laid out for the parameters as they are"
        raise UserError("model", got="DistributedDataParallel", why=why, do="convert, then wrap")
    watched = isinstance(masks, Masks) and masks.watched
    if isinstance(masks, Masks):
        masks.verify()  # while there are dense weights to look at
    timed, before = partial(_seconds, {}, tokens), prefer or {}
    dense = {name: masks[name] for name in masks}  # read only here: a sparse layer builds its mask at each access
    obstacle = partial(_obstacle, model, optimizer)
    choices = {n: _decide(model, n, m, backend, timed, threshold, before.get(n), obstacle) for n, m in dense.items()}
    for name, choice in choices.items():
        layer = submodule(model, name.rpartition(".")[0])
        leaves = isinstance(layer, SparseLinear) and choice.backend == "dense"
        why = _stuck(optimizer, cast("Tensor", layer.weight)) if leaves else ""
        do = "train on as it is, or build the optimizer after convert_"
        require(not why, f"backend of {name}", "dense", why, do)
    for name, choice in choices.items():
        layer = submodule(model, name.rpartition(".")[0])
        if choice.backend == "csr" and not isinstance(layer, SparseLinear):
            to_sparse_(layer, dense[name], optimizer)
        elif choice.backend == "dense" and isinstance(layer, SparseLinear):
            to_dense_(layer, optimizer)
    if watched:
        cast("Masks", masks).watch_()  # no step has been taken yet: the weights may still be drawn anew
    return choices


def _seconds(seen: dict[tuple[Any, ...], Seconds], tokens: int, layer: nn.Module, mask: Tensor) -> Seconds:
    """Time a layer; each distinct (shape, density, dtype) only at first."""
    # Two digits of density: random masks of one layer kind share a timing, and so a choice.
    density, dtype = f"{float(mask.sum()) / mask.numel():.2g}", cast("Tensor", layer.weight).dtype
    fan_out, fan_in = mask.shape[::-1] if is_transposed(layer) else mask.shape
    key = (fan_in, fan_out, density, dtype)
    if key not in seen:
        seen[key] = time_layer(fan_in, fan_out, max(float(density), 1 / mask.numel()), tokens, dtype=dtype)
    return seen[key]


def _decide(
    model: nn.Module,
    name: str,
    mask: Tensor,
    backend: Backend,
    timed: Callable[[nn.Module, Tensor], Seconds],
    threshold: float,
    before: Choice | None,
    obstacle_to: Callable[[str, nn.Module], str],
) -> Choice:
    """Choose how one layer runs."""
    if backend == "dense":
        return Choice("dense", math.nan, math.nan, "asked for")
    layer = submodule(model, name.rpartition(".")[0])
    obstacle = obstacle_to(name, layer)
    if obstacle and backend == "csr":
        raise UserError(f"backend of {name}", got="csr", why=obstacle, do='use backend="auto" or "dense"')
    if obstacle:
        return Choice("dense", math.nan, math.nan, obstacle)
    by = "our kernel" if supports(cast("Tensor", layer.weight)) else "MKL"
    if backend == "csr":
        return Choice("csr", math.nan, math.nan, f"asked for; products by {by}")
    # A resumed run holds dense layers whatever it ran before: ``before`` says what that was.
    now = before.backend if before is not None else "csr" if isinstance(layer, SparseLinear) else "dense"
    seconds = timed(layer, mask)
    # Stay with what runs now unless the other is ``threshold`` times faster.
    ratio = seconds.dense / max(seconds.sparse, 1e-12)
    gain = ratio if now == "dense" else 1 / max(ratio, 1e-12)
    other: Literal["dense", "csr"] = "csr" if now == "dense" else "dense"
    why = f"csr by {by} is {ratio:.2f} times as fast; it ran {now}, and a change must gain {threshold:g}"
    return Choice(other if gain >= threshold else now, *seconds, why)  # fmt: skip


def _obstacle(model: nn.Module, optimizer: OptimizerLike | None, name: str, layer: nn.Module) -> str:
    """Say why a layer cannot run by CSR; empty where it can."""
    if isinstance(layer, SparseLinear):
        return unsupported(layer.weight)
    if not (type(layer) is nn.Linear or is_conv1d(type(layer))) or not name.endswith("weight"):
        return f"{type(layer).__name__} has no sparse form, only Linear and GPT-2's Conv1D have"
    if "weight" not in layer._parameters:
        return "its weight is computed by a parametrization"
    if name in tied(model).values():
        return "its weight is tied to another layer's"
    weight = cast("Tensor", layer.weight)
    return unsupported(weight) or _stuck(optimizer, weight)


def _stuck(optimizer: OptimizerLike | None, weight: Tensor) -> str:
    """Say why an optimizer could not go on with a weight of another shape; empty where it can."""
    if optimizer is None or all(weight is not p for group in optimizer.param_groups for p in group["params"]):
        return ""
    # accelerate's wrapper holds the optimizer under this name
    name, held = type(getattr(optimizer, "optimizer", optimizer)).__name__, optimizer.state
    if name in _BY_MATRIX and (weight.ndim > 1 or weight in held):
        return f"{name} steps a matrix as a whole, and a sparse layer's weight is a vector"
    if name == "LBFGS" and held:
        return "LBFGS has a history of all weights together, at their shapes"
    own = held[weight].items() if weight in held else ()
    odd = [key for key, value in own if isinstance(value, Tensor) and value.numel() > 1 and value.shape != weight.shape]
    return f"{name} holds {odd[0]} for its weight in a shape of its own" if odd else ""


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """Return the layers that run by CSR."""
    places = ((name, submodule(model, name.rpartition(".")[0])) for name in named_parameters(model))
    return {name: at for name, at in places if name.endswith("weight") and isinstance(at, SparseLinear)}


def dense_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state dict as if every layer ran masked dense, so that any backend can load it."""
    return _restated(model, optimizer, optimizer.state_dict(), lambda layer, value: layer.scatter(value), dense=False)


def load_dense_state_(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what ``dense_state`` returned, or a masked dense run's state dict; the model must hold its masks already."""
    loaded = _restated(model, optimizer, state, lambda layer, value: layer.gather(value), dense=True)
    optimizer.load_state_dict(loaded)


def _restated(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    move: Callable[[SparseLinear, Tensor], Tensor],
    *,
    dense: bool,
) -> dict[str, Any]:
    """Return a state dict with the tensors of sparse layers moved; ``dense`` says which shape they come in."""
    layers = {id(layer.weight): layer for layer in sparse_layers(model).values()}
    flat = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    owners = {index: layers.get(id(parameter)) for index, parameter in zip(indices, flat, strict=True)}

    def moved(index: int, value: Any) -> Any:
        layer = owners.get(index)
        if layer is None or not isinstance(value, Tensor):
            return value
        shape = layer.pattern.shape[::-1] if layer.transposed else layer.pattern.shape
        comes = shape if dense else layer.weight.shape
        return move(layer, value) if tuple(value.shape) == tuple(comes) else value

    held = {i: {key: moved(i, value) for key, value in kept.items()} for i, kept in state["state"].items()}
    return {**state, "state": held}
