"""What layer sampling refuses, each with the reason, before anything is changed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparing.blocks import Block, named_parameters, submodule, tied
from sparing.errors import UserError, require
from sparing.layersample.config import LayerSampling
from sparing.layersample.parts import Unit
from sparing.layersample.state import is_sharded, read

_WRAPPERS = {
    "DistributedDataParallel": (
        "its buckets hold the gradient of every parameter, and it does not reduce those frozen when it was built",
        "train without it: call Sampler.all_reduce_gradients() before the optimizer's step, or use fully_shard",
    ),
    "DataParallel": ("its replicas copy the frozen blocks each step", "use one process per device"),
    "FullyShardedDataParallel": ("it fuses parameters that must be frozen apart", "use fully_shard on each block"),
    "DeepSpeedEngine": (
        "it flattens parameters and fixes which of them train when it is built",
        "train without DeepSpeed, or use fully_shard on each block",
    ),
}

_OPTIMIZERS = {
    "DeepSpeed": "it fixes which parameters train when it is built",
    "LayerWise": "it steps in hooks of its own, without regard to accumulation",
    "Lomo": "it steps inside the backward pass",
    "AdaLomo": "it steps inside the backward pass",
    "LBFGS": "its direction joins all parameters, so that frozen ones would move along",
}


def check_wrapper(model: nn.Module) -> None:
    """Refuse wrappers that cannot have blocks frozen and thawed under them."""
    for module in model.modules():
        kind = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _WRAPPERS), None)
        if kind is not None:
            why, do = _WRAPPERS[kind]
            raise UserError("model", got=kind, why=why, do=do)


def check_state(optimizer: torch.optim.Optimizer, policy: str) -> None:
    """Refuse to drop or move state that an optimizer could not build anew, or without which weights mean nothing."""
    name, do = f"{policy!r} with {type(optimizer).__name__}", "pass state='keep', or use torch.optim.AdamW"
    at_start = isinstance(optimizer, torch.optim.Adagrad)
    why = "it makes its state when it is built, not at the next step"
    require(policy == "keep" or not at_start, "LayerSampling.state", name, why, do)
    # schedule-free optimizers have ``eval``: they train at one sequence of weights and are evaluated at another
    averages = callable(getattr(optimizer, "eval", None))
    why = "its weights lie between two sequences that only its state can tell apart"
    require(policy == "keep" or not averages, "LayerSampling.state", name, why, do)


def check_known(model: nn.Module, known: Mapping[str, nn.Parameter], *, replaced: bool) -> None:
    """Refuse parameters that appeared after the sampler was built: they would train whatever is drawn."""
    new = [
        name
        for name, p in named_parameters(model).items()
        if (p.requires_grad and name not in known) or (replaced and known.get(name, p) is not p)
    ]
    if new:
        raise UserError(
            "model",
            got=f"{len(new)} parameters that trained or appeared after the Sampler was built, such as {new[0]}",
            why="no draw freezes them",
            do="adapt, resize and unfreeze first, then build the optimizer, then the Sampler",
        )


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Take an optimizer out of wrappers such as accelerate's, and refuse those that cannot skip frozen parameters."""
    while True:
        name = type(optimizer).__name__
        why = next((why for kind, why in _OPTIMIZERS.items() if name.startswith(kind)), None)
        if getattr(optimizer, "is_paged", False):
            why = "its paged buffers are held for the whole process and never freed"
        # accelerate's wrapper only forwards calls
        passthrough = "accelerate.optimizer" in {kind.__module__ for kind in type(optimizer).__mro__}
        held = (v for v in getattr(optimizer, "__dict__", {}).values() if isinstance(v, torch.optim.Optimizer))
        # a wrapper that shares the inner state adds nothing of its own; one with state of its own would train on
        if why is None and not passthrough and any(v.state is not getattr(optimizer, "state", None) for v in held):
            why = "it wraps another optimizer, and keeps weights or state of its own for blocks that are frozen"
        if why is not None:
            raise UserError("optimizer", got=name, why=why, do="use an ordinary optimizer such as torch.optim.AdamW")
        inner = getattr(optimizer, "optimizer", None)
        if not passthrough or not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError("optimizer", got=type(optimizer).__name__, why="it has no state", do="pass a torch optimizer")
    return optimizer


def check_blocks(model: nn.Module, blocks: Sequence[Block], settings: LayerSampling) -> None:
    """Hold the settings against the blocks of the model."""
    body = [b for b in blocks if b.role == "body"]
    if settings.units == "block":
        settings.validate_for(len(body))
    _check_quantised(model, blocks)
    if settings.embed != settings.head:
        _check_tied(model, blocks)
    draws = settings.active or settings.budget
    if draws and not any(p.requires_grad for b in body for p in b.params.values()):
        raise UserError(
            "model", got="body blocks that are all frozen", why="there is nothing to thaw",
            do="make the parameters require gradients before sampling",
        )  # fmt: skip


def check_units(model: nn.Module, units: Sequence[Unit], settings: LayerSampling) -> list[float]:
    """Hold the settings against what is drawn; returns the part of the model's parameters that each unit is."""
    if settings.units == "module":
        settings.validate_for(len(units))
    total = sum(p.numel() for p in model.parameters())
    shares = [sum(p.numel() for p in unit.params.values()) / total for unit in units]
    largest, budget = max(shares, default=0.0), settings.budget
    why, do = f"a unit of {largest:.4f} would never train", f"pass budget >= {math.ceil(1e4 * largest) / 1e4}"
    require(budget is None or largest <= budget, "LayerSampling.budget", budget, why, do)
    for setting, wanted, why, do in (
        ("probe", settings.probe, "each process holds a part of every gradient", "pass probe=0"),
        ("units", settings.units == "module", "a sharded block freezes as a whole", "pass units='block'"),
    ):
        if wanted and any(is_sharded(p) for unit in units for p in unit.params.values()):
            raise UserError(f"LayerSampling.{setting}", got="sharded parameters", why=why, do=do)
    return shares


def _check_quantised(model: nn.Module, blocks: Sequence[Block]) -> None:
    if hasattr(model, "peft_config"):
        return  # only the adapters train, in full precision; what they adapt may be stored in any type
    odd = [n for b in blocks for n, p in b.params.items() if not (p.is_floating_point() or p.is_complex())]
    quantiser = getattr(model, "hf_quantizer", None)
    if odd or quantiser is not None:
        raise UserError(
            "model",
            got=f"quantised parameters ({odd[0]} and {len(odd) - 1} more)" if odd else type(quantiser).__name__,
            why="a quantised weight has no gradient", do="load the model in bfloat16, or train adapters",
        )  # fmt: skip


def check_plain(model: nn.Module) -> None:
    """Refuse adapted models where frozen blocks shall be quantised: their adapters would be."""
    why, do = (
        "adapters of frozen blocks would be quantised as well",
        "pass frozen=None, or `--method lora --weights nf4`",
    )
    require(not hasattr(model, "peft_config"), "LayerSampling.frozen", "a model adapted by peft", why, do)


def _check_tied(model: nn.Module, blocks: Sequence[Block]) -> None:
    embedding = next((b.params for b in blocks if b.role == "embed"), {})
    for alias, owner in tied(model).items():
        pair = {alias, owner}
        modules = [submodule(model, name.rpartition(".")[0]) for name in pair]
        if owner in embedding and not all(isinstance(m, nn.Embedding) for m in modules):
            raise UserError(
                "LayerSampling", got="embed and head set differently", why=f"{alias} and {owner} are one tied weight",
                do="pass the same value for both",
            )  # fmt: skip


def check_optimizer(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that lacks parameters which may become active: they would get gradients and never move.

    Source: LMFlow issue 726, where the freezing came before the optimizer was built.
    """
    # by identity: == of parameters compares elements
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in params.items() if id(p) not in held]
    if missing:
        raise UserError(
            "optimizer", got=f"{len(missing)} parameters missing, such as {missing[0]}",
            why="a block thawed later would get gradients and never move",
            do="build the optimizer from all parameters while they require gradients, then the Sampler",
        )  # fmt: skip


def check_gradients(params: Iterable[nn.Parameter], used: Callable[[nn.Parameter], bool]) -> None:
    """Refuse to change blocks while gradients are held; gradients that are zero throughout are dropped."""
    # writing to a shard leaves no trace in its version counter, so a used one cannot be told from a fresh one
    held = [p for p in params if p.grad is not None and (is_sharded(p) or not used(p))]
    plain = [p.grad for p in held if p.grad is not None and not is_sharded(p)]
    facts = read([fact for grad in plain for fact in (grad.isfinite().all(), grad.any())])
    # a gradient scaler skips the step on infinite gradients, so the loop has not come to zero_grad yet
    if not all(facts[::2]):
        return
    if any(facts[1::2]) or len(plain) < len(held):
        raise UserError(
            "gradients", got="some at the first step of an interval",
            why="blocks must not change inside an accumulation window",
            do="call optimizer.zero_grad() after each step, and begin_step before the first backward pass",
        )  # fmt: skip
    for p in held:
        p.grad = None


def check_open(*, closed: bool) -> None:
    """Refuse to go on after ``close``."""
    require(not closed, "Sampler", "a closed one", "its blocks are unfrozen again", "make a new one")


def check_resume(state: Mapping[str, Any], settings: LayerSampling, seed: int, blocks: int, *, force: bool) -> bool:
    """Hold a saved state against the run that wants to go on from it."""
    here = {"settings": settings.describe(), "seed": seed, "blocks": blocks}
    for key, value in here.items():
        if state[key] != value and not force:
            raise UserError(
                f"resumed {key}", got=value, why=f"the saved run had {state[key]}, its blocks would not come again",
                do="resume with what was saved, or pass force=True",
            )  # fmt: skip
    return all(state[key] == value for key, value in here.items())


def check_step(step: int) -> None:
    """Refuse what is no optimizer step."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UserError("begin_step", got=step, why="it counts optimizer steps from 0", do="pass an integer >= 0")


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that ``fully_shard`` was applied to; none where FSDP was not imported."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [m for m in model.modules() if kind is not None and isinstance(m, kind)]
