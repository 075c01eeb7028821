"""One run of a study: a small model with the numbers of its seed, under one rule, one rate, one mask, to its loss."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparing.errors import UserError
from sparing.jobs.lm.controls import remove_body_
from sparing.jobs.schedule import rate
from sparing.jobs.settings import RuleName
from sparing.jobs.transfer.inputs import Digits, Inputs, Tokens, gather
from sparing.jobs.transfer.settings import HEAD, Cell, Draw, MasksName, Transfer
from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import GMP, SET, Method, RigL
from sparing.scaling.masks.laws import Bernoulli, ConstantFanIn, ExactCount, Law
from sparing.scaling.masks.mask_set import Masks
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SP, InitOnly, MuP, RateOnly, Rule, SuPar
from sparing.scaling.sparse.backends import convert_
from sparing.seeds import number

BETAS, MOMENTUM = (0.9, 0.95), 0.9
CALIBRATED_AT, CALIBRATED_FOR = -9.0, 20
"""log2 rate and steps (count) of the run that measures what the spectral rule refers to."""

MARGIN = 0.05  # a run whose loss ends this much above where it started has diverged (nat)

LAWS: Mapping[MasksName, Law] = {
    "fan-in": ConstantFanIn(),
    "balanced": ConstantFanIn(balanced=True),
    "bernoulli": Bernoulli(),
    "exact": ExactCount(),
}

KINDS: Mapping[str, Literal["adam", "sgd"]] = {"adamw": "adam", "sgd": "sgd"}  # what the rules tell apart


class Net(nn.Module):
    """ReLU net with square hidden layers; weights N(0, 2/fan-in), as He et al. 2015 (arXiv:1502.01852)."""

    def __init__(self, inputs: int, width: int, outputs: int, *, layers: int) -> None:
        """Draw it from torch's global generator; ``layers`` are the square ones."""
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, outputs)
        for linear in (self.embed, *self.hidden, self.head):
            assert isinstance(linear, nn.Linear)
            nn.init.normal_(linear.weight, std=(2 / linear.in_features) ** 0.5)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (N, outputs)."""
        for layer in (self.embed, *self.hidden):
            x = layer(x).relu_()
        return self.head(x)  # type: ignore[no-any-return]


def build(settings: Transfer, inputs: int, outputs: int, *, width: int, seed: int) -> nn.Module:
    """A freshly initialized model, the same whatever the density and rule; torch's global generator is as before."""
    # models of Hugging Face draw from the global generator, which callers must find as it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number(seed, "transfer", "weights", width))
        if settings.family == "mlp":
            return Net(inputs, width, outputs, layers=settings.layers)
        return _language_model(settings, width, outputs)


def _language_model(settings: Transfer, width: int, vocabulary: int) -> nn.Module:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
    except ImportError:
        do = "run: pip install 'sparing[lm]'; or pass --family mlp"
        raise UserError("family", got=settings.family, why="transformers is not installed", do=do) from None
    heads = width // HEAD
    # the ids that transformers sets by default lie outside a vocabulary of characters
    both: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    if settings.family == "gpt2":
        drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        size = {"n_embd": width, "n_layer": settings.layers, "n_head": heads, "n_positions": settings.length}
        return GPT2LMHeadModel(GPT2Config(**size, **drop, **both))  # type: ignore[no-any-return]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=settings.layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads, max_position_embeddings=settings.length,
        tie_word_embeddings=False, **both,
    )  # fmt: skip
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]


def rule_of(settings: Transfer, name: RuleName, draw: Draw | None = None) -> Rule:
    """The rule of a name, with the study's law of weight decay and the multipliers of a draw."""
    draw = draw or Draw()
    both = {"input": 2.0**draw.log2_input, "output": 2.0**draw.log2_output}
    if name == "sp":
        return SP(**both)
    kinds = {"mup": MuP, "supar": SuPar, "init-only": InitOnly, "rate-only": RateOnly}
    return kinds[name](decay=settings.decay, **both)


def given(settings: Transfer) -> Draw:
    """What a study without draws goes by."""
    return Draw(log2_rate=settings.log2_rates[0] if settings.axis == "std" else 0.0)


def factor(step: int, settings: Transfer) -> float:
    """Share of the peak rate at a step: a linear rise, then a straight line down to ``final``."""
    warmup = round(settings.warmup_share * settings.steps)
    share = rate(step, peak=1.0, steps=settings.steps, warmup=warmup, schedule="linear")
    return share if step < warmup else settings.final_share + (1 - settings.final_share) * share


def train(
    settings: Transfer,
    inputs: Inputs,
    cell: Cell,
    draw: Draw | None = None,
    *,
    bare: bool = False,
    after_step: Callable[[], object] = bool,
) -> dict[str, Any]:
    """One run to its row: losses in nat, None where not finite; CPU seconds. ``bare`` leaves out all blocks."""
    begin, draw = time.process_time(), draw or given(settings)
    model, masks = prepare(settings, inputs, cell, draw)
    optimizer = optimizer_of(settings, model, masks, cell, draw)
    evolution = evolution_of(settings, cell, model, masks, optimizer)
    if bare:
        masks.verify()  # while all weights are there to look at
        remove_body_(model)
    elif settings.backend != "dense" and masks:
        tokens = settings.batch * (settings.length if isinstance(inputs, Tokens) else 1)
        convert_(model, masks, backend=settings.backend, optimizer=optimizer, tokens=tokens)
    losses = train_steps_(settings, inputs, cell, model, optimizer, evolution, after_step)
    with torch.no_grad():
        held_out = float(inputs.held_out_loss(model.eval()))
    counts = [(int(mask.sum()), mask.numel()) for mask in masks.values()]
    # of all hidden weights; 1 where nothing is masked
    live = sum(live for live, _ in counts) / sum(total for _, total in counts) if counts else 1.0
    return summary(losses, held_out, settings.steps) | {"live": live, "seconds": time.process_time() - begin}


def prepare(settings: Transfer, inputs: Inputs, cell: Cell, draw: Draw | None = None) -> tuple[nn.Module, Masks]:
    """A model with its masks, scaled by the rule of a cell, with the initial scale and multipliers of a draw."""
    draw = draw or given(settings)
    features = inputs.features if isinstance(inputs, Digits) else 0
    make = partial(build, settings, features, inputs.outputs, seed=cell.seed)
    model = make(width=cell.width)
    # gradual pruning starts dense and moves toward the density
    dense = settings.dynamic == "gmp"
    planned = plan(
        model,
        base=make(width=settings.base_width),
        density=1.0 if dense else cell.density,
        rule=rule_of(settings, cell.rule, draw),
        optimizer=KINDS[settings.optimizer],
        least_fan_in=1,
    )
    swept = cell.x if settings.axis == "std" else 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            entry = planned.entries.get(name)  # a tied weight has one, under its first name
            if entry is not None and entry.role in {"hidden", "embedding", "output"} and parameter.ndim > 1:
                parameter.mul_(2.0 ** (draw.log2_std + (swept if entry.role == "hidden" else 0.0)))
    return model, apply_(model, planned, seed=cell.seed, masks=LAWS[settings.masks])


def optimizer_of(settings: Transfer, model: nn.Module, masks: Masks, cell: Cell, draw: Draw | None = None) -> Any:
    """The optimizer of a run; peak rates stand in the groups of its plan."""
    draw = draw or given(settings)
    lr = 2.0 ** (draw.log2_rate + (cell.x if settings.axis == "lr" else 0.0))
    groups = masks.plan.groups(model, lr=lr, weight_decay=settings.weight_decay)
    plain: torch.optim.Optimizer
    if settings.optimizer == "sgd":
        plain = torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM)
    else:
        plain = torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)
    if settings.follow == "spectral" and cell.rule == "supar":
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
        settings, axis="lr", dynamic="none", follow="none", widths=(settings.base_width,), pairs=()
    )
    cell = Cell("supar", settings.base_width, 1.0, CALIBRATED_AT, settings.seeds[0])
    # the dense base under the plain optimizer: what the spectral rule calls one unit of rate
    model, masks = prepare(base, inputs, cell)
    optimizer = Spectral(optimizer_of(base, model, masks, cell), model, masks.plan, masks, reference=None)
    norms: list[float] = []
    short = dataclasses.replace(base, steps=max(10, CALIBRATED_FOR))
    train_steps_(short, inputs, cell, model, optimizer, None, lambda: norms.extend(optimizer.norms().values()))
    return statistics.median(norms)


def evolution_of(settings: Transfer, cell: Cell, model: nn.Module, masks: Masks, optimizer: Any) -> Any:
    """What changes the masks of a run: its ``step(step)`` follows each optimizer step; or None."""
    if settings.dynamic == "none" or cell.density == 1:
        return None
    from sparing.scaling.masks.evolve import Evolution

    every = settings.mask_updates.every
    kinds: Mapping[str, Method] = {
        "rigl": RigL(every=every), "set": SET(every=every), "gmp": GMP(final=cell.density, every=every),
    }  # fmt: skip
    method, follows = kinds[settings.dynamic], cell.rule == "supar" and settings.follow in {"density", "energy"}
    scale: Any = settings.follow if follows else "none"
    return Evolution(model, masks, optimizer, method, steps=settings.steps, seed=cell.seed, scale=scale)


def train_steps_(
    settings: Transfer,
    inputs: Inputs,
    cell: Cell,
    model: nn.Module,
    optimizer: Any,
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
