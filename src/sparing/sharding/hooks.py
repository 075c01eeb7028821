"""What torch calls on the way through a model, and which part of the flow it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparing.errors import UserError
from sparing.sharding.buckets import Bucket
from sparing.sharding.gradients import Gradients


@dataclass(slots=True, eq=False)
class Stage:
    """A body block under way."""

    name: str
    module: nn.Module
    index: int  # position in the forward order
    buckets: list[Bucket]
    entered: int = 0  # forward passes since the last backward ended
    differentiated: bool = False  # whether an output asked for a gradient since the last backward
    backward: bool = False  # whether backward is inside it
    running: bool = False  # whether a forward pass is inside it


class Listener(Protocol):
    """Whom hooks report to: ``Flow``."""

    gradients: dict[str, Gradients]
    stepping: bool

    def before_forward_(self, stage: Stage) -> None:
        """Before the forward of a stage."""
        ...

    def after_forward_(self, stage: Stage, inputs: Any, output: Any) -> None:
        """After the forward of a stage."""
        ...

    def before_backward_(self, stage: Stage) -> None:
        """When the gradient of a stage's output is known."""
        ...


active_flows: list[Listener] = []  # whose ``backward`` runs


def touch_parameters(module: nn.Module, *rest: Any) -> None:
    """Touch a module's parameters before a state dict is loaded into them, so that freed ones raise."""
    del rest
    for parameter in module.parameters(recurse=False):
        parameter.detach()


def recomputing() -> bool:
    """Whether a forward pass runs inside a backward pass, for activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def requiring_grad(nested: Any) -> list[Tensor]:
    """Tensors in nested containers (any pytree) that autograd follows."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor) and leaf.requires_grad]


def inner_modules(stage: Stage) -> list[nn.Module]:
    """Modules inside a stage, the block itself excluded, that hold weights of it."""
    weights = {id(parameter) for bucket in stage.buckets for parameter in bucket.params}
    every = [part for part in stage.module.modules() if part is not stage.module]
    return [part for part in every if any(id(p) in weights for p in part.parameters(recurse=False))]


@dataclass(slots=True)
class BeforeForward:
    """Forward pre-hook of a stage."""

    flow: Listener
    stage: Stage

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Gather the stage."""
        del module, inputs
        # A recomputation may stop early, and then no post hook would reset it.
        self.stage.running = not recomputing()
        self.flow.before_forward_(self.stage)


@dataclass(slots=True)
class AfterForward:
    """Forward hook of a stage."""

    flow: Listener
    stage: Stage

    def __call__(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        """Free the stage, or keep it for its backward pass."""
        del module
        self.stage.running = False
        self.flow.after_forward_(self.stage, (inputs, named), output)


@dataclass(slots=True)
class AfterInner:
    """Forward hook of a module in a stage: what it returns may reach the loss beside what the stage returns."""

    flow: Listener
    stage: Stage

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Watch for the gradient of what it returned, so that its weights are here then."""
        del module, inputs
        # Weights that are never cut need no hook; a compiled block is one node, and a hook in it would split it.
        if torch.compiler.is_compiling() or recomputing() or all(bucket.whole for bucket in self.stage.buckets):
            return
        for tensor in requiring_grad(output):
            self.stage.differentiated = True
            tensor.register_hook(BeforeBackward(self.flow, self.stage))  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class BeforeBackward:
    """Tensor hook: autograd is about to enter a stage, so gather it again."""

    flow: Listener
    stage: Stage

    def __call__(self, grad: Tensor) -> None:
        """Gather the stage again; a second derivative of what is cut is refused."""
        del grad
        # The block computes a gradient inside its own forward pass, where it is whole anyway.
        if self.stage.running:
            return
        if torch.is_grad_enabled() and not all(bucket.whole for bucket in self.stage.buckets):
            raise UserError(
                "create_graph", got=f"a gradient of {self.stage.name} that shall be differentiated again",
                why="its weights are cut, and away when that is done", do="take a plan that begins with N, such as NIG",
            )  # fmt: skip
        self.flow.before_backward_(self.stage)


@dataclass(slots=True)
class CollectGradient:
    """Post-accumulate hook of a parameter: hands its gradient to the engine."""

    flow: Listener
    bucket: str
    index: int

    def __call__(self, parameter: Tensor) -> None:
        """Take the gradient over."""
        grad, parameter.grad = parameter.grad, None
        found = self.flow.gradients.get(self.bucket)
        if found is None or grad is None:
            return
        if self.flow.stepping:
            found.collect_(self.index, grad)
        # Gradients that the loss of another engine leaves here are dropped, as its zero_grad would.
        elif not active_flows:
            raise UserError(
                "loss.backward()", got="a gradient of a sharded parameter",
                why="it would be this rank's alone, and belong to no step",
                do="call engine.backward(loss), or torch.autograd.grad for other gradients",
            )  # fmt: skip
