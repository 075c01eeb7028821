"""One run of a study: a small model under one rule, one rate, one mask, to its loss."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from sparing.jobs.schedule import rate
from sparing.jobs.transfer.grid import Cell
from sparing.jobs.transfer.inputs import Digits, Inputs, gather
from sparing.jobs.transfer.models import build
from sparing.jobs.transfer.settings import Dynamic, MasksName, RuleName, Transfer
from sparing.scaling.apply import apply_
from sparing.scaling.dynamic import GMP, SET, Method, RigL
from sparing.scaling.live import Masks
from sparing.scaling.masks import Bernoulli, ConstantFanIn, ExactCount, Law
from sparing.scaling.planning import Plan, plan
from sparing.scaling.rules import SP, InitOnly, MuP, RateOnly, Rule, SuPar

BETAS, MOMENTUM = (0.9, 0.95), 0.9
CALIBRATED_AT, CALIBRATED_FOR = -9.0, 20
"""log2 rate and steps (count) of the run that measures what the spectral rule refers to."""

MARGIN = 0.05  # a run whose loss ends this much above where it started has diverged (nat)

LAWS: Mapping[MasksName, Law] = {
    "constant-fan-in": ConstantFanIn(),
    "balanced": ConstantFanIn(balanced=True),
    "bernoulli": Bernoulli(),
    "exact-count": ExactCount(),
}


class Steppable(Protocol):
    """Anything that steps a model's parameters."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Step."""

    def zero_grad(self) -> None:
        """Forget gradients."""


def rule_of(settings: Transfer, name: RuleName) -> Rule:
    """The rule of a name, with the study's law of weight decay."""
    if name == "sp":
        return SP()
    kinds: Mapping[str, Callable[..., Rule]] = {
        "mup": MuP, "supar": SuPar, "init-only": InitOnly, "rate-only": RateOnly,
    }  # fmt: skip
    return kinds[name](decay=settings.decay)


def follows(settings: Transfer, name: RuleName) -> bool:
    """Whether a rule's factors follow masks as they change."""
    return name == "supar" and settings.scale in {"density", "energy"}


def method_of(settings: Transfer, density: float) -> Method | None:
    """How masks change in training; None where they do not, or where there is nothing to mask."""
    kinds: Mapping[Dynamic, Callable[[], Method]] = {
        "rigl": lambda: RigL(every=settings.every),
        "set": lambda: SET(every=settings.every),
        "gmp": lambda: GMP(final=density, every=settings.every),
    }
    return kinds[settings.dynamic]() if settings.dynamic != "none" and density < 1 else None


def factor(step: int, settings: Transfer) -> float:
    """Share of the peak rate at a step: a linear rise, then a straight line down to ``final``."""
    warmup = round(settings.warmup * settings.steps)
    share = rate(step, peak=1.0, steps=settings.steps, warmup=warmup, schedule="linear")
    return share if step < warmup else settings.final + (1 - settings.final) * share


def rescale_(model: nn.Module, planned: Plan, by: float) -> None:
    """Multiply the initial hidden weights, before a plan is applied."""
    names = {name for name, entry in planned.entries.items() if entry.role == "hidden"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.mul_(by)


def train(settings: Transfer, inputs: Inputs, cell: Cell, *, after_step: Callable[[], object] = bool) -> dict[str, Any]:
    """One run to its row: losses in nat, None where not finite; CPU seconds."""
    begin = time.process_time()
    model, masks = prepare(settings, inputs, cell)
    optimizer = optimizer_of(settings, model, masks, cell)
    losses = train_steps_(
        settings, inputs, cell, model, optimizer, evolution_of(settings, cell, model, masks, optimizer), after_step
    )
    with torch.no_grad():
        held_out = float(inputs.held_out_loss(model.eval()))
    return summary(losses, held_out, settings.steps) | {
        "live": live_share(masks),
        "seconds": time.process_time() - begin,
    }


def prepare(settings: Transfer, inputs: Inputs, cell: Cell) -> tuple[nn.Module, Masks]:
    """A model with its masks, scaled by the rule of a cell."""
    features = inputs.features if isinstance(inputs, Digits) else 0
    make = partial(build, settings, features, inputs.outputs, seed=cell.seed)
    model = make(width=cell.width)
    # gradual pruning starts dense and moves toward the density
    dense = settings.dynamic == "gmp"
    planned = plan(
        model,
        base=make(width=settings.base_width),
        density=1.0 if dense else cell.density,
        rule=rule_of(settings, cell.rule),
        optimizer=settings.optimizer,
        least_fan_in=1,
    )
    if settings.axis == "std":
        rescale_(model, planned, 2.0**cell.x)
    return model, apply_(model, planned, seed=cell.seed, masks=LAWS[settings.masks])


def optimizer_of(settings: Transfer, model: nn.Module, masks: Masks, cell: Cell) -> Steppable:
    """The optimizer of a run; peak rates stand in the groups of its plan."""
    lr = 2.0 ** (cell.x if settings.axis == "lr" else settings.rates[0])
    groups = masks.plan.groups(model, lr=lr, weight_decay=settings.weight_decay)
    plain: torch.optim.Optimizer
    if settings.optimizer == "sgd":
        plain = torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM)
    else:
        plain = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)
    if settings.scale == "spectral" and cell.rule == "supar":
        from sparing.scaling.spectral import Spectral

        return Spectral(plain, model, masks.plan, masks, reference=reference_norm(settings), seed=cell.seed)
    return plain


@functools.lru_cache
def reference_norm(settings: Transfer) -> float:
    """Spectral norm of the plain optimizer's updates in the dense base, so that rates have the same units.

    Median over hidden layers and the first steps, at a rate of 1 and over √(fan-out/fan-in).
    """
    from sparing.scaling.spectral import Spectral

    inputs = gather(settings)
    base = dataclasses.replace(
        settings, axis="lr", dynamic="none", scale="none", widths=(settings.base_width,), pairs=()
    )
    cell = Cell("supar", settings.base_width, 1.0, CALIBRATED_AT, settings.seeds[0])
    # the dense base under the plain optimizer: what the spectral rule calls one unit of rate
    model, masks = prepare(base, inputs, cell)
    optimizer = Spectral(optimizer_of(base, model, masks, cell), model, masks.plan, masks, reference=None)  # type: ignore[arg-type]
    norms: list[float] = []
    short = dataclasses.replace(base, steps=max(10, CALIBRATED_FOR))
    train_steps_(short, inputs, cell, model, optimizer, None, lambda: norms.extend(optimizer.norms().values()))
    return statistics.median(norms)


def evolution_of(settings: Transfer, cell: Cell, model: nn.Module, masks: Masks, optimizer: Any) -> Any:
    """What changes the masks of a run: its ``step(step)`` follows each optimizer step; or None."""
    method = method_of(settings, cell.density)
    if method is None:
        return None
    from sparing.scaling.evolve import Evolution

    scale: Any = settings.scale if follows(settings, cell.rule) else "none"
    return Evolution(model, masks, optimizer, method, steps=settings.steps, seed=cell.seed, scale=scale)


def train_steps_(
    settings: Transfer,
    inputs: Inputs,
    cell: Cell,
    model: nn.Module,
    optimizer: Steppable,
    evolution: Any,
    after_step: Callable[[], object],
) -> list[float]:
    """All steps of a run, or those until the loss is no number; the loss of each (nat)."""
    draws = inputs.draws(settings.steps, settings.batch, cell.seed)
    losses: list[float] = []
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(settings.steps):
        share = factor(step, settings)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        loss = inputs.loss(model, draws[step])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        # no later step can be finite, and masks must not follow such gradients
        if not math.isfinite(losses[-1]):
            break
        if evolution is not None:
            evolution.step(step)
        after_step()
    return losses


def summary(losses: list[float], held_out: float, steps: int) -> dict[str, Any]:
    """What is kept of a run's losses (nat), of ``steps`` that were asked for; one that is not finite is None.

    Example:
        >>> summary([2.0, 1.0, float("nan")], float("nan"), 20)
        {'loss': None, 'held_out_loss': None, 'start': 2.0, 'diverged': True, 'steps': 3}
    """
    last = losses[-max(1, steps // 10) :]
    mean = sum(last) / len(last)
    whole = len(losses) == steps and math.isfinite(mean)
    return {
        "loss": mean if whole else None,
        "held_out_loss": held_out if math.isfinite(held_out) else None,
        "start": losses[0],
        "diverged": not whole or mean > losses[0] + MARGIN,
        "steps": len(losses),
    }


def live_share(masks: Masks) -> float:
    """Live share of all hidden weights at the end of a run; 1 where nothing is masked."""
    counts = [(int(mask.sum()), mask.numel()) for mask in masks.values()]
    total = sum(count for _, count in counts)
    return sum(live for live, _ in counts) / total if total else 1.0
