"""What a candidate costs: bytes and operations of its step, seconds on a card, and the longest row that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sparing.jobs.interrupts import stop_if_pressed
from sparing.jobs.lm import formula
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.cuts import shallow
from sparing.jobs.lm.lowrank import Projected
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.optimizer import reason
from sparing.jobs.lm.prices import Price as Made
from sparing.jobs.lm.prices import lowest, peak_by_length, price, trains
from sparing.jobs.lm.step import FitStep, tokens_at_once
from sparing.jobs.plan.candidates import Candidate
from sparing.jobs.plan.settings import Settings
from sparing.layersample import LayerSampling
from sparing.layersample.price.coverage import coverage
from sparing.memory import Profile

ROW = 64  # lengths of rows are planned in steps of so many tokens
PARTS = 16  # most parts of a loss of the row that is tried first (count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a candidate costs."""

    bytes: Profile | None = None  # composition at the peak of a step; None if it was refused or could not be predicted
    host: int = 0  # optimizer state, and exact copies of quantised weights, in host memory (bytes)
    trainable: int | None = None  # parameters that train at once (count)
    flops: int | None = None  # operations of a step
    seconds: float | None = None  # of a step, where the speed of a card is known
    coverage: float | None = None  # expected share of blocks that ever train
    longest: int | None = None  # longest row that fits (tokens)
    advice: tuple[str, ...] = ()  # what one should know before starting
    why: str = ""  # why there are no bytes, in a clause


def try_price(source: Source, settings: Settings, candidate: Candidate) -> Price:
    """Price a candidate; one that cannot be priced says why, and never stops the others."""
    try:
        return price_of(source, settings, candidate)
    except Exception as error:  # noqa: BLE001 - any model may raise anything
        stop_if_pressed(error)
        return Price(why=reason(error))


def price_of(source: Source, settings: Settings, candidate: Candidate) -> Price:
    """Price a candidate for the draw of blocks that costs most, or on a cluster, where ranks share it, the lowest."""
    step, method = candidate.step, candidate.step.method
    if refused := _refused(source, step):
        return Price(why=refused)
    priced = step if settings.cluster is None else lowest(step)
    made = price(source, priced, device=settings.device, whole=settings.ledger)
    reached: float | None = None
    advice: tuple[str, ...] = ()
    if isinstance(method, LayerSampling):
        reached = coverage(method.sampler, source.layers, method.active, math.ceil(settings.steps / method.period))
        advice = tuple(_missed(source.layers, reached, settings))
    return Price(
        bytes=made.bytes, host=made.host, trainable=made.trainable, flops=made.flops, coverage=reached, advice=advice,
        seconds=_seconds(made, settings), longest=_longest(source, settings, step, made),
    )  # fmt: skip


def _seconds(made: Made, settings: Settings) -> float | None:
    """Of arithmetic, of the optimizer's step, and of state that visits the device; None where a speed is missing."""
    if settings.rate is None or (made.visits and settings.bus is None):
        return None
    bus = 2 * made.visits / settings.bus if settings.bus else 0.0
    return made.flops / settings.rate + made.moved / settings.moves + bus


def _missed(layers: int, reached: float, settings: Settings) -> Iterator[str]:
    missed = layers * (1.0 - reached)
    if missed >= 0.5:
        cure = "--lisa.sampler reshuffle reaches each of them sooner"
        yield f"{missed:.0f} of {layers} blocks are expected never to train within {settings.steps} steps; {cure}"


def _refused(source: Source, step: FitStep) -> str:
    """Why `finetune` would refuse this step; nothing if it would not."""
    method, optimizer = step.method, step.optimizer
    if isinstance(method, LayerSampling) and method.active > source.layers:
        return f"refused: the model has {source.layers} blocks"
    if isinstance(optimizer, Projected) and not any(map(optimizer.projects, trains(source, step).shapes)):
        return f"refused: no matrix is wider than the rank {optimizer.rank} on both sides"
    return _too_wide(source, step)


def _too_wide(source: Source, step: FitStep) -> str:
    """Why adapters of this rank are refused; nothing if they are not."""
    if not isinstance(step.method, Lora):
        return ""
    rank, ends = step.method.rank, _adapted(source, step)
    # A gate of one number has no rank to reduce, and its adapter weighs nothing.
    least = min((pair for pair in ends if min(pair) > 1), key=min, default=None)
    if least is None or rank <= min(least):
        return ""
    return (
        f"refused: rank {rank} is above {min(least)}, the smaller side of a layer of {least[0]} × {least[1]}, whose "
        f"adapter would be larger than the layer; pass --lora.ranks {min(least)} or less"
    )


def _adapted(source: Source, step: FitStep) -> Iterable[tuple[int, int]]:
    """Both sides of every layer that gets an adapter."""
    shape = formula.shape_of(source.config)
    if shape is not None:
        return shape.linears
    # frozen weights have the same sides in any form, and all kinds of block are in the shortest model
    model = source.build(replace(step, weights=None), shallow(source))
    adapted = (module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "in_features"))
    return [(int(module.in_features), int(module.out_features)) for module in adapted]  # type: ignore[arg-type]


def _longest(source: Source, settings: Settings, step: FitStep, made: Made) -> int | None:
    """The longest row that fits with checkpointing (tokens), in steps of ``ROW``; None where it is not looked for."""
    if not source.causal or settings.ledger or not step.checkpointing:
        return None
    limit, held = settings.limit, made.bytes.phases["backward"].total  # beside the activations, whatever the length
    if held > limit:
        return 0
    top = source.positions // ROW * ROW
    at_once = tokens_at_once(source.vocabulary, step.loss_tokens)
    # The longest of all is tried first, which takes one length instead of three, unless it is hopeless, for bytes grow
    # at least half as fast as the row, or its loss has many parts, each of which is traced.
    few = not at_once or top * step.batch <= PARTS * at_once
    hoped = few and top > step.length and held + (made.bytes.total - held) * top / (2 * step.length) <= limit
    if hoped and price(source, replace(step, length=top), device=settings.device).bytes.total <= limit:
        return top
    peak = peak_by_length(source, step, device=settings.device)
    low, high = 0, source.positions // ROW + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle * ROW) <= limit else (low, middle)
    return max(low * ROW, step.length if made.bytes.total <= limit else 0)
