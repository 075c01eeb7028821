"""The repeated blocks of a model, found by structure (lists of modules of one kind), never by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from sparing.blocks.names import Place, children, submodule, walk
from sparing.errors import UserError, require

CONTAINERS = (nn.ModuleList, nn.Sequential)


def has_parameters(module: nn.Module) -> bool:
    """Say whether a module or anything in it holds a parameter."""
    return next(module.parameters(), None) is not None


def parts(place: Place) -> list[Place]:
    """Return the children that hold parameters, unwrapped, a shared module once (under its first name)."""
    found: dict[int, Place] = {}
    for child in children(place):
        if has_parameters(child.module):
            found.setdefault(id(child.module), child)
    return list(found.values())


def is_composite(module: nn.Module) -> bool:
    """Say whether a module is made of others, unlike a single layer such as ``nn.Linear``."""
    return any(has_parameters(child.module) for child in children(Place("", module)))


def named_by_user(model: nn.Module, body: str | Sequence[str]) -> list[Place]:
    """Return the blocks that the user names."""
    if isinstance(body, str):
        place = Place(body, submodule(model, body))
        if not isinstance(place.module, CONTAINERS) or not (found := parts(place)):
            raise UserError(
                "body", got=f"{body!r}, a {type(place.module).__name__}",
                why="one path must lead to a ModuleList or Sequential whose items hold parameters",
                do=f"pass the list of block paths, or one of: {describe(model)}",
            )  # fmt: skip
        return found
    places = [Place(path, submodule(model, path)) for path in body]
    # the items of a ModuleList, which is never run and so no block; anything else is a block itself
    inner = [parts(place) if isinstance(place.module, nn.ModuleList) else [place] for place in places]
    found = [block for blocks in inner for block in blocks]
    owners = Counter(id(module) for block in found for module in set(block.module.modules()))
    for block in found:
        if not has_parameters(block.module) or owners[id(block.module)] > 1:
            raise UserError(
                "body", got=repr(block.path), why="a block needs parameters and lies in no other block", do="remove it"
            )
    require(bool(found), "body", "an empty list", "a model needs at least one block", "leave body out")
    return found


def repeated(model: nn.Module) -> list[Place]:
    """Return the one family of repeated blocks in a model.

    A family is all blocks of one class (or one mix of classes) in the outermost lists. A ``ModuleList`` gives all its
    items, a ``Sequential`` only a class of composite modules that follow one another; stages that are themselves
    lists are opened. Lists of single layers count only where there is no list of composite modules.
    """
    lists = [items for items in _outermost(Place("", submodule(model, ""))) if items]
    # lists of plain layers (an MLP inside each block) are blocks only where nothing else is
    composite = [items for items in lists if is_composite(items[0].module)]
    lists = composite or lists
    # a list of one repeats nothing, unless all are
    lists = [items for items in lists if len(items) > 1] or lists
    families = {frozenset(type(item.module) for item in items) for items in lists}
    if len(families) > 1:
        raise UserError(
            "model", got=type(submodule(model, "")).__name__, why="it has more than one kind of repeated block",
            do=f"pass body=, one of: {describe(model)}",
        )  # fmt: skip
    # reversed, so that a block that is registered twice counts once, under its first name
    found = {id(item.module): item for items in reversed(lists) for item in reversed(_flatten_stages(items))}
    return list(reversed(found.values()))


def sequence(model: nn.Module) -> list[Place]:
    """Return the parts of a plain ``Sequential``, found below any number of modules that hold nothing else."""
    place = Place("", submodule(model, ""))
    while len(inner := parts(place)) == 1 and not list(place.module.parameters(recurse=False)):
        place = inner[0]
    return inner if isinstance(place.module, nn.Sequential) else []


def describe(model: nn.Module) -> str:
    """List every ``ModuleList`` and ``Sequential`` that holds parameters: path, length, kind of item."""
    lines = []
    for place in walk(model):
        if isinstance(place.module, CONTAINERS) and (items := parts(place)):
            kinds = "/".join(dict.fromkeys(type(item.module).__name__ for item in items))
            lines.append(f"{place.path or '(the model)'} ({type(place.module).__name__} of {len(items)} {kinds})")
    return ", ".join(lines) or "no ModuleList or Sequential with parameters"


def _outermost(place: Place) -> list[list[Place]]:
    """Return the blocks of each outermost list in or at a place."""
    items = _items(place)
    return [items] if items else [items for child in parts(place) for items in _outermost(child)]


def _items(place: Place) -> list[Place]:
    """Return the blocks of a list: all of a ``ModuleList``, the run of one composite class in a ``Sequential``."""
    if not isinstance(place.module, CONTAINERS):
        return []
    items = parts(place)
    if isinstance(place.module, nn.ModuleList):
        kinds = {type(item.module) for item in items}
        return items if len(kinds) == 1 or all(is_composite(item.module) for item in items) else []
    runs = {
        type(one.module)
        for one, other in pairwise(items)
        if type(one.module) is type(other.module) and is_composite(one.module)
    }
    return [item for item in items if type(item.module) in runs] if len(runs) == 1 else []


def _flatten_stages(items: list[Place]) -> list[Place]:
    """Replace stages by their blocks where every stage is a list and all its parameters are in those blocks."""
    inner = [_items(item) for item in items]
    whole = all(len(blocks) == len(parts(item)) > 0 for blocks, item in zip(inner, items, strict=True))
    return [block for blocks in inner for block in blocks] if whole else items
