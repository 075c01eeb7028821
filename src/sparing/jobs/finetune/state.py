"""The state of a run: live model, optimizer and sampler; started from a method, saved and restored by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparing import groups as gr
from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.jobs.finetune.batches import steps_of
from sparing.jobs.finetune.draws import Draws
from sparing.jobs.finetune.settings import Full, Training
from sparing.jobs.finetune.zeros import keeping_zeros
from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.jobs.lm.optimizer import adamw
from sparing.layersample import LayerSampling, Sampler


@dataclass(slots=True)
class TrainState:
    """Everything that a step changes."""

    model: nn.Module  # the live model; with LoRA, the peft model around it
    training: Training
    steps: int  # length of the run (optimizer steps)
    optimizer: torch.optim.Optimizer  # AdamW over everything that may ever train
    sampler: Sampler | Draws | None  # layer sampling, where that is the method; draws under a plan
    step: int = 0  # optimizer steps finished (count)
    seconds: float = 0.0  # time spent on them, evaluation excluded
    seen: int = 0  # tokens read, padding included (count)

    # Canonical names of the parameters that have trained so far: those a checkpoint holds.
    touched: set[str] = field(default_factory=set)


def groups_for(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """Parameter groups of what may train; matrices decay, vectors do not."""
    groups = gr.groups_of(model, lr=training.peak, weight_decay=training.weight_decay)
    names = [name for name, parameter in named_parameters(model).items() if parameter.requires_grad]
    return gr.bind(gr.keep(groups, names), model)


def optimizer_for(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """AdamW over the parameters that may train."""
    return adamw(groups_for(model, training), lr=training.peak)


def optimizer_and_sampler(model: nn.Module, training: Training) -> tuple[torch.optim.Optimizer, Sampler | None]:
    """Optimizer and, for layer sampling, the sampler of a model in one process."""
    optimizer, method = optimizer_for(model, training), training.method
    if not isinstance(method, LayerSampling):
        return optimizer, None
    return optimizer, Sampler(model, optimizer, method, seed=training.seed)


# Optimizer and sampler of a live model.
MakeOptimizer = Callable[[nn.Module, Training], tuple[torch.optim.Optimizer, Sampler | Draws | None]]


@contextlib.contextmanager
def recomputing(model: Any, wanted: bool) -> Iterator[None]:
    """Turn on activation checkpointing, without the hook that would run it through frozen embeddings."""
    if not wanted or model.is_activation_checkpointing:
        yield
        return
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        why, do = str(error).splitlines()[0][:160], "omit --checkpointing"
        raise UserError("checkpointing", got=type(model).__name__, why=why, do=do) from None
    # Enabling may add a hook that makes the output of the embeddings require gradients, for reentrant checkpointing.
    # Ours is not reentrant, and backward would then run through frozen embeddings.
    model.disable_input_require_grads()
    try:
        yield
    finally:
        model.activation_checkpointing_disable()


@contextlib.contextmanager
def start(
    model: nn.Module, training: Training, *, rows: int, make_optimizer: MakeOptimizer = optimizer_and_sampler
) -> Iterator[TrainState]:
    """Set a live model up for a method; modes and ``requires_grad`` are restored at the end.

    LoRA leaves its adapters in the model: ``state.model.merge_and_unload()`` is the caller's to call.
    """
    steps = training.steps or steps_of(training.epochs, rows=rows, batch=training.batch, accumulate=training.accumulate)
    require(training.warmup < steps, "warmup", training.warmup, f"the run has {steps} steps", "pass a smaller one")
    method, mode = training.method, model.training
    if isinstance(method, Lora):
        model = with_adapters_(model, method, training.seed)
    # After the adapters are in: they freeze the rest, and that is what the caller gets back.
    flags = {p: p.requires_grad for p in model.parameters()}
    model.train()
    sampler = None
    try:
        with recomputing(model, training.checkpointing), keeping_zeros(model, training.keep_zeros):
            if isinstance(method, Full):
                model.requires_grad_(True)
            optimizer, sampler = make_optimizer(model, training)
            yield TrainState(model, training, steps, optimizer, sampler)
    finally:
        if sampler is not None:
            sampler.close()
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        model.zero_grad(set_to_none=True)
        model.train(mode)


def touch_(state: TrainState) -> dict[str, nn.Parameter]:
    """Parameters that train in the next step, by canonical name; remembered as touched."""
    training = {name: p for name, p in named_parameters(state.model).items() if p.requires_grad}
    state.touched.update(training)
    return training


def state_of(state: TrainState) -> dict[str, Any]:
    """Everything needed to resume to the same bits; weights that never trained stay in the model directory."""
    # With a sampler, the moments are in its own state.
    parameters, sampler, held = named_parameters(state.model), state.sampler, state.optimizer.state
    moments = {name: dict(held[p]) for name, p in parameters.items() if held.get(p)} if sampler is None else {}
    return {
        "step": state.step,
        "seconds": state.seconds,
        "seen": state.seen,
        "weights": {name: parameters[name].detach() for name in sorted(state.touched)},
        "optimizer": moments,
        "sampler": sampler.state_dict(optimizer=True) if isinstance(sampler, Sampler) else None,
    }


def restore_(state: TrainState, tree: Mapping[str, Any]) -> None:
    """Restore a fresh run to what ``state_of`` returned; the optimizer takes over the tensors of the tree."""
    parameters = named_parameters(state.model)
    with torch.no_grad():
        for name, value in tree["weights"].items():
            parameters[name].copy_(value)
    for name, held in tree["optimizer"].items():
        # The step count too has to be on the device of its parameter: the fused AdamW wants it there.
        there = parameters[name].device
        state.optimizer.state[parameters[name]] = {key: value.to(there) for key, value in held.items()}
    if isinstance(state.sampler, Sampler):
        state.sampler.load_state_dict(tree["sampler"])
    state.step, state.seconds, state.seen = tree["step"], tree["seconds"], tree["seen"]
    state.touched = set(tree["weights"])
