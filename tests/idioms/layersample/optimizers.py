"""Every optimizer of torch, and some that are not torch's, under LISA: the same optimizer with flags set by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from idioms.layersample.reference import apart, drawn
from sparing.layersample import LayerSampling, Sampler


class Matrices(nn.Module):
    """Blocks of matrices only, for optimizers that take nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)) for _ in range(4)
        )
        self.last = nn.Linear(4, 1, bias=False)
        zoo.redraw_(self.double(), std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


class EightBit(torch.optim.Optimizer):
    """Momentum in eight bits with one scale a tensor, as low-bit optimizers keep it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                old = state["codes"].double() * state["scale"] if state else torch.zeros_like(p)
                momentum = 0.9 * old + p.grad
                state["scale"] = momentum.abs().max() / 127
                state["codes"] = (momentum / state["scale"]).round().to(torch.int8)
                p.sub_(group["lr"] * momentum)


class Lookahead(torch.optim.Optimizer):
    """Slow weights around an optimizer: they pull at every parameter, also at those that are frozen now."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.optimizer = inner


class ScheduleFree(torch.optim.SGD):
    """Has modes, like schedule-free optimizers, whose weights are a mixture while they train."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


_O = torch.optim
OPTIMIZERS: dict[str, Callable[..., _O.Optimizer]] = {
    "SGD": partial(_O.SGD, lr=1e-2, weight_decay=0.1),
    "SGD with momentum": partial(_O.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "Adam": partial(_O.Adam, lr=1e-2, weight_decay=0.1), "AdamW, foreach": partial(_O.AdamW, lr=1e-2, foreach=True),
    "AdamW, fused": partial(_O.AdamW, lr=1e-2, fused=True),
    "AdamW, amsgrad": partial(_O.AdamW, lr=1e-2, amsgrad=True), "Adamax": partial(_O.Adamax, lr=1e-2),
    "NAdam": partial(_O.NAdam, lr=1e-2), "RAdam": partial(_O.RAdam, lr=1e-2),
    "RMSprop": partial(_O.RMSprop, lr=1e-2, momentum=0.9, centered=True), "Rprop": partial(_O.Rprop, lr=1e-2),
    "Adadelta": partial(_O.Adadelta, lr=1e-1), "ASGD": partial(_O.ASGD, lr=1e-2),
    "Adafactor": partial(_O.Adafactor, lr=1e-2), "Muon": partial(_O.Muon, lr=1e-2), "eight-bit momentum": EightBit,
}  # fmt: skip
"""Those that hold what they know of a parameter under that parameter, made at its first step."""

REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "LBFGS": (_O.LBFGS, "reset", "joins all parameters"),
    "Adagrad": (_O.Adagrad, "reset", "makes its state when it is built.*state='keep'"),
    "Lookahead": (lambda params: Lookahead(_O.SGD(params, lr=1e-2)), "reset", "wraps another optimizer"),
    "schedule-free": (partial(ScheduleFree, lr=1e-2), "reset", "between two sequences.*state='keep'"),
}
"""Name -> optimizer, policy, words of the refusal."""


def loss(model: nn.Module, step: int) -> Tensor:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return model(rows).square().mean()


def difference(make: Callable[..., _O.Optimizer], policy: str = "reset", steps: int = 9) -> float:
    """Train with the Sampler and with flags set by hand: how far are the weights apart?"""
    model = Matrices()
    twin = copy.deepcopy(model)
    optimizer, by_hand = make(model.parameters()), make(twin.parameters())
    settings = LayerSampling(active=1, period=2, state=policy, body="layers")
    with Sampler(model, optimizer, settings) as sampler:
        for step in range(steps):
            sampler.begin_step(step)
            loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(steps):
        now = drawn(4, step, active=1, period=2, seed=0)
        for at, layer in enumerate(twin.layers):
            layer.requires_grad_(at in now)
            for p in layer.parameters():
                if at not in now and policy == "reset":
                    by_hand.state.pop(p, None)
        loss(twin, step).backward()
        by_hand.step()
        by_hand.zero_grad()
    return apart(model, twin)
