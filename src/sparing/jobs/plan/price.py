"""The ways to fine-tune that a plan compares, and the price of each: by closed formula, or run on fake tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from sparing.blocks import named_parameters, tied
from sparing.errors import UserError
from sparing.jobs.interrupts import stop_if_pressed
from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.jobs.lm.losses import loss_of
from sparing.jobs.lm.models import config_of
from sparing.jobs.lm.optimizer import FORM, adamw_with_masters, reason
from sparing.jobs.plan.settings import Settings, share_of
from sparing.layersample import LayerSampling
from sparing.layersample.parts import parts_of
from sparing.layersample.price.activations import LoRA
from sparing.layersample.price.predict import Full, Method, predict
from sparing.layersample.price.shape import Shape
from sparing.memory import Profile
from sparing.memory import predict as predict_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to fine-tune."""

    label: str
    method: Method
    checkpointing: bool  # whether blocks recompute their activations
    share: float = 1.0  # share of every block that trains, of what the method trains; on a cluster only

    @property
    def name(self) -> str:
        """Label, and checkpointing if there is."""
        return self.label + (", checkpointing" if self.checkpointing else "")


def candidates(settings: Settings, *, layers: int, tied: bool) -> Iterator[Candidate]:
    """Every way to compare, full fine-tuning first, each without and with activation checkpointing.

    ``tied``: head and embedding share weights, so they freeze together.
    """
    for label, method, share in _methods(settings, layers, tied):
        for checkpointing in (False, True):
            yield Candidate(label=label, method=method, checkpointing=checkpointing, share=share)


def _methods(settings: Settings, layers: int, tied: bool) -> Iterator[tuple[str, Method, float]]:
    if settings.trainable is not None:
        yield f"{settings.trainable} of each block", Full(), share_of(settings.trainable)
        return
    yield "full", Full(), 1.0
    frozen = "embedding and head frozen" if tied else "embedding frozen"
    for active in settings.lisa.active:
        if active > layers:
            continue
        for embed in (True, False):
            label = f"LISA, {active} blocks" + ("" if embed else f", {frozen}")
            yield (
                label,
                LayerSampling(
                    active=active,
                    period=settings.lisa.period,
                    masters=settings.lisa.masters,
                    embed=embed,
                    head=embed or not tied,
                ),
                1.0,
            )
    for rank in settings.lora.ranks:
        # peft keeps adapters of a 16-bit model in float32
        adapters = LoRA(rank=rank, float_adapters=settings.dtype != "float32")
        yield f"LoRA, rank {rank}", adapters, 1.0


# Blocks, width and inner width of LLaMA-like models: two small ones, TinyLlama, OpenLLaMA-3B, LLaMA-7B to 65B, and one
# of Llama-3.1-405B's blocks and width.
LADDER: Final = (
    (12, 768, 2048), (24, 1024, 2736), (22, 2048, 5632), (26, 3200, 8640), (32, 4096, 11008), (40, 5120, 13824),
    (60, 6656, 17920), (80, 8192, 22016), (126, 16384, 43690),
)  # fmt: skip

VOCABULARY: Final = 32000  # rows of their embeddings (count)


def shape_like(params: float) -> Shape:
    """The shape of a model of so many parameters: the nearest of ``LADDER``, its feed-forward width adjusted.

    Example:
        >>> shape = shape_like(65e9)
        >>> shape.layers, shape.width
        (80, 8192)
    """
    rungs = [
        Shape(layers=layers, width=width, ffn=ffn, heads=max(width // 128, 1), kv_heads=max(width // 128, 1),
              head_dim=128, vocab=VOCABULARY)
        for layers, width, ffn in LADDER
    ]  # fmt: skip
    # Depth and width of a real model; what is missing goes into the feed-forward part, three matrices a block.
    near = min(rungs, key=lambda rung: abs(math.log(rung.total / params)))
    missing = (params - near.total) / (3 * near.layers * near.width)
    return dataclasses.replace(near, ffn=max(round(near.ffn + missing), 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a candidate costs."""

    bytes: Profile | None = None  # composition at the peak of a step; None if it was refused or could not be predicted
    trainable: int | None = None  # parameters that train at once (count)
    # Operations of full fine-tuning without checkpointing over these; None where only the ledger has run.
    speed: float | None = None
    coverage: float | None = None  # expected share of blocks that ever train
    advice: tuple[str, ...] = ()  # what one should know before starting
    why: str = ""  # why there are no bytes, in a clause


_OTHER: Final = "pass the directory of a causal language model; sparing.memory.predict prices a step of any model"


Pricer = Callable[[Any, Settings, Candidate], Price]  # configuration, settings and candidate -> price


def read_config(settings: Settings) -> Any:
    """The transformers configuration of the language model, or a shape for one known by its size alone."""
    if settings.place is None:
        return shape_like(settings.params or 0)
    config = config_of(settings.place)
    if getattr(config, "is_encoder_decoder", False):
        why = "it has an encoder beside its decoder, and what is planned for are causal language models"
        raise UserError("model", got=config.model_type, why=why, do=_OTHER)
    return config.get_text_config()


def has_dropout(config: Any) -> bool:
    """Whether a model uses dropout in training (classifier apart): no formula here counts its masks."""
    rates = (
        {name: value for name, value in vars(config).items() if "drop" in name} if hasattr(config, "__dict__") else {}
    )
    return any(
        isinstance(rate, int | float) and rate > 0 and not name.startswith(("summary", "classifier"))
        for name, rate in rates.items()
    )


def shape_of(config: Any) -> Shape:
    """The sizes of a model of a known family."""
    return config if isinstance(config, Shape) else Shape.from_config(config)


def try_price(pricer: Pricer, config: Any, settings: Settings, candidate: Candidate) -> Price:
    """Price a candidate; one that cannot be priced says why, and never stops the others."""
    try:
        return pricer(config, settings, candidate)
    except Exception as error:  # noqa: BLE001 - any model may raise anything
        stop_if_pressed(error)
        return Price(why=reason(error))


def by_formula(config: Any, settings: Settings, candidate: Candidate) -> Price:
    """Price a candidate of a known family from its shapes, for the draw that costs most; instant."""
    shape = shape_of(config)
    if refused := _too_wide(candidate, shape.linears):
        return Price(why=refused)
    # A sliding window shorter than the row needs a mask, as rows of several documents do.
    windowed = settings.length > (getattr(config, "sliding_window", None) or math.inf)
    asked = partial(
        predict, shape, batch=settings.batch, length=settings.length, dtype=getattr(torch, settings.dtype),
        attention=settings.attention, padded=settings.packing or windowed, device=settings.device, optimizer=FORM,
        accumulate=settings.accumulate,
    )  # fmt: skip
    made, full = asked(candidate.method, steps=settings.steps, checkpointing=candidate.checkpointing), asked(Full())
    return Price(
        bytes=made.bytes, trainable=made.trainable, speed=full.flops / made.flops, coverage=made.coverage,
        advice=made.advice,
    )  # fmt: skip


def by_ledger(config: Any, settings: Settings, candidate: Candidate) -> Price:
    """Price a candidate of any architecture by running two of its steps on fake tensors."""
    model, names = on_meta(config, settings, candidate)
    adapted = (module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "in_features"))
    if refused := _too_wide(candidate, [(int(m.in_features), int(m.out_features)) for m in adapted]):  # type: ignore[arg-type]
        return Price(why=refused)
    # Positions that all are 0 begin a document with each token: rows of several documents, as training packs them.
    entries = ("ids", "labels", "positions") if settings.packing else ("ids", "labels")
    batch = dict.fromkeys(entries, ((settings.batch, settings.length), torch.int64))
    profile = predict_bytes(
        model, batch, partial(adamw_with_masters, masters=getattr(candidate.method, "masters", False)), trainable=names,
        loss=lambda model, batch: loss_of(model, **batch), checkpointing=candidate.checkpointing,
        # the second micro-batch finds gradients to add to, and a third finds the same
        accumulate=min(settings.accumulate, 2), device=settings.device,
    )  # fmt: skip
    count = sum(p.numel() for name, p in named_parameters(model).items() if name in names)
    return Price(bytes=profile, trainable=count)


def _too_wide(candidate: Candidate, layers: Iterable[tuple[int, int]]) -> str:
    """Why adapters of this rank are refused; nothing if they are not."""
    if not isinstance(candidate.method, LoRA):
        return ""
    # A gate of one number has no rank to reduce, and its adapter weighs nothing.
    least = min((ends for ends in layers if min(ends) > 1), key=min, default=None)
    if least is None or candidate.method.rank <= min(least):
        return ""
    return (
        f"refused: rank {candidate.method.rank} is above {min(least)}, the smaller side of a layer of {least[0]} × "
        f"{least[1]}, whose adapter would be larger than the layer; pass --lora.ranks {min(least)} or less"
    )


def sizes(config: Any, attention: str) -> tuple[int, bool, int]:
    """Body blocks (count), whether the head is tied, and parameters (count), of any architecture."""
    model = _bare(config, torch.float32, attention)
    body = sum(block.role == "body" for block in parts_of(model)[0])
    return body, bool(tied(model)), sum(p.numel() for p in model.parameters())


def on_meta(config: Any, settings: Settings, candidate: Candidate) -> tuple[nn.Module, set[str]]:
    """The model without data, adapters included, and names of what trains with the lowest blocks active."""
    model = _bare(config, getattr(torch, settings.dtype), settings.attention)
    if isinstance(candidate.method, LoRA):
        with torch.device("meta"):
            model = with_adapters_(model, Lora(rank=candidate.method.rank), seed=0)
    return model, _trained(model, candidate)


def _bare(config: Any, dtype: torch.dtype, attention: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            made: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except Exception as error:  # noqa: BLE001 - every family has errors of its own; the user needs one line
        why = f"it cannot be built as a causal language model ({str(error).splitlines()[0][:160]})"
        raise UserError("model", got=config.model_type, why=why, do=_OTHER) from None
    return made


def _trained(model: nn.Module, candidate: Candidate) -> set[str]:
    """Canonical names of what trains, with the lowest blocks active."""
    method = candidate.method
    if isinstance(method, Full):
        return set(named_parameters(model))
    if isinstance(method, LoRA):
        return {name for name, p in named_parameters(model).items() if p.requires_grad}
    blocks, frozen = parts_of(model)
    on = {
        name
        for block in blocks
        if (block.index < method.active if block.role == "body" else getattr(method, block.role))
        for name in block.params
    }
    return on - frozen
