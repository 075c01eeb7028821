"""Bytes, operations, coverage and depth of layer sampling and its rivals before a run, from shapes alone.

Nothing runs. For the Hugging Face families that :meth:`Shape.from_config` knows, parameters, kept activations and
operations are exact; temporaries at the peak are those of torch's kernels on the CPU and of the form of
AdamW that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from sparing.errors import UserError, require
from sparing.layersample.config import LayerSampling
from sparing.layersample.draws import Bernoulli, Reshuffle
from sparing.layersample.price.activations import FLOAT, LoRA, Trained, Work
from sparing.layersample.price.coverage import coverage, lowest_drawn, most_drawn
from sparing.layersample.price.flops import block_backward, flops
from sparing.layersample.price.shape import Shape
from sparing.layersample.price.walk import Held, passes, walk
from sparing.memory import Profile, format_bytes

_MOMENTS = 2


# A form of torch's AdamW: one parameter at a time with two copies of it, all at once with a copy of each, or one kernel
# without any
Form = Literal["single", "foreach", "fused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Full:
    """Full fine-tuning, a rival: everything trains at every step."""

    masters: bool = False
    """Keep fp32 masters of half-precision parameters."""


Method = LayerSampling | LoRA | Full  # A way to fine-tune, as a value


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step of fine-tuning will cost, and what the whole run will reach."""

    # composition at the peak of a steady step, for the draw that costs most; its ``phases`` end forward, backward and
    # step
    bytes: Profile
    host: int  # optimizer state kept in host memory (bytes); with ``state="offload"`` only
    trainable: int  # parameters that train at once (count)
    parameters: int  # all parameters, adapters included (count)
    always: float  # share of the trainable parameters that are always on: embedding, final norm and head

    # expected share of body blocks that train at least once within ``steps``; None without ``steps``
    coverage: float | None

    # expected index of the lowest block that trains, from 0; the number of blocks if none does. With a frozen embedding
    # the backward pass ends there.
    lowest_active: float
    flops: int  # expected operations of a step in matrix products, multiply-adds counted as two
    ratio: float  # operations of full fine-tuning, over these: the ideal speed-up
    advice: tuple[str, ...]  # what one should know before starting, one sentence each; empty if all is well


def predict(
    model: Shape | nn.Module,
    settings: Method,
    *,
    batch: int,
    length: int,
    dtype: torch.dtype,
    steps: int | None = None,
    checkpointing: bool = False,
    attention: Literal["sdpa", "eager"] = "sdpa",
    padded: bool = False,
    blocks: Sequence[int] | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    optimizer: Form | None = None,
    accumulate: int = 1,
) -> Prediction:
    """Predict bytes, operations and coverage of one way to fine-tune with AdamW.

    Args:
        model: A shape, or a Hugging Face model whose configuration gives it (meta tensors will do).
        settings: Layer sampling, or a rival: :class:`Full`, :class:`LoRA`.
        batch: Sequences at once (count).
        length: Tokens of a sequence (count).
        dtype: Type of weights, activations, gradients and, without masters, of both moments.
        steps: Optimizer steps of the run (count), for the coverage.
        checkpointing: Whether blocks recompute their activations.
        attention: Fused attention or the whole matrix of scores.
        padded: Whether batches carry a padding mask, or rows hold several documents, which needs one as well.
        blocks: Active blocks to price; by default those that hold most of the lowest, the highest and a mixture.
        device: Device whose default form of AdamW is taken where none is given: on "cuda" torch takes "foreach",
            elsewhere "single".
        optimizer: Which form of AdamW runs.
        accumulate: Micro-batches of a step (count); from the second on, gradients are kept while activations are made.

    Returns:
        The prediction.

    Raises:
        UserError: If the settings do not fit the model, or store frozen blocks in low bits.

    Example:
        >>> shape = Shape(layers=32, width=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
        >>> half = {"batch": 1, "length": 1024, "dtype": torch.bfloat16}
        >>> round(predict(shape, LayerSampling(active=2), **half).bytes.total / 1e9, 1)
        21.4
        >>> round(predict(shape, Full(), **half).bytes.total / 1e9, 1)
        54.4
    """
    if isinstance(settings, LayerSampling) and settings.frozen is not None:
        raise UserError(
            "LayerSampling.frozen", got=settings.frozen, why="the formulas price all blocks in one number format",
            do="use sparing.memory.predict on the model, between Sampler(...).begin_step(0) and close()",
        )  # fmt: skip
    work = Work(
        batch=batch, length=length, dtype=dtype, attention=attention, padded=padded, checkpointing=checkpointing
    )
    shape = model if isinstance(model, Shape) else shape_of(model)
    form = optimizer or ("foreach" if device == "cuda" else "single")
    case = _Case(shape=shape, settings=settings, work=work, blocks=blocks, form=form, accumulates=accumulate > 1)
    trainable, adapters, expected = case.trainable, case.adapters, case.expected_flops()
    return Prediction(
        bytes=case.profile(),
        host=case.host,
        trainable=trainable,
        parameters=shape.total + adapters,
        always=case.trained.outside(shape) / trainable if trainable else 0.0,
        coverage=None if steps is None else case.coverage(steps),
        lowest_active=case.lowest(),
        flops=round(expected),
        ratio=flops(shape, work, Trained(blocks=frozenset(range(shape.layers)))).total / expected,
        advice=tuple(_advice(case, steps)),
    )


def shape_of(model: nn.Module) -> Shape:
    """Read the shape from a Hugging Face model, and hold it against the parameters it has."""
    config = getattr(model, "config", None)
    if config is None:
        raise UserError(
            "model", got=type(model).__name__, why="it has no configuration to read sizes from",
            do="give a Shape, or use sparing.memory.predict, which runs any model on fake tensors",
        )  # fmt: skip
    shape = Shape.from_config(config.get_text_config() if hasattr(config, "get_text_config") else config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != shape.total:
        raise UserError(
            "model", got=f"{count} parameters", why=f"its configuration makes {shape.total}",
            do="give the model before adapters or heads are added, or use sparing.memory.predict",
        )  # fmt: skip
    return shape


def prefer_lora(shape: Shape, settings: LayerSampling, work: Work, *, rank: int = 16) -> str | None:
    """Say so if always-on parameters dominate and LoRA would take less memory.

    Example:
        >>> wide = Shape(layers=32, width=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
        >>> prefer_lora(wide, LayerSampling(), Work(batch=1, length=1024, dtype=torch.bfloat16))[:40]
        '71 % of what trains is always on, and Lo'
    """
    ours = _Case(shape=shape, settings=settings, work=work)
    theirs = _Case(shape=shape, settings=LoRA(rank=rank), work=work)
    share = ours.trained.outside(shape) / max(ours.trainable, 1)
    mine, other = ours.profile().total, theirs.profile().total
    if share <= 0.5 or other >= mine:
        return None
    return (
        f"{100 * share:.0f} % of what trains is always on"
        f", and LoRA of rank {rank} would peak at {format_bytes(other)} instead of {format_bytes(mine)}"
    )


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A model, a method and a batch, with what follows from them."""

    shape: Shape
    settings: Method
    work: Work
    blocks: Sequence[int] | None = None
    form: Form = "single"
    accumulates: bool = False  # several micro-batches a step

    @cached_property
    def trained(self) -> Trained:
        """What trains: the given blocks, or of all draws that which holds most."""
        found = _trained(self.shape, self.settings, self.blocks)
        return found[0] if len(found) == 1 else max(found, key=self._held)

    def _held(self, trained: Trained) -> int:
        return passes(self.shape, self.work, trained, 0, accumulates=self.accumulates).peak.total

    @property
    def adapters(self) -> int:
        """Parameters of adapters."""
        return self.settings.params(self.shape) if isinstance(self.settings, LoRA) else 0

    @property
    def trainable(self) -> int:
        """Parameters that train at once."""
        return self.trained.outside(self.shape) + len(self.trained.blocks) * self.shape.block + self.adapters

    @property
    def state(self) -> int:
        """Bytes of optimizer state, masters included, per trained parameter."""
        if self.masters:
            return (_MOMENTS + 1) * FLOAT
        return _MOMENTS * self.element

    @property
    def masters(self) -> bool:
        """Whether half-precision parameters have fp32 masters."""
        wanted = not isinstance(self.settings, LoRA) and self.settings.masters
        return wanted and self.work.dtype in {torch.bfloat16, torch.float16}

    @property
    def element(self) -> int:
        """Bytes of an element of what trains."""
        return self.settings.element(self.work) if isinstance(self.settings, LoRA) else self.work.element

    @property
    def frozen_state(self) -> int:
        """Bytes of state of blocks that do not train now, if every one has been visited."""
        settings = self.settings
        if not isinstance(settings, LayerSampling) or settings.state not in {"keep", "offload"}:
            return 0
        reached = int((settings.sampler.inclusion(self.shape.layers, settings.active) > 0).sum())
        return max(reached - len(self.trained.blocks), 0) * self.shape.block * self.state

    @property
    def host(self) -> int:
        """The part of it that lies in host memory."""
        offload = isinstance(self.settings, LayerSampling) and self.settings.state == "offload"
        return self.frozen_state if offload else 0

    def profile(self) -> Profile:
        """Walk through a step."""
        held = Held(
            params=self.shape.total * self.work.element + self.adapters * self.element,
            optimizer=self.trainable * self.state + self.frozen_state - self.host,
            step=self.step(),
        )
        return walk(self.shape, self.work, self.trained, held, accumulates=self.accumulates)

    def step(self) -> int:
        """Temporaries of AdamW's step."""
        moment, trained = FLOAT if self.masters else self.element, self.trained
        wide = FLOAT * self.trainable if self.masters else 0  # the gradients in float32
        if self.form == "foreach":
            return moment * self.trainable + wide
        if self.form == "single":
            return 2 * moment * _largest(self.shape, trained) + wide
        # the fused kernel needs nothing
        return wide

    def lowest(self) -> float:
        """Expected lowest block that trains."""
        settings = self.settings
        if isinstance(settings, LayerSampling) and self.blocks is None:
            return lowest_drawn(settings.sampler, self.shape.layers, settings.active)
        return float(0 if self.trained.lora else min(self.trained.blocks, default=self.shape.layers))

    def expected_flops(self) -> float:
        """Operations for this draw, corrected to the mean of blocks and depth over draws: they are linear in both."""
        spent: float = flops(self.shape, self.work, self.trained).total
        if isinstance(self.settings, LayerSampling) and self.blocks is None:
            # a draw by coins may be larger than the mean, and is priced as one that holds most
            mean = float(self.settings.sampler.inclusion(self.shape.layers, self.settings.active).sum())
            more = len(self.trained.blocks) - mean
            spent -= more * 2 * self.work.tokens * self.shape.block_matmul
        if self.trained.embed or self.trained.lora:
            return spent
        priced = self.trained.lowest(self.shape.layers)
        return spent - (self.lowest() - priced) * block_backward(self.shape, self.work)

    def coverage(self, steps: int) -> float:
        """Expected share of blocks that ever train."""
        if not isinstance(self.settings, LayerSampling):
            return 1.0
        rounds = math.ceil(max(steps - self.settings.probe, 0) / self.settings.period)
        return coverage(self.settings.sampler, self.shape.layers, self.settings.active, rounds)


def _largest(shape: Shape, trained: Trained) -> int:
    """Elements of the largest tensor that trains."""
    table = (trained.embed or trained.head) * shape.vocab * shape.width
    rank = trained.lora.rank if trained.lora else 0
    weights = max(max(ends) * rank if rank else ends[0] * ends[1] for ends in shape.linears)
    ends = bool(trained.lora and (trained.lora.embed or trained.lora.head)) * shape.vocab * rank
    return max(table, bool(trained.blocks or rank) * weights, ends, trained.tail * shape.width)


def _trained(shape: Shape, settings: Method, blocks: Sequence[int] | None) -> list[Trained]:
    """Find what trains: the given blocks, or each set of them that may hold most."""
    if isinstance(settings, Full):
        return [Trained(blocks=frozenset(range(shape.layers)))]
    if isinstance(settings, LoRA):
        return [Trained(embed=False, tail=False, head=False, lora=settings)]
    require(
        settings.units == "block", "LayerSampling.units", settings.units, "closed formulas count whole blocks",
        "use sparing.memory.predict, which runs a step of any draw on fake tensors",
    )  # fmt: skip
    settings.validate_for(shape.layers)
    if shape.tied and settings.embed != settings.head:
        raise UserError(
            "LayerSampling", got="embed and head set differently", why="they are one tied weight",
            do="pass the same value for both",
        )  # fmt: skip
    draws = [blocks] if blocks is not None else _draws(shape, settings)
    for drawn in draws:
        if not all(0 <= block < shape.layers for block in drawn):
            raise UserError("blocks", got=list(drawn), why=f"the model has {shape.layers}", do="pass indices from 0")
    ends = Trained(embed=settings.embed, tail=settings.tail, head=settings.head)
    return [replace(ends, blocks=frozenset(drawn)) for drawn in draws]


def _draws(shape: Shape, settings: LayerSampling) -> list[list[int]]:
    """Of what can be drawn the lowest blocks, the highest, and those with the lowest one."""
    # activations weigh more in the first, gradients in the others; a backward pass may reach no block below the lowest
    possible = settings.sampler.inclusion(shape.layers, settings.active).nonzero().flatten().tolist()
    most = min(most_drawn(settings.sampler, shape.layers, settings.active), len(possible))
    top = possible[len(possible) - most :]
    return [possible[:most], top, [*possible[: len(top[:1])], *top[1:]]]


def _advice(case: _Case, steps: int | None) -> Iterator[str]:
    """Say what one should know before starting."""
    settings = case.settings
    if not isinstance(settings, LayerSampling):
        return
    rival = prefer_lora(case.shape, settings, case.work)
    if rival is not None:
        yield rival
    missed = case.shape.layers * (1.0 - case.coverage(steps)) if steps is not None and settings.active else 0.0
    if missed >= 0.5:
        cure = "" if isinstance(settings.sampler, Reshuffle) else "; Reshuffle() reaches each of them sooner"
        yield f"{missed:.0f} of {case.shape.layers} blocks are expected never to train within {steps} steps{cure}"
    if isinstance(settings.sampler, Bernoulli):
        yield "Bernoulli draws vary in size; the bytes are those of a draw that one interval in a thousand exceeds"
    if settings.probe:
        yield f"the bytes are not those of the first {settings.probe} steps: a probe holds activations for every block"
    if settings.state == "keep" and case.frozen_state:
        state = format_bytes(case.frozen_state)
        yield f"state of frozen blocks stays on the device: {state} once every block was visited"
