"""What a Hugging Face model declares: its text decoder, its depth, its embeddings. transformers is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from sparing.blocks.names import Place, children, unwrap, walk
from sparing.blocks.repeated import CONTAINERS, is_composite, parts

_CHECKPOINTED = "GradientCheckpointingLayer"


@dataclass(frozen=True, slots=True)
class Declared:
    """Paths that a Hugging Face model declares by its methods; ``None`` where it declares none."""

    model: Place  # the Hugging Face model, which may sit inside PEFT's or a user's module
    backbone: str  # what follows the body outside this path is head
    embed: str | None  # input embedding
    head: str | None  # output embedding
    tower: str | None  # the text decoder of a model that has other towers: what no text passes through comes before it
    blocks: tuple[Place, ...]  # the decoder's layers; empty if the configuration names no number that a list matches


def declared(model: nn.Module) -> Declared | None:
    """Ask the one Hugging Face model in a module for its parts."""
    found = _pretrained(Place("", unwrap(model)))
    if len(found) != 1:
        return None
    place = found[0]
    # reversed, so that a shared module keeps its first path
    paths = {id(inner.module): inner for inner in reversed(list(walk(model)))}

    def ask(method: str) -> Place | None:
        try:
            answer = getattr(place.module, method)()
        except (NotImplementedError, AttributeError):
            # vision backbones raise where they have no such part
            return None
        return paths.get(id(unwrap(answer))) if isinstance(answer, nn.Module) else None

    embed, head, decoder = (ask(name) for name in ("get_input_embeddings", "get_output_embeddings", "get_decoder"))
    base = paths.get(id(unwrap(getattr(place.module, "base_model", place.module))), place)
    config: Any = place.module.config
    text = config.get_text_config(decoder=True)
    # of an encoder-decoder only the decoder is the body; its encoder often has as many layers, and would match too
    scopes = [decoder] if decoder and getattr(config, "is_encoder_decoder", False) else [decoder, base, place]
    return Declared(
        model=place,
        backbone=place.path if head else base.path,
        embed=embed.path if embed else None,
        head=head.path if head else None,
        tower=decoder.path if decoder and text is not config else None,
        blocks=_layers([scope for scope in scopes if scope], getattr(text, "num_hidden_layers", None))
        or _staged(base, getattr(config, "depths", None)),
    )


def _pretrained(place: Place) -> list[Place]:
    """Return the outermost Hugging Face models, recognized by what their class declares."""
    kind = type(place.module)
    if isinstance(getattr(kind, "base_model_prefix", None), str) and hasattr(place.module, "config"):
        return [place]
    return [found for child in children(place) for found in _pretrained(child)]


def _layers(scopes: list[Place], count: int | None) -> tuple[Place, ...]:
    """Return the items of the one outermost list with the declared number of layers, in the narrowest scope.

    Where no list has that number, as in models that share or split their layers, the only list will do.
    """
    if count is None:
        return ()
    layered = [
        [items for items in map(parts, _lists(scope)) if items and all(is_composite(i.module) for i in items)]
        for scope in scopes
    ]
    for lists in layered:
        matching = [items for items in lists if len(items) == count]
        # transformers marks by a base class what it can checkpoint
        marked = [items for items in matching if _CHECKPOINTED in {c.__name__ for c in type(items[0].module).__mro__}]
        for narrowed in (matching, marked):
            if len(narrowed) == 1:
                return tuple(narrowed[0])
    return next((tuple(lists[0]) for lists in layered if len(lists) == 1), ())


def _lists(place: Place) -> list[Place]:
    """Return the outermost lists in a place, so that experts inside a layer are never taken for layers."""
    if isinstance(place.module, CONTAINERS):
        return [place]
    return [found for child in children(place) for found in _lists(child)]


def _staged(base: Place, depths: list[int] | None) -> tuple[Place, ...]:
    """Open stages, as of a ResNet, where the declared depths match and the stages hold nothing but blocks."""
    for place in _lists(base) if depths else ():
        blocks: list[Place] = []
        for stage in parts(place):
            inner = parts(stage)
            blocks += parts(inner[0]) if len(inner) == 1 and isinstance(inner[0].module, CONTAINERS) else ()
        if len(blocks) == sum(depths or ()):
            return tuple(blocks)
    return ()
