"""A run under way: the live model, its optimizer and its sampler; begun from a method, saved and restored by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
class Course:
    """Everything that a step changes."""

    model: nn.Module
    """The live model; with LoRA, the peft model around it."""

    training: Training
    """Method and pace."""

    steps: int
    """Length of the run (optimizer steps)."""

    optimizer: torch.optim.Optimizer
    """AdamW over everything that may ever train."""

    sampler: Sampler | Draws | None
    """Layer sampling, where that is the method; draws under a plan."""

    step: int = 0
    """Optimizer steps finished (count)."""

    seconds: float = 0.0
    """Time spent on them, evaluation excluded."""

    seen: int = 0
    """Tokens read, padding included (count)."""

    touched: set[str] = field(default_factory=set)
    """Canonical names of the parameters that have trained so far: those a checkpoint holds."""


def groups_for(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """Groups of the parameters that may train; matrices decay, vectors do not.

    Args:
        model: The model; what is frozen now is left out.
        training: Peak rate and decay.

    Returns:
        Groups as an optimizer of torch takes them.
    """
    groups = gr.groups_of(model, lr=training.peak, weight_decay=training.weight_decay)
    names = [name for name, parameter in named_parameters(model).items() if parameter.requires_grad]
    return gr.bind(gr.keep(groups, names), model)


def optimizer_for(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """AdamW over the parameters that may train.

    Args:
        model: The model; what is frozen now is left out.
        training: Peak rate and decay.

    Returns:
        The optimizer, without state.
    """
    return adamw(groups_for(model, training), lr=training.peak)


def equipped(model: nn.Module, training: Training) -> tuple[torch.optim.Optimizer, Sampler | None]:
    """What trains a model in one process: AdamW, and the sampler where there is one.

    Args:
        model: The model; what is frozen now is left out.
        training: Method, peak rate and decay.

    Returns:
        The optimizer, without state, and the sampler, at no step yet.
    """
    optimizer, method = optimizer_for(model, training), training.method
    if not isinstance(method, LayerSampling):
        return optimizer, None
    return optimizer, Sampler(model, optimizer, method, seed=training.seed)


Equip = Callable[[nn.Module, Training], tuple[torch.optim.Optimizer, Sampler | Draws | None]]
"""Gives a live model what trains it."""


@contextlib.contextmanager
def recomputing(model: Any, wanted: bool) -> Iterator[None]:
    """Let backward compute activations again, without the hook that would run it through frozen embeddings.

    Args:
        model: A transformers model, wrapped by peft or not.
        wanted: Whether to.

    Yields:
        Nothing; a model that did not recompute before does not afterwards.

    Raises:
        UserError: If the model cannot.
    """
    if not wanted or model.is_activation_checkpointing:
        yield
        return
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        why, do = str(error).splitlines()[0][:160], "leave --checkpointing away"
        raise UserError("checkpointing", got=type(model).__name__, why=why, do=do) from None
    model.disable_input_require_grads()
    try:
        yield
    finally:
        model.activation_checkpointing_disable()


@contextlib.contextmanager
def begun(model: nn.Module, training: Training, *, rows: int, equip: Equip = equipped) -> Iterator[Course]:
    """Set a live model up for a method; modes and ``requires_grad`` come back at the end.

    LoRA leaves its additions in the model: ``course.model.merge_and_unload()`` is the caller's to call.

    Args:
        model: The model to train in place.
        training: Method and pace.
        rows: Training rows, from which epochs become steps.
        equip: Gives a model its optimizer and sampler.

    Yields:
        The course, at step 0.

    Raises:
        UserError: If the method does not fit the model, or the warm-up the number of steps.
    """
    steps = training.steps or steps_of(training.epochs, rows=rows, batch=training.batch, accumulate=training.accumulate)
    require(training.warmup < steps, "warmup", training.warmup, f"the run has {steps} steps", "pass a smaller one")
    method, mode = training.method, model.training
    if isinstance(method, Lora):
        model = with_adapters_(model, method, training.seed)
    flags = {p: p.requires_grad for p in model.parameters()}
    model.train()
    sampler = None
    try:
        with recomputing(model, training.checkpointing), keeping_zeros(model, training.keep_zeros):
            if isinstance(method, Full):
                model.requires_grad_(True)
            optimizer, sampler = equip(model, training)
            yield Course(model, training, steps, optimizer, sampler)
    finally:
        if sampler is not None:
            sampler.close()
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        model.zero_grad(set_to_none=True)
        model.train(mode)


def touch_(course: Course) -> dict[str, nn.Parameter]:
    """The parameters that train in the step to come; remembered as touched.

    Args:
        course: The run, its sampler already at this step.

    Returns:
        Canonical name to parameter.
    """
    training = {name: p for name, p in named_parameters(course.model).items() if p.requires_grad}
    course.touched.update(training)
    return training


def state_of(course: Course) -> dict[str, Any]:
    """Everything that is needed to go on to the same bits.

    Args:
        course: The run, between two steps.

    Returns:
        A tree of tensors and plain values. Weights that never trained are left out: they are in the model directory.
    """
    parameters, sampler, state = named_parameters(course.model), course.sampler, course.optimizer.state
    moments = {name: dict(state[p]) for name, p in parameters.items() if state.get(p)} if sampler is None else {}
    return {
        "step": course.step,
        "seconds": course.seconds,
        "seen": course.seen,
        "weights": {name: parameters[name].detach() for name in sorted(course.touched)},
        "optimizer": moments,
        "sampler": sampler.state_dict(optimizer=True) if isinstance(sampler, Sampler) else None,
    }


def _beside(parameter: nn.Parameter, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State on the device of its parameter, the step count too, as the fused AdamW wants it."""
    return {key: value.to(parameter.device) for key, value in state.items()}


def restore_(course: Course, tree: Mapping[str, Any]) -> None:
    """Put a run back to where ``state_of`` found it; the optimizer takes over the tensors of the tree.

    Args:
        course: A freshly begun run of the same model and settings.
        tree: What ``state_of`` returned.
    """
    parameters = named_parameters(course.model)
    with torch.no_grad():
        for name, value in tree["weights"].items():
            parameters[name].copy_(value)
    for name, state in tree["optimizer"].items():
        course.optimizer.state[parameters[name]] = _beside(parameters[name], state)
    if isinstance(course.sampler, Sampler):
        course.sampler.load_state_dict(tree["sampler"])
    course.step, course.seconds, course.seen = tree["step"], tree["seconds"], tree["seen"]
    course.touched = set(tree["weights"])
