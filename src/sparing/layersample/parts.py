"""A model as layer sampling divides it: what is drawn, what is always on, what stays frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sparing.blocks import Block, find_blocks, submodule
from sparing.blocks.declared import declared
from sparing.blocks.names import Place, children, unwrap, walk
from sparing.blocks.repeated import CONTAINERS, is_composite, parts
from sparing.blocks.roles import inside
from sparing.errors import UserError


@dataclass(frozen=True, slots=True)
class Unit:
    """What is drawn or not as a whole: a body block, or one weight matrix of it."""

    name: str  # path of the block, or name of the parameter
    params: dict[str, nn.Parameter]  # those that may train
    module: nn.Module  # runs when the unit is used
    depth: int  # body block it is in, from 0


def units_of(model: nn.Module, body: Sequence[Block], *, matrices: bool) -> list[Unit]:
    """The body blocks as units, or each of their weight matrices that requires a gradient."""
    if not matrices:
        trainable = [{n: p for n, p in b.params.items() if p.requires_grad} for b in body]
        return [Unit(b.name, trainable[b.index], submodule(model, b.name), b.index) for b in body]
    found = ((n, p, b.index) for b in body for n, p in b.params.items() if p.requires_grad and p.ndim > 1)
    return [Unit(n, {n: p}, submodule(model, n.rpartition(".")[0]), depth) for n, p, depth in found]


def parts_of(model: nn.Module, body: str | Sequence[str] | None = None) -> tuple[list[Block], frozenset[str]]:
    """Divide a model: blocks of an encoder are drawn like those of its decoder, and towers for pictures stay frozen."""
    blocks = find_blocks(model, body=body)
    if body is None and (encoder := encoder_blocks(model)):
        blocks = find_blocks(model, body=[*encoder, *(b.name for b in blocks if b.role == "body")])
    frozen = non_text_parameters(model, blocks)
    outside = [(n, p) for b in blocks if b.role != "body" for n, p in b.params.items() if n not in frozen]
    for path in other_block_lists(model, blocks):
        loose = sum(p.numel() for name, p in outside if p.requires_grad and inside(name, path))
        if loose:
            lists = ", ".join(dict.fromkeys(repr(b.name.rpartition(".")[0]) for b in blocks if b.role == "body"))
            raise UserError(
                "model", got=f"{loose:,} parameters in {path}, outside the body",
                why="they would train whole, whatever is drawn",
                do=f"freeze them first, or draw from them too: pass body=({lists}, {path!r})",
            )  # fmt: skip
    return blocks, frozen


def encoder_blocks(model: nn.Module) -> list[str]:
    """Find the encoder's blocks of a Hugging Face model whose decoder is its body, such as T5 and Whisper."""
    facts = declared(model)
    if facts is None or not getattr(facts.model.module.config, "is_encoder_decoder", False):
        return []
    encoder = unwrap(facts.model.module.get_encoder())  # type: ignore[operator]
    place = next(place for place in walk(model) if place.module is encoder)
    lists = _lists(place)
    return [block.path for block in parts(lists[0])] if len(lists) == 1 else []


def non_text_parameters(model: nn.Module, blocks: Sequence[Block]) -> frozenset[str]:
    """Find what of a multimodal Hugging Face model no text passes through: vision and audio towers and projectors."""
    facts = declared(model)
    if facts is None or facts.tower is None or getattr(facts.model.module.config, "is_encoder_decoder", False):
        return frozenset()
    # the input embedding may lie outside the text decoder
    known = (facts.tower, facts.embed, facts.head)
    names = (name for block in blocks if block.role != "body" for name in block.params)
    return frozenset(name for name in names if not any(inside(name, path) for path in known))


def other_block_lists(model: nn.Module, blocks: Sequence[Block]) -> list[str]:
    """Find the lists of repeated blocks that have no part in the body."""
    body = [block.name for block in blocks if block.role == "body"]
    paths = [place.path for place in _lists(Place("", submodule(model, "")))]
    return [p for p in paths if not any(inside(p, block) or inside(block, p) for block in body)]


def _lists(place: Place) -> list[Place]:
    """Outermost lists of two and more composite modules; a list of lists is opened."""
    items = parts(place) if isinstance(place.module, CONTAINERS) else []
    if len(items) > 1 and all(is_composite(item.module) and not isinstance(item.module, CONTAINERS) for item in items):
        return [place]
    return [found for child in children(place) for found in _lists(child)]
