"""A way to fine-tune as the work of one rank: buckets, activations, arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from sparing.blocks import find_blocks
from sparing.errors import UserError
from sparing.jobs.plan.price import Candidate, Price, on_meta, shape_of
from sparing.jobs.plan.settings import Settings
from sparing.layersample.price.activations import LoRA, Trained, Work
from sparing.layersample.price.flops import flops
from sparing.layersample.price.predict import Full
from sparing.layersample.price.shape import Shape
from sparing.sharding.planner.config import BucketSpec, Workload

ITEM: Final = {"bfloat16": 2, "float32": 4}  # bytes of a number

MOMENTS, MASTER = 8, 4  # bytes of AdamW's two float32 moments, and of a float32 master where parameters are shorter


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A block of the model, as far as buckets need to know."""

    role: str  # ``"embed"``, ``"body"``, ``"tail"`` or ``"head"``
    trainable: int  # parameters that train, adapters included (count)
    frozen: int  # parameters that do not (count)


def workload(config: Any, settings: Settings, candidate: Candidate, prices: Mapping[Candidate, Price]) -> Workload:
    """Describe one way to fine-tune to the planner of shards; with times if ``settings.tflops`` is given."""
    parts = parts_of(config, settings, candidate)
    item, grad = ITEM[settings.dtype], ITEM[settings.gradients]
    # At the end of the forward pass; of the two prices of a method the smaller is with checkpointing.
    both = (price.bytes for way, price in prices.items() if way.label == candidate.label)
    found = sorted(held.phases["forward"].activations for held in both if held is not None)
    return Workload.of(
        tuple(_specs(parts, candidate.share)), accumulate=settings.accumulate, param_bytes=item,
        grad_bytes=max(item, grad), wire_bytes=max(item, grad), state_bytes=MOMENTS + (MASTER if item < MASTER else 0),
        activation_bytes=found[-1], boundary_bytes=found[0], checkpointing=candidate.checkpointing,
        **_seconds(config, settings, candidate),
    )  # fmt: skip


def _specs(parts: list[Part], share: float) -> Iterator[BucketSpec]:
    # The planner numbers blocks from 0; -1 is before the first, a number above all is after the last.
    body = -1
    for part in parts:
        body += part.role == "body"
        place = body if part.role == "body" else (-1 if part.role == "embed" else len(parts))
        trained = round(part.trainable * share)
        for count, learns in ((trained, True), (part.trainable - trained + part.frozen, False)):
            if count:
                yield BucketSpec(elements=count, trainable=learns, root=part.role != "body", block=place)


def parts_of(config: Any, settings: Settings, candidate: Candidate) -> list[Part]:
    """The blocks of the model in forward order, and what of each trains."""
    try:
        shape = shape_of(config)
    except UserError:
        pass
    else:
        return _from_shape(shape, candidate, settings.params)
    model, names = on_meta(config, settings, candidate)
    found = []
    for block in find_blocks(model):
        trained = sum(p.numel() for name, p in block.params.items() if name in names)
        whole = sum(p.numel() for p in block.params.values())
        found.append(Part(role=block.role, trainable=trained, frozen=whole - trained))
    return found


def _from_shape(shape: Shape, candidate: Candidate, params: float | None) -> list[Part]:
    trained = trained_of(shape, candidate)
    ends = shape.embed + shape.tail + shape.head
    rest, odd = divmod(int(params) - ends if params else shape.layers * shape.block, shape.layers)
    adapters = trained.lora.params(shape) // shape.layers if trained.lora else 0
    body = [
        Part(role="body", trainable=adapters + on * size, frozen=(1 - on) * size)
        for index in range(shape.layers)
        for on, size in [(int(index in trained.blocks), rest + (index < odd))]
    ]

    def end(role: str, size: int, on: bool) -> Part:
        return Part(role=role, trainable=size if on else 0, frozen=0 if on else size)

    return [
        end("embed", shape.embed, trained.embed), *body, end("tail", shape.tail, trained.tail),
        end("head", shape.head, trained.head),
    ]  # fmt: skip


def trained_of(shape: Shape, candidate: Candidate) -> Trained:
    """What trains in a model of a known family, with the lowest blocks active: the draw that costs most."""
    method = candidate.method
    if isinstance(method, Full):
        return Trained(blocks=frozenset(range(shape.layers)))
    if isinstance(method, LoRA):
        return Trained(embed=False, tail=False, head=False, lora=method)
    return Trained(embed=method.embed, blocks=frozenset(range(method.active)), tail=method.tail, head=method.head)


def _seconds(config: Any, settings: Settings, candidate: Candidate) -> dict[str, float]:
    """Seconds of the passes; none without the speed of a device."""
    if settings.tflops is None:
        return {}
    shape, dtype = shape_of(config), getattr(torch, settings.dtype)
    spent = flops(shape, Work(batch=settings.batch, length=settings.length, dtype=dtype), trained_of(shape, candidate))
    rate = settings.tflops * 1e12
    return {"seconds_forward": spent.forward / rate, "seconds_backward": (spent.inputs + spent.weights) / rate}
