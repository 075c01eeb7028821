"""A way to fine-tune as the work of one rank: buckets, activations, arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sparing.errors import UserError
from sparing.jobs.lm import formula
from sparing.jobs.lm.meta import Source
from sparing.jobs.plan.candidates import Candidate
from sparing.jobs.plan.price import Price
from sparing.jobs.plan.settings import Settings
from sparing.layersample.price.activations import Work
from sparing.layersample.price.flops import flops
from sparing.layersample.price.shape import Shape
from sparing.sharding.lowbit.config import LowBit
from sparing.sharding.planner.config import BucketSpec, Workload

ITEM: Final = {"bfloat16": 2, "float32": 4}  # bytes of a number

MOMENTS, MASTER = 8, 4  # bytes of AdamW's two float32 moments, and of a float32 master where parameters are shorter


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A block of the model, as far as buckets need to know."""

    role: str  # ``"embed"``, ``"body"``, ``"tail"`` or ``"head"``
    trainable: int  # parameters that train, adapters included (count)
    frozen: int  # parameters that do not (count)


def workload(source: Source, settings: Settings, candidate: Candidate, prices: Mapping[Candidate, Price]) -> Workload:
    """Describe one way to fine-tune to the planner of shards; with times if ``settings.tflops`` is given."""
    parts = parts_of(source, settings, candidate)
    item, grad = ITEM[settings.dtype], ITEM[settings.gradients]
    # At the end of the forward pass; of the two prices of a method the smaller is with checkpointing.
    both = (price.bytes for way, price in prices.items() if way.label == candidate.label)
    found = sorted(held.phases["forward"].activations for held in both if held is not None)
    return Workload.of(
        tuple(_specs(parts, candidate.share)), accumulate=settings.accumulate, param_bytes=item,
        grad_bytes=max(item, grad), wire_bytes=max(item, grad), state_bytes=MOMENTS + (MASTER if item < MASTER else 0),
        activation_bytes=found[-1], boundary_bytes=found[0], checkpointing=candidate.checkpointing,
        slow=LowBit(bits=settings.slow_bits) if settings.slow_bits else None, engine=settings.runs_on,
        **_seconds(source, settings, candidate),
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


def parts_of(source: Source, settings: Settings, candidate: Candidate) -> list[Part]:
    """The blocks of the model in forward order, and what of each trains."""
    shape = formula.shape_of(source.config)
    if shape is not None:
        return _from_shape(shape, candidate, settings.params)
    model = source.build(candidate.step)
    names = source.trained(model, candidate.step.method)
    found = []
    for block in source.parts(model)[0]:
        trained = sum(p.numel() for name, p in block.params.items() if name in names)
        whole = sum(p.numel() for p in block.params.values())
        found.append(Part(role=block.role, trainable=trained, frozen=whole - trained))
    return found


def _from_shape(shape: Shape, candidate: Candidate, params: float | None) -> list[Part]:
    trained = formula.trained(shape, candidate.method)
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


def _seconds(source: Source, settings: Settings, candidate: Candidate) -> dict[str, float]:
    """Seconds of the passes; none without the speed of a device."""
    if settings.tflops is None:
        return {}
    shape = formula.shape_of(source.config)
    if shape is None:
        why = "its passes have no formula that parts forward from backward"
        raise UserError("tflops", got=source.config.model_type, why=why, do="omit --tflops: only the links are timed")
    work = Work(batch=settings.batch, length=settings.length, dtype=candidate.step.torch_dtype)
    spent = flops(shape, work, formula.trained(shape, candidate.method))
    rate = settings.tflops * 1e12
    return {"seconds_forward": spent.forward / rate, "seconds_backward": (spent.inputs + spent.weights) / rate}
