"""One training step as data: what prediction and measurement both run."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.optim import Optimizer

from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.memory.ledger import Ledger
from sparing.memory.sizes import Profile

Batch = Mapping[str, Tensor | tuple[Sequence[int], torch.dtype]]
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
Step = Callable[[nn.Module, Optimizer, dict[str, Tensor]], object]
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
Trainable = Callable[[str], bool] | Collection[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a step trains a model."""

    optimizer: MakeOptimizer  # called with the parameters that require gradients

    # names that train, or a predicate on the canonical name; ``None`` leaves the flags as they are
    trainable: Trainable | None = None

    # model and batch to a scalar; ``None`` is the convention of transformers, ``model(**batch).loss``
    loss: Loss | None = None
    step: Step | None = None  # A whole step, in place of ``loss`` and ``accumulate``
    checkpointing: bool = False  # recompute the activations of each block in the backward pass
    accumulate: int = 1  # micro-batches per optimizer step (count)

    def __post_init__(self) -> None:
        """Reject what no step can do."""
        require(self.accumulate >= 1, "accumulate", self.accumulate, "a step needs a batch", "pass accumulate >= 1")
        if self.step is not None and (self.loss is not None or self.accumulate != 1):
            raise UserError(
                "step", got="a step together with a loss or accumulate", why="the step decides both",
                do="pass only the step",
            )  # fmt: skip


def prepare_(model: nn.Module, training: Training) -> Optimizer:
    """Make a model ready for its first step: flags, checkpointing, training mode, optimizer."""
    if training.trainable is not None:
        freeze_(model, training.trainable)
    if training.checkpointing:
        checkpoint_(model)
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    require(bool(parameters), "model", "no parameter that requires a gradient", "nothing would train", "unfreeze")
    return training.optimizer(parameters)


def freeze_(model: nn.Module, trainable: Trainable) -> None:
    """Let exactly the chosen parameters require gradients."""
    parameters = named_parameters(model)
    chosen = {name for name in parameters if trainable(name)} if callable(trainable) else set(trainable)
    if unknown := sorted(chosen - parameters.keys()):
        raise UserError(
            "trainable", got=f"{unknown[0]!r}",
            why=f"the model has no such parameter (it has {len(parameters)}, such as {next(iter(parameters), None)!r})",
            do="take names from sparing.blocks.named_parameters",
        )  # fmt: skip
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)


def checkpoint_(model: nn.Module) -> None:
    """Switch on non-reentrant activation checkpointing of a transformers model, so that a frozen prefix stays cheap."""
    # transformers >= 5, and before
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next((switch for name in names if callable(switch := getattr(model, name, None))), None)
    if enable is None:
        raise UserError(
            "checkpointing", got=type(model).__name__, why="only models of transformers have a switch for it",
            do="call torch.utils.checkpoint inside the model's forward",
        )  # fmt: skip
    enable({"use_reentrant": False})
    # transformers also makes the embedding's output require gradients, which only reentrant checkpointing needs and
    # which would drag the backward pass through frozen blocks
    disable: Any = getattr(model, "disable_input_require_grads", None)
    if callable(disable):
        disable()


def output_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return ``model(**batch).loss``, the convention of transformers."""
    loss: Tensor | None = getattr(model(**batch), "loss", None)
    if loss is None:
        raise UserError(
            "loss", got=f"an output of {type(model).__name__} without a loss",
            why="the step needs a scalar to differentiate", do="put labels into the batch or pass loss=",
        )  # fmt: skip
    return loss


def step_of(training: Training) -> Step:
    """Return the step that the settings describe."""
    if training.step is not None:
        return training.step
    loss_of = training.loss or output_loss

    def step(model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor]) -> None:
        for _ in range(training.accumulate):
            (loss_of(model, batch) / training.accumulate).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        # after the step, not before the next: gradients would lie beside the activations of its forward pass
        optimizer.zero_grad(set_to_none=True)

    return step


@contextlib.contextmanager
def values_read() -> Iterator[None]:
    """Refuse in a line what fakes cannot run: a step that reads values."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            "step", got=f"an operation that reads values ({error.func})", why="a prediction has shapes but no data",
            do="take the branch on the value out of the step, or use measure",
        ) from error  # fmt: skip


def watch(
    model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor], step: Step, *, device: str | None = None
) -> Profile:
    """Run two steps, so that the second finds the optimizer's state, and return the profile of the second."""
    with Ledger(model, optimizer, inputs=batch, device=device) as ledger:
        step(model, optimizer, batch)
        # cycles of the first step must not live on into the second by chance
        gc.collect()
        ledger.reset_peak()
        step(model, optimizer, batch)
    return ledger.profile()
