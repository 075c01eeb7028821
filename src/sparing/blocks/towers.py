"""What a model has beside its body: the encoder before a decoder, vision and audio towers, other lists of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sparing.blocks.declared import declared
from sparing.blocks.find import Block
from sparing.blocks.names import Place, children, submodule, unwrap, walk
from sparing.blocks.repeated import CONTAINERS, is_composite, parts
from sparing.blocks.roles import inside


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
