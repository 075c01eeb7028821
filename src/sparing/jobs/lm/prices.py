"""The price of a step of fine-tuning: bytes by category and operations, of any architecture, from a few of its blocks.

Forward and backward pass run on fake tensors, on models cut to a few blocks, and what each further block adds is
added. Every stretch of the passes, such as the backward pass of the top block, holds a sum of what each block below
and above it holds, so its bytes are linear in the number of blocks, of those that train and of those that do not.
Models whose blocks differ run whole. The optimizer's state and step are formulas of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.jobs.lm import formula
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.meta import Source, Stack
from sparing.jobs.lm.optimizer import AdamW
from sparing.jobs.lm.step import FitStep, Method, tokens_at_once
from sparing.layersample import Bernoulli, Fixed, LayerSampling
from sparing.layersample.masters import HALVES
from sparing.layersample.price.activations import LoRA
from sparing.layersample.price.predict import Full
from sparing.memory import CATEGORIES, Bytes, Profile
from sparing.memory.passes import Passes, trace
from sparing.memory.sizes import Phase

Device = Literal["cpu", "cuda"]

_FLOAT: Final = 4  # bytes
TRAINED: Final = 2  # blocks that train in a cut model with layer sampling (count): the lowest, and one that is not
MOST: Final = 5  # blocks of each stack in the deepest cut model (count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a step costs."""

    bytes: Profile
    host: int  # optimizer state, and exact copies of quantised weights, in host memory (bytes)
    visits: int  # bytes of them that every step takes to the device and back
    trainable: int  # parameters that train at once (count)
    parameters: int  # all parameters, adapters included (count)
    flops: int  # operations of the whole step in matrix products and attention
    moved: int  # bytes that the optimizer's step reads and writes


def price(source: Source, step: FitStep, *, device: Device = "cuda", whole: bool = False) -> Price:
    """Price a step of the model that a configuration describes, for the draw of blocks that costs most.

    ``whole``: run every block, which takes as long as there are blocks, instead of adding what each adds or taking a
    formula where there is one.
    """
    _check_draws(step.method)
    return max((_price(source, draw, device, whole) for draw in _draws(source, step)), key=_total)


def _check_draws(method: Method) -> None:
    """Refuse draws that are no count of blocks."""
    if isinstance(method, LayerSampling):
        got = type(method.sampler).__name__ if method.units == "block" else f"units of a {method.units}"
        counted = method.units == "block" and not isinstance(method.sampler, Bernoulli)
        why, do = "draws differ in size, and a step is priced for one", "price a step with the units of one draw active"
        require(counted, "method", got, why, do)


def _price(source: Source, step: FitStep, device: Device, whole: bool) -> Price:
    if whole:
        passes = _passes(source, step, None, device)[0]
    else:
        passes = formula.passes_of(source.config, step) or _traced(source, step, device)
    return _at_rest(_priced(source, passes, step, device), source, step, device)


def _at_rest(found: Price, source: Source, step: FitStep, device: Device) -> Price:
    """Add what blocks that do not train hold: exact weights of rounded ones, and state that is kept or offloaded."""
    exact, (state, host) = source.exact(step), _kept(source, step)
    if device == "cuda":
        host, more = found.host + host + exact, Bytes(optimizer=state)
    else:
        # host memory is the device's own
        host, more = 0, Bytes(params=exact, optimizer=state + host)
    held = found.bytes
    phases = {name: phase + more for name, phase in held.phases.items()}
    held = dataclasses.replace(
        held, params=held.params + more.params, optimizer=held.optimizer + more.optimizer, phases=phases
    )
    return dataclasses.replace(found, bytes=held, host=host)


def _kept(source: Source, step: FitStep) -> tuple[int, int]:
    """State of blocks that trained before, on the device and in host memory (bytes): all others, after some draws."""
    method, optimizer = step.method, step.optimizer
    if not isinstance(method, LayerSampling) or method.state not in {"keep", "offload"}:
        return 0, 0
    drawn, copies = formula.drawn(method), _FLOAT if step.masters and step.torch_dtype in HALVES else 0
    wide = torch.float32 if copies else step.torch_dtype
    shapes = [shape for index, block in source.blocks.items() if index not in drawn for shape in block]
    state = sum(optimizer.state(shape, wide) + copies * math.prod(shape) for shape in shapes)
    host = sum(optimizer.host(shape, wide) for shape in shapes)
    return (state, host) if method.state == "keep" else (0, state + host)


def _total(price: Price) -> int:
    return price.bytes.total


def _draws(source: Source, step: FitStep) -> list[FitStep]:
    """The step; of a model whose blocks differ, with the lowest of them that train, and with the largest."""
    method = step.method
    sampled = isinstance(method, LayerSampling) and not isinstance(method.sampler, Fixed)
    if not sampled or formula.shape_of(source.config) is not None or _depth(source) is not None:
        return [step]
    assert isinstance(method, LayerSampling)
    sizes = {index: sum(map(math.prod, block)) for index, block in source.blocks.items()}
    largest = sorted(sizes, key=lambda index: (-sizes[index], index))[: method.active]
    draws = {tuple(sorted(draw)) for draw in (list(sizes)[: method.active], largest)}
    return [dataclasses.replace(step, method=dataclasses.replace(method, sampler=Fixed(blocks=d))) for d in draws]


def by_length(source: Source, step: FitStep, *, device: Device = "cuda") -> Callable[[int], Price]:
    """A price as a function of the length of rows (tokens); three traces serve all lengths.

    Bytes of every stretch are quadratic in the length, above the number of tokens whose logits are held at once and
    below it.
    """
    draws = [_by_length(source, draw, device) for draw in _draws(source, step)]
    return lambda length: max((at(length) for at in draws), key=_total)


def _by_length(source: Source, step: FitStep, device: Device) -> Callable[[int], Price]:
    bound = tokens_at_once(source.vocabulary, step.loss_tokens) // step.batch
    below, above = min(bound or source.positions, source.positions), max(step.length, bound + 1)
    nodes = {False: [max(below // 4, 2), max(below // 2, 3), max(below, 4)], True: [above, 2 * above, 4 * above]}
    traced: dict[bool, list[Passes]] = {}

    def at(length: int) -> Price:
        asked = dataclasses.replace(step, length=length)
        if (found := formula.passes_of(source.config, asked)) is not None:
            return _priced(source, found, asked, device)
        parted = length > bound > 0
        places = nodes[parted]
        if parted not in traced:
            steps = [dataclasses.replace(step, length=place) for place in places]
            traced[parted] = [formula.passes_of(source.config, s) or _traced(source, s, device) for s in steps]
        weights = [
            math.prod((length - other) / (place - other) for other in places if other != place) for place in places
        ]
        keyed = [(one.stretches, one.forward, one.backward, one.flops) for one in traced[parted]]
        found = _combine(keyed, weights)
        assert found is not None, "the stretches of a step do not change with the length of its rows"
        return _at_rest(_priced(source, found, asked, device), source, asked, device)

    return at


def _traced(source: Source, step: FitStep, device: Device) -> Passes:
    """Passes that ran, of a few blocks if the model's blocks are equal."""
    return _extended(source, step, device) or _passes(source, step, None, device)[0]


def _priced(source: Source, passes: Passes, step: FitStep, device: Device) -> Price:
    """Passes and the optimizer."""
    shape, method = formula.shape_of(source.config), formula.closed(step.method, step)
    if shape is None or method is None or step.weights:
        # what trains is not rounded
        model = source.build(dataclasses.replace(step, weights=None))
        return assemble_for(
            passes, model, source.trained(model, step.method), step, parameters=source.parameters, device=device
        )
    floats = isinstance(method, LoRA) and method.float_adapters
    adapters = method.params(shape) if isinstance(method, LoRA) else 0
    dtype = torch.float32 if floats else step.torch_dtype
    return assemble(
        passes, formula.shapes(shape, method), dtype, step, parameters=shape.total + adapters, device=device
    )


def trained_shapes(source: Source, step: FitStep) -> list[tuple[int, ...]]:
    """Shapes of what trains."""
    shape, method = formula.shape_of(source.config), formula.closed(step.method, step)
    if shape is not None and method is not None:
        return formula.shapes(shape, method)
    model = source.build(step)
    known = named_parameters(model)
    return [tuple(known[name].shape) for name in source.trained(model, step.method)]


def assemble_for(
    passes: Passes, model: nn.Module, names: Iterable[str], step: FitStep, *, parameters: int, device: Device
) -> Price:
    """``assemble``, for those of a model's parameters that train; ``parameters``: of the model without adapters."""
    known = named_parameters(model)
    shapes = [tuple(known[name].shape) for name in names]
    # adapters of a 16-bit model are float32: what trains together has one type
    dtype = max((known[name].dtype for name in names), key=lambda kind: kind.itemsize)
    adapters = sum(map(math.prod, shapes)) if isinstance(step.method, Lora) else 0
    return assemble(passes, shapes, dtype, step, parameters=parameters + adapters, device=device)


def assemble(
    passes: Passes,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    step: FitStep,
    *,
    parameters: int,
    device: Device,
) -> Price:
    """Add an optimizer's state, and its step, to two passes."""
    elements, optimizer = sum(map(math.prod, shapes)), step.optimizer
    copies = _FLOAT * elements if step.masters and dtype in HALVES else 0
    wide = torch.float32 if copies else dtype
    state = sum(optimizer.state(shape, wide) for shape in shapes) + optimizer.shared() + copies
    visits = sum(optimizer.host(shape, wide) for shape in shapes)
    if device == "cpu":
        # host memory is the device's own
        state, visits = state + visits, 0
    held = Bytes(optimizer=state)
    # masters step with gradients in float32
    updating = passes.backward + held + Bytes(transient=optimizer.step(shapes, wide) + copies)
    peak = max(passes.peak + held, updating, key=lambda found: found.total)
    forward, backward = passes.forward + held, passes.backward + held
    phases: dict[Phase, Bytes] = {"forward": forward, "backward": backward, "step": backward}
    return Price(
        bytes=Profile(**{name: getattr(peak, name) for name in CATEGORIES}, phases=phases),
        host=visits, visits=visits, trainable=elements, parameters=parameters,
        # weights, gradients and state are read, weights and state written
        flops=passes.flops * step.accumulate, moved=2 * state + 3 * elements * dtype.itemsize,
    )  # fmt: skip


def _passes(source: Source, step: FitStep, depth: int | None, device: Device) -> tuple[Passes, list[Stack]]:
    """The passes of a model with so many blocks in each stack, all of them if None, and its stacks."""
    key = (dataclasses.replace(step, optimizer=AdamW(), masters=False), depth, device)
    if key not in source.traced:
        model = source.build(step, depth)
        stacks = source.stacks(model)
        source.traced[key] = trace(
            model, source.batch(step), trainable=source.trained(model, step.method), loss=source.loss(model, step),
            checkpointing=step.checkpointing, accumulates=step.accumulates, device=device,
            marks=[name for stack in stacks for name in stack.names], entries=[stack.names[0] for stack in stacks],
        ), stacks  # fmt: skip
    found: tuple[Passes, list[Stack]] = source.traced[key]
    return found


def _extended(source: Source, step: FitStep, device: Device) -> Passes | None:
    """The passes of the whole model from those of models of a few blocks; None if it has too few, or unequal ones."""
    depth = _depth(source)
    if depth is None:
        return None
    several = len(source.stacks(source.bare)) > 1
    sampled = step.method if isinstance(step.method, LayerSampling) else None
    active = sampled.active if sampled else None
    if active is not None and active > depth:
        return None
    if sampled is not None and isinstance(sampled.sampler, Fixed):
        # stretches are known where the lowest blocks train
        return None

    def at(blocks: int, drawn: int | None) -> _Keyed:
        changed = step
        if sampled is not None and drawn is not None:
            changed = dataclasses.replace(step, method=dataclasses.replace(sampled, active=drawn))
        passes, stacks = _passes(source, changed, blocks, device)
        return _keyed(passes, stacks, drawn)

    # beside one that trains: blocks next to the ends, where sums over a whole stack begin
    least = 2 + (sampled is not None) + several
    few = active if active is None else min(active, TRAINED)
    points = [(least, few), (least + 1, few)] if active != depth else [(least, least), (least + 1, least + 1)]
    more = depth - least
    weights = [1 - more, more]
    if active is not None and TRAINED < active < depth:
        # a third model, in which one block more trains
        points.append((least + 1, TRAINED + 1))
        extra = active - TRAINED
        weights = [1 - more, more - extra, extra]
    return _combine([at(*point) for point in points], weights)


# stretches by what they mean; the ends of both passes; operations
_Keyed = tuple[Mapping[str, Bytes], Bytes, Bytes, int]


def _keyed(passes: Passes, stacks: list[Stack], active: int | None) -> _Keyed:
    """Name the stretches by what they mean in a model of any depth."""
    names = {"forward": "forward", "loss": "loss"}
    for index, stack in enumerate(stacks):
        ends = {"top": stack.names[-1], "bottom": stack.names[0], "into": f"into {stack.names[0]}"}
        if len(stacks) > 1:
            ends |= {"next to top": stack.names[-2], "next to bottom": stack.names[1]}
        names |= {f"{end} {index}": name for end, name in ends.items()}
    if active:
        names["last that trains"] = stacks[0].names[active - 1]
    if active is not None and active < len(stacks[0].names):
        names["first that does not"] = stacks[0].names[active]
    found = {key: passes.stretches[name] for key, name in names.items() if name in passes.stretches}
    return found, passes.forward, passes.backward, passes.flops


def _combine(keyed: Sequence[_Keyed], weights: Sequence[float]) -> Passes | None:
    """The same affine sum of everything; None if a stretch is missing in one."""
    if len({frozenset(stretches) for stretches, *_ in keyed}) > 1:
        return None

    def total(found: Iterable[Bytes]) -> Bytes:
        pairs = list(zip(weights, found, strict=True))
        return Bytes(**{name: round(sum(w * getattr(held, name) for w, held in pairs)) for name in CATEGORIES})

    return Passes(
        stretches={name: total(one[0][name] for one in keyed) for name in keyed[0][0]},
        forward=total(one[1] for one in keyed),
        backward=total(one[2] for one in keyed),
        flops=round(sum(w * one[3] for w, one in zip(weights, keyed, strict=True))),
    )


def _depth(source: Source) -> int | None:
    """Blocks of each stack, if all stacks have as many, of equal shapes, and more than a cut model has."""
    if "depth" not in source.traced:
        source.traced["depth"] = _measured_depth(source)
    found: int | None = source.traced["depth"]
    return found


def _measured_depth(source: Source) -> int | None:
    bare = FitStep(method=Full())
    whole = source.stacks(source.build(bare))
    lengths = {len(stack.names) for stack in whole}
    if len(lengths) != 1 or (depth := lengths.pop()) <= MOST:
        return None
    short = source.stacks(source.build(bare, MOST))
    # the first block of a stack may have more, such as T5's table of distances
    equal = all(len(set(stack.shapes[1:])) == 1 for stack in whole)
    same = len(short) == len(whole) and all(a.shapes == b.shapes[:MOST] for a, b in zip(short, whole, strict=True))
    return depth if equal and same else None
