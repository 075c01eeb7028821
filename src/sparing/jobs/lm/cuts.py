"""Forward and backward pass of a step, from models cut to a few blocks and rows of a few lengths.

Passes run on fake tensors, and what each further block adds is added. Every stretch of the passes, such as the backward
pass of the top block, holds a sum of what each block below and above it holds, so its bytes are linear in the number of
blocks, of those that train and of those that do not. Models whose blocks differ run whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from sparing.jobs.lm import formula
from sparing.jobs.lm.documents import priced_on
from sparing.jobs.lm.meta import Source, Stack
from sparing.jobs.lm.optimizer import AdamW
from sparing.jobs.lm.step import FitStep, tokens_at_once
from sparing.layersample import Fixed, LayerSampling
from sparing.layersample.price.predict import Full
from sparing.memory import CATEGORIES, Bytes
from sparing.memory.passes import Passes, trace

Device = Literal["cpu", "cuda"]

TRAINED: Final = 2  # of the lowest, and of the highest, at most so many train in a cut model (count): the end, and one
MOST: Final = 5  # blocks of each stack in the deepest cut model (count)
_GROWING: Final = ("activations", "transient")  # categories that grow with the length of rows

# stretches by what they mean; the ends of both passes; operations
_Keyed = tuple[Mapping[str, Bytes], Bytes, Bytes, int]

# how many of the lowest blocks train, and how many of the highest (count)
_Ends = tuple[int, int]
# of a cut model: blocks of each stack (count), and which of them train if layers are sampled
_Cut = tuple[int, _Ends | None]


def passes_of(source: Source, step: FitStep, device: Device) -> Passes:
    """The passes of a step: by a formula, from a few blocks if the model's are equal, or of every block."""
    found = formula.passes_of(source.config, step) or _extended(source, step, device)
    return found or whole_passes(source, step, device)


def whole_passes(source: Source, step: FitStep, device: Device) -> Passes:
    """The passes of a step, every block of which runs."""
    return _passes(source, step, None, device)[0]


def passes_by_length(source: Source, step: FitStep, device: Device) -> Callable[[int], Passes]:
    """Passes as a function of the length of rows (tokens), of a step with checkpointing; their operations are wrong.

    Bytes of every stretch are quadratic in the length, above the number of tokens whose logits are held at once and
    below it, so three lengths serve all. What a block adds to the stretches of others is one length's: the input that
    it keeps grows with the row, its weights and gradients do not.
    """
    assert step.checkpointing, "blocks keep more than their input"
    bound = tokens_at_once(source.vocabulary, step.loss_tokens) // step.batch
    below, above = min(bound or source.positions, source.positions), max(step.length, bound + 1)
    nodes = {False: [max(below // 4, 2), max(below // 2, 3), max(below, 4)], True: [above, 2 * above, 4 * above]}
    traced: dict[bool, list[Passes]] = {}

    def at(length: int) -> Passes:
        if (found := formula.passes_of(source.config, dataclasses.replace(step, length=length))) is not None:
            return found
        parted = length > bound > 0
        places = nodes[parted]
        if parted not in traced:
            traced[parted] = list(_at_lengths(source, step, places, device))
        weights = [
            math.prod((length - other) / (place - other) for other in places if other != place) for place in places
        ]
        found = _combine([(one.stretches, one.forward, one.backward, 0) for one in traced[parted]], weights)
        assert found is not None, "the stretches of a step do not change with the length of its rows"
        return found

    return at


def _at_lengths(source: Source, step: FitStep, places: Sequence[int], device: Device) -> Iterator[Passes]:
    """The passes of rows of each of some lengths (tokens); only the first of them of more than one cut model."""
    steps = [dataclasses.replace(step, length=place) for place in places]
    yield (shortest := passes_of(source, steps[0], device))
    for longer in steps[1:]:
        yield _lengthened(source, steps[0], shortest, longer, device) or passes_of(source, longer, device)


def _lengthened(source: Source, step: FitStep, whole: Passes, longer: FitStep, device: Device) -> Passes | None:
    """The passes of longer rows from those of the shortest cut model and what its further blocks added in ``whole``."""
    if (cuts := _cuts(source, step)) is None:
        return None
    (first, *_), _ = cuts
    least, found = (_keyed_at(source, one, first, device) for one in (step, longer))
    if {*least[0]} != {*found[0]} or {*least[0]} != {*whole.stretches}:
        return None
    times = longer.length / step.length

    def added(more: Bytes, few: Bytes, at: Bytes) -> Bytes:
        grown = {name: round(times * (getattr(more, name) - getattr(few, name))) for name in _GROWING}
        fixed = {name: getattr(more, name) - getattr(few, name) for name in CATEGORIES if name not in _GROWING}
        return at + Bytes(**grown, **fixed)

    return Passes(
        stretches={name: added(held, least[0][name], found[0][name]) for name, held in whole.stretches.items()},
        forward=added(whole.forward, least[1], found[1]),
        backward=added(whole.backward, least[2], found[2]),
        flops=0,
    )


def _passes(source: Source, step: FitStep, depth: int | None, device: Device) -> tuple[Passes, list[Stack]]:
    """The passes of a model with so many blocks in each stack, all of them if None, and its stacks."""
    key = (dataclasses.replace(step, optimizer=AdamW(), masters=False), depth, device)
    if key not in source.traced:
        model = source.build(step, depth)
        stacks = source.stacks(model)
        with priced_on(device):
            passes = trace(
                model, source.batch(step), trainable=source.trained(model, step.method), loss=source.loss(model, step),
                checkpointing=step.checkpointing, accumulates=step.accumulates, device=device,
                marks=[name for stack in stacks for name in stack.names], entries=[stack.names[0] for stack in stacks],
            )  # fmt: skip
        source.traced[key] = passes, stacks
    found: tuple[Passes, list[Stack]] = source.traced[key]
    return found


def _extended(source: Source, step: FitStep, device: Device) -> Passes | None:
    """The passes of the whole model from those of models of a few blocks; None if it has too few, or unequal ones."""
    cuts = _cuts(source, step)
    return None if cuts is None else _combine([_keyed_at(source, step, cut, device) for cut in cuts[0]], cuts[1])


def _cuts(source: Source, step: FitStep) -> tuple[list[_Cut], list[int]] | None:
    """Cut models, the shortest first, and the weights with which they sum to the whole one; None if none do."""
    depth = depth_of(source)
    if depth is None:
        return None
    least, ends = 2 + _several(source), None
    if isinstance(step.method, LayerSampling):
        ends = _ends(step.method, depth, len(source.stacks(source.bare)))
        if ends is None:
            return None
        # blocks next to the ends stand beside those that train, where sums over a whole stack begin
        least += 1
    if ends is None or depth in ends:
        points: list[_Cut] = [(n, ends and (n * (ends[0] > 0), n * (ends[1] > 0))) for n in (least, least + 1)]
        return points, [1 - (depth - least), depth - least]
    few = min(ends[0], TRAINED), min(ends[1], TRAINED)
    least = max(least, sum(few) + 1)
    extra, more = (ends[0] - few[0], ends[1] - few[1]), depth - least
    if all(extra) or least >= MOST:
        return None
    # in the third model one block more trains
    third = few[0] + (extra[0] > 0), few[1] + (extra[1] > 0)
    return [(least, few), (least + 1, few), (least + 1, third)], [1 - more, more - sum(extra), sum(extra)]


def _ends(method: LayerSampling, depth: int, stacks: int) -> _Ends | None:
    """How many of the first stack's lowest and of the last stack's highest blocks a draw has; None: or any others."""
    drawn, count = formula.drawn(method), depth * stacks
    low = _run(range(depth), drawn)
    high = _run(range(count - 1, max(low, count - depth) - 1, -1), drawn)
    alone = not (stacks > 1 and depth in (low, high) and min(low, high))
    return (low, high) if low + high == len(drawn) and alone else None


def _run(indices: Iterable[int], drawn: Collection[int]) -> int:
    """How many of the first indices are drawn, up to one that is not (count)."""
    return sum(1 for _ in itertools.takewhile(drawn.__contains__, indices))


def alike(source: Source) -> bool:
    """Whether the blocks are known to be one stack of equal ones."""
    return formula.shape_of(source.config) is not None or (depth_of(source) is not None and not _several(source))


def _several(source: Source) -> bool:
    """Whether there is more than one stack."""
    return len(source.stacks(source.bare)) > 1


def shallow(source: Source) -> int | None:
    """Blocks of each stack of the shortest cut model in which everything or adapters train; None: models run whole."""
    return None if depth_of(source) is None else 2 + _several(source)


def _keyed_at(source: Source, step: FitStep, cut: _Cut, device: Device) -> _Keyed:
    blocks, ends = cut
    if isinstance(step.method, LayerSampling) and ends is not None:
        count = blocks * len(source.stacks(source.bare))
        drawn = (*range(ends[0]), *range(count - ends[1], count))
        method = dataclasses.replace(step.method, active=len(drawn), sampler=Fixed(blocks=drawn))
        step = dataclasses.replace(step, method=method)
    passes, stacks = _passes(source, step, blocks, device)
    return _keyed(passes, stacks, ends or (0, 0))


def _keyed(passes: Passes, stacks: list[Stack], ends: _Ends) -> _Keyed:
    """Name the stretches by what they mean in a model of any depth."""
    names = {"forward": "forward", "loss": "loss"}
    for index, stack in enumerate(stacks):
        places = {"top": stack.names[-1], "bottom": stack.names[0], "into": f"into {stack.names[0]}"}
        if len(stacks) > 1:
            places |= {"next to top": stack.names[-2], "next to bottom": stack.names[1]}
        names |= {f"{place} {index}": name for place, name in places.items()}
    low, high = ends
    lowest, highest = stacks[0].names, stacks[-1].names
    if low:
        names["last of the lowest"] = lowest[low - 1]
        names |= {"next above": lowest[low]} if low < len(lowest) else {}
    if high:
        names["first of the highest"] = highest[-high]
        names |= {"next below": highest[-high - 1]} if high < len(highest) else {}
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


def depth_of(source: Source) -> int | None:
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
