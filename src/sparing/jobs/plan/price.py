"""The price of a candidate: by closed formula, or by running it on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sparing.blocks import find_blocks, named_parameters, tied
from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.jobs.lm.models import config_of
from sparing.jobs.plan.candidates import Candidate
from sparing.jobs.plan.ladder import shape_like
from sparing.jobs.plan.settings import Settings
from sparing.layersample import LayerSampling
from sparing.layersample.activations import LoRA
from sparing.layersample.masters import Masters
from sparing.layersample.predict import Full, predict
from sparing.layersample.shape import Shape
from sparing.memory import Profile
from sparing.memory import predict as predict_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a candidate costs."""

    bytes: Profile
    """Composition at the peak of a step."""
    trainable: int
    """Parameters that train at once (count)."""
    speed: float | None
    """Operations of full fine-tuning without checkpointing over these; None where only the ledger has run."""
    coverage: float | None
    """Expected share of blocks that ever train."""
    advice: tuple[str, ...] = ()
    """What one should know before starting."""


def read_config(settings: Settings) -> Any:
    """The model's configuration.

    Args:
        settings: Where it is, or how large the model is.

    Returns:
        The transformers configuration of the language model, or a shape for one that is known by its size alone.

    Raises:
        UserError: If there is none, or it is broken or quantised.
    """
    if settings.place is None:
        return shape_like(settings.params or 0)
    return config_of(settings.place).get_text_config()


def shape_of(config: Any) -> Shape:
    """The sizes of a model of a known family.

    Args:
        config: What ``read_config`` gave.

    Returns:
        The shape.

    Raises:
        UserError: If the family's formulas are not known.
    """
    return config if isinstance(config, Shape) else Shape.from_config(config)


def by_formula(config: Any, settings: Settings, candidate: Candidate) -> Price:
    """Price a candidate of a known family from its shapes; instant.

    Args:
        config: The model's configuration.
        settings: Batch, length and the rest.
        candidate: What to price.

    Returns:
        The price, for the draw that costs most.

    Raises:
        UserError: If the family's formulas are not known.
    """
    shape = shape_of(config)
    asked = partial(
        predict, shape, batch=settings.batch, length=settings.length, dtype=getattr(torch, settings.dtype),
        attention=settings.attention, device=settings.device,
    )  # fmt: skip
    made, full = asked(candidate.method, steps=settings.steps, checkpointing=candidate.checkpointing), asked(Full())
    return Price(
        bytes=made.bytes, trainable=made.trainable, speed=full.flops / made.flops, coverage=made.coverage,
        advice=made.advice,
    )  # fmt: skip


def by_ledger(config: Any, settings: Settings, candidate: Candidate) -> Price:
    """Price a candidate of any architecture by running two of its steps on fake tensors.

    Args:
        config: The model's configuration.
        settings: Batch, length and the rest.
        candidate: What to price.

    Returns:
        The price, with the lowest blocks active: the draw that costs most.
    """
    model, names = on_meta(config, settings, candidate)
    batch = dict.fromkeys(("input_ids", "labels"), ((settings.batch, settings.length), torch.int64))
    profile = predict_bytes(
        model, batch, partial(_adamw, masters=getattr(candidate.method, "masters", False)), trainable=names,
        checkpointing=candidate.checkpointing, device=settings.device,
    )  # fmt: skip
    count = sum(p.numel() for name, p in named_parameters(model).items() if name in names)
    return Price(bytes=profile, trainable=count, speed=None, coverage=None)


def sizes(config: Any) -> tuple[int, bool]:
    """Number of body blocks, and whether the head is tied, of any architecture.

    Args:
        config: The model's configuration.

    Returns:
        The count and the flag.
    """
    model = _bare(config, torch.float32, "sdpa")
    return sum(block.role == "body" for block in find_blocks(model)), bool(tied(model))


def on_meta(config: Any, settings: Settings, candidate: Candidate) -> tuple[nn.Module, set[str]]:
    """The model without data, and what trains.

    Args:
        config: The model's configuration.
        settings: Type and attention.
        candidate: What to build for; its adapters are there.

    Returns:
        The model, and canonical names of what trains with the lowest blocks active: the draw that costs most.
    """
    model = _on_meta(config, settings, candidate)
    return model, _trained(model, candidate)


def _bare(config: Any, dtype: torch.dtype, attention: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        made: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return made


def _on_meta(config: Any, settings: Settings, candidate: Candidate) -> nn.Module:
    """The model without data, with adapters where the candidate has them."""
    model = _bare(config, getattr(torch, settings.dtype), settings.attention)
    if not isinstance(candidate.method, LoRA):
        return model
    with torch.device("meta"):
        return with_adapters_(model, Lora(rank=candidate.method.rank), seed=0)


def _trained(model: nn.Module, candidate: Candidate) -> set[str]:
    """Canonical names of what trains, with the lowest blocks active."""
    method = candidate.method
    if isinstance(method, Full):
        return set(named_parameters(model))
    if isinstance(method, LoRA):
        return {name for name, p in named_parameters(model).items() if p.requires_grad}
    return {name for block in find_blocks(model) if _is_on(block.role, block.index, method) for name in block.params}


def _is_on(role: str, index: int, method: LayerSampling) -> bool:
    return index < method.active if role == "body" else bool(getattr(method, role))


def _adamw(parameters: list[nn.Parameter], *, masters: bool) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(parameters)
    if masters:
        Masters(made, {p: str(index) for index, p in enumerate(parameters)})
    return made
