"""Betty 0.1.1: its unroll (``IterativeProblem``), and its implicit gradient (one Neumann, CG or difference product).

Its engine runs T inner steps and then one outer one; the outer optimizer step is replaced by one that keeps the
gradient. The unroll is exact. The implicit rules treat θ_T as a minimiser, which after a finite run it is not.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from betty.configs import Config, EngineConfig
from betty.engine import Engine
from betty.problems import ImplicitProblem, IterativeProblem
from torch import Tensor, nn

from benchmarks.hypergrad_toys import Reweighting


class _Phi(nn.Module):
    """Example weights as a module, since every level of betty is one."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights)


def prepare(task: Reweighting, rule: str = "unroll") -> Callable[[], Tensor]:
    """One hypergradient by ``"unroll"``, ``"darts"``, ``"neumann"`` or ``"cg"``; good for one call only."""
    logging.disable(logging.INFO)
    kept: list[Tensor] = []
    unroll = rule == "unroll"

    class Outer(ImplicitProblem):
        def training_step(self, batch: Any) -> Tensor:
            return task.outer_loss(self.inner(task.held_images))

        def get_batch(self) -> Any:
            return None

        def custom_optimizer_step(self) -> None:
            kept.append(self.module.weights.grad.detach().clone())

    class Inner(IterativeProblem if unroll else ImplicitProblem):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.fmodule(self.params, self.buffers, x) if unroll else self.module(x)

        def training_step(self, batch: Any) -> Tensor:
            return task.inner_loss(self(task.images), self.outer.module.weights)

        def get_batch(self) -> Any:
            return None

    net, phi = task.net(), _Phi(task.weights())
    sgd = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=task.momentum, weight_decay=task.decay)
    inner_config = Config(
        type="darts" if unroll else rule, unroll_steps=task.steps, retain_graph=unroll,
        neumann_iterations=20, neumann_alpha=0.1, cg_iterations=20,
    )  # fmt: skip
    inner = Inner("inner", config=inner_config, module=net, optimizer=sgd)
    outer_config = Config(type="darts", first_order=not unroll)
    outer_optimizer = torch.optim.SGD(phi.parameters(), lr=1.0)
    outer = Outer("outer", config=outer_config, module=phi, optimizer=outer_optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ready = Engine(
            problems=[outer, inner], config=EngineConfig(train_iters=task.steps),
            dependencies={"u2l": {outer: [inner]}, "l2u": {inner: [outer]}},
        )  # fmt: skip

    def run() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ready.run()
        return kept[-1]

    return run
