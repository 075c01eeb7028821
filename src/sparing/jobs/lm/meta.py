"""Models without weights, whole or cut to a few blocks, from a configuration: what a price reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparing.blocks import Block, named_parameters, tied
from sparing.errors import UserError
from sparing.jobs.lm import formula
from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.jobs.lm.documents import NAME, check_documents, loader_arguments, packed, refused
from sparing.jobs.lm.losses import ends_with_head, loss_of
from sparing.jobs.lm.models import vocabulary
from sparing.jobs.lm.names import Attention
from sparing.jobs.lm.step import FitStep, Method, tokens_at_once
from sparing.layersample import LayerSampling
from sparing.layersample.lowbit import layers_of, rest_
from sparing.layersample.parts import parts_of
from sparing.layersample.price.predict import Full
from sparing.layersample.price.shape import Shape
from sparing.memory.fakes import KeptValues, fake_copy
from sparing.memory.steps import Batch, Loss, output_loss
from sparing.report.quiet import silently

# What transformers can make of a configuration, in the order in which it is tried, and its table of what it knows.
CAUSAL: Final = "AutoModelForCausalLM"
_KINDS: Final = {
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}

# How configurations call their depth, and lists with an entry per block.
_DEPTHS: Final = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")

OTHER: Final = "sparing.memory.predict prices a step of any model"


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal blocks in a row, as of an encoder."""

    names: tuple[str, ...]
    shapes: tuple[tuple[Any, ...], ...]  # of each block's parameters


@dataclass(frozen=True, eq=False)
class Source:
    """A configuration and what can be built of it."""

    config: Any
    attention: Attention
    built: dict[tuple[Any, ...], nn.Module] = field(default_factory=dict)
    divided: dict[int, tuple[list[Block], frozenset[str]]] = field(default_factory=dict)
    depths: dict[int, int | None] = field(default_factory=dict)  # of models that were built, as asked for
    inside: dict[int, str] = field(default_factory=dict)  # path of the model in each that has adapters
    traced: dict[Any, Any] = field(default_factory=dict)  # what has been traced, for prices that share it

    @cached_property
    def kind(self) -> str:
        """The class of transformers that makes the model."""
        import transformers

        twice = getattr(self.config, "is_encoder_decoder", False)
        with silently():
            for name, mapping in _KINDS.items():
                if type(self.config) in getattr(transformers, mapping) and not (twice and name == CAUSAL):
                    return name
        why = "it is no language model, image classifier or speech recogniser of transformers"
        raise UserError("model", got=self.config.model_type, why=why, do=OTHER)

    @cached_property
    def layers(self) -> int:
        """Blocks of the body (count)."""
        shape = formula.shape_of(self.config)
        return shape.layers if shape else sum(len(stack.names) for stack in self.stacks(self.bare))

    @cached_property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        shape = formula.shape_of(self.config)
        return shape.tied if shape else bool(tied(self.bare))

    @cached_property
    def parameters(self) -> int:
        """Parameters (count)."""
        shape = formula.shape_of(self.config)
        return shape.total if shape else sum(p.numel() for p in self.bare.parameters())

    @property
    def bare(self) -> nn.Module:
        """The model without adapters."""
        return self.build(FitStep(method=Full()))

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding (count); 0 for a model without one."""
        shape = formula.shape_of(self.config)
        return shape.vocab if shape else getattr(self.config.get_text_config(), "vocab_size", 0)

    @property
    def positions(self) -> int:
        """The longest row (tokens) that the model has places for, at most 2²⁰."""
        text = self.config if isinstance(self.config, Shape) else self.config.get_text_config()
        return min(getattr(text, "max_position_embeddings", None) or 2**20, 2**20)

    @property
    def causal(self) -> bool:
        """Whether `finetune` can run it."""
        return isinstance(self.config, Shape) or self.kind == CAUSAL

    def build(self, step: FitStep, depth: int | None = None) -> nn.Module:
        """The model of a step on the meta device, adapted and quantised; ``depth``: blocks of each stack."""
        if isinstance(self.config, Shape):
            why = "a model that is known by its size alone cannot be built"
            raise UserError("model", got=f"{self.config.total:,} parameters", why=why, do="pass its folder")
        adapters = step.method if isinstance(step.method, Lora) else None
        # which blocks rest depends on which are drawn
        resting = formula.drawn(step.method) if step.weights and isinstance(step.method, LayerSampling) else None
        key = (step.dtype, adapters, step.weights, resting, depth)
        if key not in self.built:
            self.built[key] = self._build(step, adapters, depth)
            self.depths[id(self.built[key])] = depth
        return self.built[key]

    def _build(self, step: FitStep, adapters: Lora | None, depth: int | None) -> nn.Module:
        import transformers

        config = self.config if depth is None else cut(self.config, depth)
        how = loader_arguments(self.attention)
        try:
            with torch.device("meta"), silently():
                auto = getattr(transformers, self.kind)
                copied = copy.deepcopy(config)
                made: nn.Module = auto.from_config(copied, dtype=step.torch_dtype, trust_remote_code=False, **how)
                if self.attention == "documents":
                    check_documents(made)
                if adapters is not None:
                    adapted = with_adapters_(made, adapters, seed=0, weights=step.weights)
                    self.inside[id(adapted)] = next(n for n, module in adapted.named_modules() if module is made)
                    return adapted
                return made if step.weights is None else _resting_(made, step, self._divided(made, depth)[0])
        except UserError:
            raise
        except KeyError as error:
            if NAME not in str(error):
                raise
            raise refused() from None
        except Exception as error:  # noqa: BLE001 - every family has errors of its own; the user needs one line
            why = f"it cannot be built ({str(error).splitlines()[0][:160]})"
            raise UserError("model", got=self.config.model_type, why=why, do=OTHER) from None

    def parts(self, model: nn.Module) -> tuple[list[Block], frozenset[str]]:
        """The blocks of a model that was built here, and what no text passes through."""
        if id(model) not in self.divided:
            alike = id(model) in self.depths and id(model) not in self.inside
            self.divided[id(model)] = self._divided(model, self.depths[id(model)]) if alike else parts_of(model)
        return self.divided[id(model)]

    def _divided(self, model: nn.Module, depth: int | None) -> tuple[list[Block], frozenset[str]]:
        """As the first model of this depth, without adapters, was divided: only it had to run for its order of use."""
        if ("parts", depth) not in self.traced:
            self.traced["parts", depth] = parts_of(model)
        blocks, frozen = self.traced["parts", depth]
        known = named_parameters(model)
        # quantised weights are parameters no longer
        own = [replace(block, params={n: known[n] for n in block.params if n in known}) for block in blocks]
        return own, frozen

    def stacks(self, model: nn.Module) -> list[Stack]:
        """The body in order of use, parted where another list of blocks begins; shapes are without adapters."""
        if (path := self.inside.get(id(model))) is not None:
            plain = self.stacks(self.build(FitStep(method=Full()), self.depths[id(model)]))
            return [Stack(tuple(f"{path}.{name}" for name in stack.names), stack.shapes) for stack in plain]
        found: dict[str, list[Block]] = {}
        for block in self.parts(model)[0]:
            if block.role == "body":
                found.setdefault(block.name.rpartition(".")[0], []).append(block)
        return [
            Stack(
                tuple(b.name for b in blocks),
                tuple(tuple((n.removeprefix(b.name), *p.shape) for n, p in b.params.items()) for b in blocks),
            )
            for blocks in found.values()
        ]

    @cached_property
    def blocks(self) -> dict[int, list[tuple[int, ...]]]:
        """Shapes of every block of the body, by its index."""
        shape = formula.shape_of(self.config)
        if shape is not None:
            return dict.fromkeys(range(shape.layers), formula.block_shapes(shape))
        found = (block for block in self.parts(self.bare)[0] if block.role == "body")
        return {block.index: [tuple(p.shape) for p in block.params.values()] for block in found}

    def exact(self, step: FitStep) -> int:
        """Bytes of the exact weights of blocks that a step keeps at rest; 0 if it has none."""
        if step.weights is None or not isinstance(step.method, LayerSampling):
            return 0
        drawn = formula.drawn(step.method)
        if "exact" not in self.traced:
            body = (block for block in self.parts(self.bare)[0] if block.role == "body")
            self.traced["exact"] = {block.index: _matrices(self.bare, block) for block in body}
        counts: dict[int, int] = self.traced["exact"]
        return sum(count for index, count in counts.items() if index not in drawn) * step.torch_dtype.itemsize

    def trained(self, model: nn.Module, method: Method) -> set[str]:
        """Canonical names of what trains; what no text passes through gets no gradient."""
        if isinstance(method, Full):
            return set(named_parameters(model)) - self.parts(model)[1]
        if isinstance(method, Lora):
            return {name for name, p in named_parameters(model).items() if p.requires_grad}
        blocks, frozen = self.parts(model)
        drawn = formula.drawn(method)
        on = {
            name
            for block in blocks
            if (block.index in drawn if block.role == "body" else getattr(method, block.role))
            for name in block.params
        }
        return on - frozen

    def batch(self, step: FitStep) -> Batch:
        """What one micro-batch of the step looks like."""
        if self.causal:
            # positions that are all 0 begin a document with each token: rows of several documents need a mask
            entries = ("ids", "labels", "positions") if step.packing else ("ids", "labels")
            return dict.fromkeys(entries, ((step.batch, step.length), torch.int64))
        if step.packing:
            why = "rows of several documents are for causal language models"
            raise UserError("packing", got=self.config.model_type, why=why, do="pass --no-packing")
        return _others(self.kind, self.config, step)

    def loss(self, model: nn.Module, step: FitStep) -> Loss:
        """The loss that `finetune` takes of a causal language model; for others the model's own."""
        if not self.causal:
            return output_loss
        at_once = tokens_at_once(self.vocabulary, step.loss_tokens)
        if 0 < at_once < step.batch * step.length:
            if "ends with head" not in self.traced:
                self.traced["ends with head"] = _ends_with_head(self.build(FitStep(method=Full()), 1))
            at_once = checked(at_once, step.loss_tokens, ends=self.traced["ends with head"])
        # the dearest row: one long document, whose result is joined to that of a short one
        places = torch.arange(step.length).remainder(max(step.length - 1, 1)).expand(step.batch, -1)

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            with packed(places if step.packing else None):
                return loss_of(model, **batch, at_once=at_once)

        return loss


def _matrices(model: nn.Module, block: Block) -> int:
    """Weights of a block that can rest (count)."""
    layers: Iterable[Any] = layers_of(model, block, "weights").values()
    return sum(int(layer.weight.numel()) for layer in layers)


def _resting_(model: nn.Module, step: FitStep, blocks: Iterable[Block]) -> nn.Module:
    """Quantise those of the blocks that do not train."""
    assert isinstance(step.method, LayerSampling), "full fine-tuning has no frozen weights"
    assert step.weights is not None
    drawn = formula.drawn(step.method)
    for block in blocks:
        if block.role == "body" and block.index not in drawn:
            for layer in layers_of(model, block, "weights").values():
                rest_(layer, step.weights, exact=False)
    return model


def loss_tokens(model: nn.Module, asked: int | None, tokens: int) -> int:
    """Tokens of ``tokens`` whose logits the loss of this model holds at once (count); 0: all."""
    at_once = tokens_at_once(vocabulary(model), asked)
    return checked(at_once, asked, ends=_ends_with_head(model)) if 0 < at_once < tokens else 0


def checked(at_once: int, asked: int | None, *, ends: bool) -> int:
    """The same number where the loss can be taken in parts; 0 where it cannot, unless it was asked for."""
    if ends or asked is None:
        return at_once if ends else 0
    why = "its logits are not what its head returns: they are scaled or capped"
    raise UserError("loss_tokens", got=asked, why=why, do="omit --loss-tokens")


def _ends_with_head(model: nn.Module) -> bool:
    """``ends_with_head``, of a model without weights on fakes, for models read the values of a mask."""
    if not next(model.parameters()).is_meta:
        return ends_with_head(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_copy(model, mode)
    with mode, KeptValues(mode, {"ids": ((1, 2), torch.int64)}):
        return ends_with_head(fake)


def _others(kind: str, config: Any, step: FitStep) -> Batch:
    """What one micro-batch of another model looks like."""
    rows, whole = step.batch, torch.int64
    if kind == "AutoModelForSeq2SeqLM":
        return {"input_ids": ((rows, step.length), whole), "labels": ((rows, step.length), whole)}
    if kind == "AutoModelForImageClassification":
        side = config.image_size if isinstance(config.image_size, Sequence) else (config.image_size,) * 2
        pictures = (rows, config.num_channels, *side)
        return {"pixel_values": (pictures, step.torch_dtype), "labels": ((rows,), whole)}
    sound = (rows, config.num_mel_bins, 2 * config.max_source_positions)
    spoken = (rows, min(step.length, config.max_target_positions))
    return {"input_features": (sound, step.torch_dtype), "labels": (spoken, whole)}


def cut(config: Any, depth: int) -> Any:
    """A configuration with so many blocks in each stack, every kind of block among them."""
    short = copy.deepcopy(config)
    whole = getattr(config, "num_hidden_layers", None)
    for name in _DEPTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(short, name, depth)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == whole and whole > depth:
            kinds = [next(v for v in value if repr(v) == kind) for kind in dict.fromkeys(map(repr, value))]
            setattr(short, name, (kinds * depth)[:depth])
    return short
