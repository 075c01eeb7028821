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
from sparing.jobs.transfer.material import Digits, Material, gather
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

MARGIN = 0.05
"""A run whose loss ends this much (nat) above where it began has diverged."""

LAWS: Mapping[MasksName, Law] = {
    "constant-fan-in": ConstantFanIn(),
    "balanced": ConstantFanIn(balanced=True),
    "bernoulli": Bernoulli(),
    "exact-count": ExactCount(),
}


class Steps(Protocol):
    """Anything that steps a model's parameters."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Step."""

    def zero_grad(self) -> None:
        """Forget gradients."""


def rule_of(settings: Transfer, name: RuleName) -> Rule:
    """The rule of a name.

    Args:
        settings: Give the law of weight decay.
        name: Which one.

    Returns:
        The rule.
    """
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
    """Share of the peak rate at a step: a linear rise, then a straight line down to ``final``.

    Args:
        step: From 0.
        settings: Of the study.

    Returns:
        Above 0, at most 1.
    """
    warmup = round(settings.warmup * settings.steps)
    share = rate(step, peak=1.0, steps=settings.steps, warmup=warmup, schedule="linear")
    return share if step < warmup else settings.final + (1 - settings.final) * share


def rescale_(model: nn.Module, planned: Plan, by: float) -> None:
    """Multiply the initial hidden weights, before a plan is applied.

    Args:
        model: Changed.
        planned: Says which are hidden.
        by: The factor on σ.
    """
    names = {name for name, entry in planned.entries.items() if entry.role == "hidden"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.mul_(by)


def train(settings: Transfer, material: Material, cell: Cell, *, alive: Callable[[], object] = bool) -> dict[str, Any]:
    """One run.

    Args:
        settings: Of the study.
        material: What is learnt from.
        cell: Which run.
        alive: Called after every step.

    Returns:
        loss (mean of the last tenth of the steps, nat), held_out_loss, start (loss of the first step), diverged, steps
        taken, density (realised over hidden weights) and seconds (CPU, of the whole run); losses that are not finite
        are None.
    """
    begin = time.process_time()
    model, masks = prepared(settings, material, cell)
    optimizer = optimizer_of(settings, model, masks, cell)
    losses = descend_(
        settings, material, cell, model, optimizer, evolution_of(settings, cell, model, masks, optimizer), alive
    )
    with torch.no_grad():
        held_out = float(material.judged(model.eval()))
    return summary(losses, held_out, settings.steps) | {
        "live": live_share(masks),
        "seconds": time.process_time() - begin,
    }


def prepared(settings: Transfer, material: Material, cell: Cell) -> tuple[nn.Module, Masks]:
    """A model with its masks, scaled by the rule of a cell.

    Args:
        settings: Of the study.
        material: Says how many inputs and outputs there are.
        cell: Which run.

    Returns:
        Weights and masks are those of the seed, whatever the rule; masks are nested over densities.
    """
    inputs = material.inputs if isinstance(material, Digits) else 0
    make = partial(build, settings, inputs, material.outputs, seed=cell.seed)
    model = make(width=cell.width)
    dense = settings.dynamic == "gmp"  # begins dense and is pruned towards the density
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


def optimizer_of(settings: Transfer, model: nn.Module, masks: Masks, cell: Cell) -> Steps:
    """The optimizer of a run, on the groups of its plan.

    Args:
        settings: Of the study.
        model: Scaled.
        masks: Its masks.
        cell: Which run.

    Returns:
        Peak rates stand in its groups.
    """
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

    Args:
        settings: Of the study; its first seed is taken.

    Returns:
        Median over hidden layers and the first steps, at a rate of 1 and over √(fan-out/fan-in).
    """
    from sparing.scaling.spectral import Spectral

    material = gather(settings)
    base = dataclasses.replace(
        settings, axis="lr", dynamic="none", scale="none", widths=(settings.base_width,), pairs=()
    )
    cell = Cell("supar", settings.base_width, 1.0, CALIBRATED_AT, settings.seeds[0])
    model, masks = prepared(base, material, cell)
    optimizer = Spectral(optimizer_of(base, model, masks, cell), model, masks.plan, masks, reference=None)  # type: ignore[arg-type]
    norms: list[float] = []
    short = dataclasses.replace(base, steps=max(10, CALIBRATED_FOR))
    descend_(short, material, cell, model, optimizer, None, lambda: norms.extend(optimizer.norms().values()))
    return statistics.median(norms)


def evolution_of(settings: Transfer, cell: Cell, model: nn.Module, masks: Masks, optimizer: Any) -> Any:
    """What changes the masks of a run, or None.

    Args:
        settings: Of the study.
        cell: Which run.
        model: Scaled.
        masks: Its masks.
        optimizer: Its optimizer.

    Returns:
        Something whose ``step(step)`` follows each optimizer step.
    """
    method = method_of(settings, cell.density)
    if method is None:
        return None
    from sparing.scaling.evolve import Evolution

    scale: Any = settings.scale if follows(settings, cell.rule) else "none"
    return Evolution(model, masks, optimizer, method, steps=settings.steps, seed=cell.seed, scale=scale)


def descend_(
    settings: Transfer,
    material: Material,
    cell: Cell,
    model: nn.Module,
    optimizer: Steps,
    evolution: Any,
    alive: Callable[[], object],
) -> list[float]:
    """All steps of a run, or those until the loss is no number.

    Args:
        settings: Of the study.
        material: What is learnt from.
        cell: Which run.
        model: Changed.
        optimizer: Changed.
        evolution: Of the masks, or None.
        alive: Called after every step.

    Returns:
        The loss of each step (nat).
    """
    draws = material.draws(settings.steps, settings.batch, cell.seed)
    losses: list[float] = []
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(settings.steps):
        share = factor(step, settings)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        loss = material.loss(model, draws[step])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        if evolution is not None:
            evolution.step(step)
        alive()
    return losses


def summary(losses: list[float], held_out: float, steps: int) -> dict[str, Any]:
    """What is kept of a run's losses.

    Args:
        losses: Of each step taken (nat).
        held_out: Loss at the end (nat).
        steps: That were asked for (count).

    Returns:
        loss, held_out_loss, start, diverged and steps; a loss that is no finite number is None.

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
