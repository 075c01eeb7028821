"""What torch calls on the way through a model, and which part of the flow it means."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparing.errors import UserError
from sparing.sharding.engine.buckets import Bucket

if TYPE_CHECKING:
    from sparing.sharding.engine.flow import Flow


@dataclass(slots=True, eq=False)
class Stage:
    """A body block under way."""

    name: str
    module: nn.Module
    index: int  # position in the forward order
    buckets: list[Bucket]
    entered: int = 0  # forward passes since the last backward ended, without those of an evaluation
    differentiated: bool = False  # whether an output asked for a gradient since the last backward
    backward: bool = False  # whether backward is inside it
    running: bool = False  # whether a forward pass is inside it


active_flows: list[Flow] = []  # whose ``backward`` runs


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


def differentiated(inputs: Any) -> bool:
    """Whether a forward pass of these inputs will have gradients: a reentrant checkpoint runs it without grad first."""
    return torch.is_grad_enabled() or bool(requiring_grad(inputs))


def inner_modules(stage: Stage) -> list[nn.Module]:
    """Modules inside a stage, the block itself excluded, that hold weights of it."""
    weights = {id(parameter) for bucket in stage.buckets for parameter in bucket.params}
    every = [part for part in stage.module.modules() if part is not stage.module]
    return [part for part in every if any(id(p) in weights for p in part.parameters(recurse=False))]


# Hooks are partials of what follows: a flow refuses to be copied, and so does a model whose hooks hold it.


def before_forward(flow: Flow, stage: Stage, module: nn.Module, inputs: Any) -> None:
    """Gather a stage before its forward pass."""
    del module
    # A recomputation may stop early, and then no post hook would reset it.
    stage.running = not recomputing()
    flow.before_forward_(stage, inputs)


def after_forward(flow: Flow, stage: Stage, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
    """Free a stage, or keep it for its backward pass."""
    del module
    stage.running = False
    flow.after_forward_(stage, (inputs, named), output)


def after_inner(flow: Flow, stage: Stage, module: nn.Module, inputs: Any, output: Any) -> None:
    """Watch what a module in a stage returns, which may reach the loss beside what the stage returns."""
    del module, inputs
    # Weights that are never cut need no hook; a compiled block is one node, and a hook in it would split it.
    if torch.compiler.is_compiling() or recomputing() or all(bucket.whole for bucket in stage.buckets):
        return
    for tensor in requiring_grad(output):
        stage.differentiated = True
        tensor.register_hook(partial(before_backward, flow, stage))  # type: ignore[no-untyped-call]


def before_backward(flow: Flow, stage: Stage, grad: Tensor) -> None:
    """Gather a stage that autograd is about to enter; a second derivative of what is cut is refused."""
    del grad
    # The block computes a gradient inside its own forward pass, where it is whole anyway.
    if stage.running:
        return
    if torch.is_grad_enabled() and not all(bucket.whole for bucket in stage.buckets):
        raise UserError(
            "create_graph", got=f"a gradient of {stage.name} that shall be differentiated again",
            why="its weights are cut, and away when that is done", do="take a plan that begins with N, such as NIG",
        )  # fmt: skip
    flow.before_backward_(stage)


class CollectGradient(partial[None]):
    """Post-accumulate hook of a parameter, known by its class among those of users."""


def collect_gradient(flow: Flow, bucket: str, index: int, parameter: Tensor) -> None:
    """Hand the gradient of a parameter to the engine."""
    grad, parameter.grad = parameter.grad, None
    found = flow.gradients.get(bucket)
    if found is None or grad is None:
        return
    if flow.stepping:
        found.collect_(index, grad)
    # Gradients that the loss of another engine leaves here are dropped, as its zero_grad would.
    elif not active_flows:
        raise UserError(
            "loss.backward()", got="a gradient of a sharded parameter",
            why="it would be this rank's alone, and belong to no step",
            do="call engine.backward(loss), or torch.autograd.grad for others; for a schedule pass engine='fsdp2'",
        )  # fmt: skip
