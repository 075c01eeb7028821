"""The passes of a step by closed formula, for the families and methods that have one: instant, and held to a trace."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from sparing.errors import UserError
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.step import FitStep, Method, tokens_at_once
from sparing.layersample import Fixed, LayerSampling
from sparing.layersample.price.activations import LoRA, Trained, Work
from sparing.layersample.price.predict import Full
from sparing.layersample.price.shape import Shape
from sparing.layersample.price.walk import passes
from sparing.memory.passes import Passes


def shape_of(config: Any) -> Shape | None:
    """The sizes of a model of a known family; None for another, or one whose dropout no formula counts."""
    if isinstance(config, Shape):
        return config
    # a model with towers for pictures or sounds is more than the family of its text
    if _drops(config) or config.get_text_config() is not config:
        return None
    with contextlib.suppress(UserError):
        return Shape.from_config(config)
    return None


def _drops(config: Any) -> bool:
    """Whether a model uses dropout in training (classifier apart)."""
    rates = {name: value for name, value in vars(config).items() if "drop" in name}
    return any(
        isinstance(rate, int | float) and rate > 0 and not name.startswith(("summary", "classifier"))
        for name, rate in rates.items()
    )


def passes_of(config: Any, step: FitStep) -> Passes | None:
    """Forward and backward pass of a step; None where no formula is known."""
    shape, method = shape_of(config), closed(step.method, step)
    if shape is None or method is None or step.weights or (step.packing and step.attention == "documents"):
        return None
    at_once = tokens_at_once(shape.vocab, step.loss_tokens)
    # a sliding window shorter than the row needs a mask, as rows of several documents do
    windowed = step.length > (getattr(config, "sliding_window", None) or math.inf)
    work = Work(
        batch=step.batch, length=step.length, dtype=step.torch_dtype, padded=step.packing or windowed,
        attention="eager" if step.attention == "eager" else "sdpa", checkpointing=step.checkpointing,
        at_once=at_once if at_once < step.batch * step.length else 0,
    )  # fmt: skip
    adapters = method.params(shape) * method.element(work) if isinstance(method, LoRA) else 0
    params = shape.total * work.element + adapters
    return passes(shape, work, trained(shape, method), params, accumulates=step.accumulates)


def closed(method: Method, step: FitStep) -> Full | LayerSampling | LoRA | None:
    """A method as the formulas know it; None for adapters they do not."""
    if not isinstance(method, Lora):
        return method
    if method.targets != "all-linear" or method.dora or method.modules_to_save or method.adapter:
        return None
    # peft keeps adapters of a 16-bit model in float32
    return LoRA(rank=method.rank, dropout=method.dropout > 0, float_adapters=step.torch_dtype.itemsize < 4)


def drawn(method: LayerSampling) -> frozenset[int]:
    """Indices of the blocks that train: those of a fixed draw, or else the lowest."""
    fixed = method.sampler.blocks if isinstance(method.sampler, Fixed) else None
    assert fixed != "last", "a step is priced with the blocks it trains"
    return frozenset(range(method.active) if fixed is None else fixed)


def trained(shape: Shape, method: Full | LayerSampling | LoRA) -> Trained:
    """What trains."""
    if isinstance(method, Full):
        return Trained(blocks=frozenset(range(shape.layers)))
    if isinstance(method, LoRA):
        return Trained(embed=False, tail=False, head=False, lora=method)
    return Trained(embed=method.embed, blocks=drawn(method), tail=method.tail, head=method.head)


def block_shapes(shape: Shape) -> list[tuple[int, ...]]:
    """Shapes of a block's parameters; all its vectors are one, which matters to no optimizer here."""
    matrices: list[tuple[int, ...]] = [(outputs, inputs) for inputs, outputs in shape.linears]
    return [*matrices, (shape.block - shape.block_matmul,)]


def shapes(shape: Shape, method: Full | LayerSampling | LoRA) -> list[tuple[int, ...]]:
    """Shapes of what trains."""
    on = trained(shape, method)
    if on.lora is not None:
        rank = on.lora.rank
        adapters: list[tuple[int, ...]] = []
        for inputs, outputs in shape.linears:
            adapters += [(rank, inputs), (outputs, rank)]
        return adapters * shape.layers
    found = block_shapes(shape) * len(on.blocks)
    if on.embed:
        found += [(shape.vocab, shape.width)] + [(shape.positions, shape.width)] * bool(shape.positions)
    if on.head and not shape.tied:
        found.append((shape.vocab, shape.width))
    return found + [(shape.tail,)] * on.tail
