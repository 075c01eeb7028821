"""The price of a step of fine-tuning: bytes by category and operations, of any architecture, from a few of its blocks.

Passes run on fake tensors, or come from a formula (``cuts``). The optimizer's state and step are formulas of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.jobs.lm import formula
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.cuts import Device, alike, depth_of, passes_by_length, passes_of, shallow, whole_passes
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.step import FitStep, Method
from sparing.layersample import Bernoulli, Fixed, LayerSampling
from sparing.layersample.masters import HALVES
from sparing.layersample.price.activations import LoRA
from sparing.memory import CATEGORIES, Bytes, Profile
from sparing.memory.passes import Passes
from sparing.memory.sizes import Phase

_FLOAT: Final = 4  # bytes


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What trains in a step."""

    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    parameters: int  # all parameters of the model, adapters included (count)

    def with_more(self, shapes: Sequence[tuple[int, ...]]) -> Trained:
        """With further adapters."""
        more = sum(map(math.prod, shapes))
        return dataclasses.replace(self, shapes=[*self.shapes, *shapes], parameters=self.parameters + more)


def price(source: Source, step: FitStep, *, device: Device = "cuda", whole: bool = False) -> Price:
    """Price a step of the model that a configuration describes.

    Of layer sampling: bytes of the draw that holds most, operations of the one that computes most. ``whole``: run
    every block, which takes as long as there are blocks, instead of adding what each adds or taking a formula where
    there is one.
    """
    why = "what each of them holds is for the planner of shards"
    require(step.ranks == 1, "step", f"{step.plan} on {step.ranks} ranks", why, "pass sparing plan a cluster")
    _check_draws(source, step.method)
    found = [_price(source, draw, device, whole) for draw in _draws(source, step)]
    return dataclasses.replace(max(found, key=_total), flops=max(one.flops for one in found))


def _check_draws(source: Source, method: Method) -> None:
    """Refuse draws that are no count of blocks, of more blocks than there are, and half of a tied weight."""
    if isinstance(method, LayerSampling):
        got = type(method.sampler).__name__ if method.units == "block" else f"units of a {method.units}"
        counted = method.units == "block" and not isinstance(method.sampler, Bernoulli)
        why, do = "draws differ in size, and a step is priced for one", "price a step with the units of one draw active"
        require(counted, "method", got, why, do)
        most = len(source.blocks)
        do = f"pass active <= {most}"
        require(method.active <= most, "method.active", method.active, f"the model has {most} body blocks", do)
        same = method.embed == method.head or not source.tied
        got, why = "embed and head set differently", "they are one tied weight"
        require(same, "method", got, why, "pass the same value for both")


def _price(source: Source, step: FitStep, device: Device, whole: bool) -> Price:
    passes = (whole_passes if whole else passes_of)(source, step, device)
    return _at_rest(_priced(source, passes, step, device), source, step, device)


def _at_rest(found: Price, source: Source, step: FitStep, device: Device) -> Price:
    """Add what blocks that do not train hold: exact weights of rounded ones, and state that is kept or offloaded."""
    resting = []
    if isinstance(step.method, LayerSampling):
        drawn = formula.drawn(step.method)
        resting = [shape for index, block in source.blocks.items() if index not in drawn for shape in block]
    exact, (state, host) = source.exact(step), kept(step, resting)
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


def kept(step: FitStep, shapes: Iterable[tuple[int, ...]]) -> tuple[int, int]:
    """State of resting blocks that trained before, on the device and in host memory (bytes)."""
    method, optimizer, shapes = step.method, step.optimizer, list(shapes)
    if not isinstance(method, LayerSampling) or method.state not in {"keep", "offload"}:
        return 0, 0
    copies = _FLOAT if step.masters and step.torch_dtype in HALVES else 0
    wide = torch.float32 if copies else step.torch_dtype
    state = sum(optimizer.state(shape, wide) + copies * math.prod(shape) for shape in shapes)
    host = sum(optimizer.host(shape, wide) for shape in shapes)
    return (state, host) if method.state == "keep" else (0, state + host)


def _total(price: Price) -> int:
    return price.bytes.total


def lowest(step: FitStep) -> FitStep:
    """The step with the lowest blocks, whose backward pass is the longest; any other method as it is."""
    method = step.method
    if not isinstance(method, LayerSampling) or isinstance(method.sampler, Fixed):
        return step
    return _fixed(step, method, tuple(range(method.active)))


def _draws(source: Source, step: FitStep) -> list[FitStep]:
    """The step with each of the sets of blocks one of which holds most.

    While the top block's gradients come, all blocks that the backward pass reaches still keep their activations. With
    checkpointing these are small, and the highest blocks hold most; with a frozen embedding all but the lowest of them,
    in whose place is the first block, to which the pass reaches. Without it the lowest may hold more, as they do where
    gradients of an earlier micro-batch are there anyhow.
    """
    method = step.method
    if not isinstance(method, LayerSampling) or isinstance(getattr(method.sampler, "blocks", None), tuple):
        return [step]
    blocks, active = list(source.blocks), method.active
    top = blocks[len(blocks) - active :]
    if method.sampler == Fixed(blocks="last"):
        return [_fixed(step, method, tuple(top))]
    low, high = blocks[:active], top if method.embed else [*blocks[: len(top[:1])], *top[1:]]
    if alike(source):
        found = [high] if step.checkpointing else [low] if step.accumulates else [low, high]
    else:
        found = [low, high, top]
        if depth_of(source) is None:
            sizes = {index: sum(map(math.prod, block)) for index, block in source.blocks.items()}
            # of equally large ones the highest
            found.append(sorted(sorted(blocks, key=lambda index: (-sizes[index], -index))[:active]))
    return [_fixed(step, method, draw) for draw in dict.fromkeys(map(tuple, found))]


def _fixed(step: FitStep, method: LayerSampling, blocks: tuple[int, ...]) -> FitStep:
    return dataclasses.replace(step, method=dataclasses.replace(method, sampler=Fixed(blocks=blocks)))


def peak_by_length(source: Source, step: FitStep, *, device: Device = "cuda") -> Callable[[int], int]:
    """Peak bytes on the device as a function of the length of rows (tokens), of a step with checkpointing."""
    draws = [(draw, passes_by_length(source, draw, device)) for draw in _draws(source, step)]

    def at(length: int) -> int:
        asked = ((dataclasses.replace(draw, length=length), passes(length)) for draw, passes in draws)
        return max(_total(_at_rest(_priced(source, p, draw, device), source, draw, device)) for draw, p in asked)

    return at


def _priced(source: Source, passes: Passes, step: FitStep, device: Device) -> Price:
    """Passes and the optimizer."""
    return assemble(passes, trains(source, step), step, device=device)


def trains(source: Source, step: FitStep) -> Trained:
    """What trains in a step."""
    key = ("trains", step.method, step.dtype, step.weights is None)
    if key not in source.traced:
        source.traced[key] = _trains(source, step)
    found: Trained = source.traced[key]
    return found


def _trains(source: Source, step: FitStep) -> Trained:
    shape, method = formula.shape_of(source.config), formula.closed(step.method, step)
    if shape is None or method is None or step.weights:
        # what trains is not rounded
        exact = dataclasses.replace(step, weights=None)
        least, depth = shallow(source), depth_of(source)
        if not isinstance(step.method, Lora) or least is None or depth is None:
            return _at_depth(source, exact, None)
        # adapters are equal in equal blocks, and slow to add
        few, more = (_at_depth(source, exact, blocks) for blocks in (least, least + 1))
        further = (Counter(more.shapes) - Counter(few.shapes)).elements()
        return few.with_more([*further] * (depth - least))
    floats = isinstance(method, LoRA) and method.float_adapters
    adapters = method.params(shape) if isinstance(method, LoRA) else 0
    dtype = torch.float32 if floats else step.torch_dtype
    return Trained(shapes=formula.shapes(shape, method), dtype=dtype, parameters=shape.total + adapters)


def _at_depth(source: Source, step: FitStep, depth: int | None) -> Trained:
    """What trains in a model of so many blocks in each stack."""
    model = source.build(step, depth)
    return trained_of(model, source.trained(model, step.method), step, parameters=source.parameters)


def trained_of(model: nn.Module, names: Iterable[str], step: FitStep, *, parameters: int) -> Trained:
    """Those of a model's parameters that train; ``parameters``: of the model without adapters (count)."""
    known = named_parameters(model)
    shapes = [tuple(known[name].shape) for name in names]
    # adapters of a 16-bit model are float32: what trains together has one type
    dtype = max((known[name].dtype for name in names), key=lambda kind: kind.itemsize)
    adapters = sum(map(math.prod, shapes)) if isinstance(step.method, Lora) else 0
    return Trained(shapes=shapes, dtype=dtype, parameters=parameters + adapters)


def assemble(passes: Passes, trained: Trained, step: FitStep, *, device: Device) -> Price:
    """Add an optimizer's state, and its step, to two passes."""
    shapes, dtype = trained.shapes, trained.dtype
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
        host=visits, visits=visits, trainable=elements, parameters=trained.parameters,
        # weights, gradients and state are read, weights and state written
        flops=passes.flops * step.accumulate, moved=2 * state + 3 * elements * dtype.itemsize,
    )  # fmt: skip
