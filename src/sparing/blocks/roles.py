"""Which part of a model a parameter belongs to, from its places in the tree and its order of use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from sparing.blocks.names import Place, all_names, walk
from sparing.blocks.order import Order

Role = Literal["embed", "body", "tail", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What structure alone says: the body, and the paths of parts whose role is known. ``None``: not known."""

    blocks: Sequence[Place]  # the body, as listed
    embed: str | None = None  # the input embedding
    head: str | None = None  # the output embedding or classifier
    backbone: str | None = None  # what is used after the body outside this path is head
    tower: str | None = None  # what was not seen in use outside this path comes before the body


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each parameter is first used, and when the body runs; registration stands in for what was not seen."""

    first: Mapping[int, float]  # ``id(parameter)`` -> time; −1 before all that was seen, infinity after
    start: float  # first use of the body
    end: float  # last use of the body


@dataclass(frozen=True, slots=True)
class Tree:
    """Every parameter's names and, for those in the body, the position of its block in the plan."""

    params: Mapping[int, nn.Parameter]  # ``id(parameter)`` -> parameter, in order of registration
    names: Mapping[int, Sequence[str]]  # ``id(parameter)`` -> its names outside the body
    body: Mapping[int, int]  # ``id(parameter)`` -> position of the first block that holds it


def inside(name: str, path: str | None) -> bool:
    """Say whether a dotted name lies at or below a path; everything lies below the empty one, nothing below none."""
    return path is not None and (not path or name == path or name.startswith(f"{path}."))


def tree_of(model: nn.Module, blocks: Sequence[Place]) -> Tree:
    """Sort every name of every parameter into body and outside."""
    position = {id(block.module): index for index, block in reversed(list(enumerate(blocks)))}
    paths = [(place.path, position[id(place.module)]) for place in walk(model) if id(place.module) in position]
    params: dict[int, nn.Parameter] = {}
    names: dict[int, list[str]] = {}
    body: dict[int, int] = {}
    for name, parameter in all_names(model):
        key = id(parameter)
        params.setdefault(key, parameter)
        names.setdefault(key, [])
        homes = [index for path, index in paths if inside(name, path)]
        if homes:
            body[key] = min([*homes, body.get(key, len(blocks))])
        else:
            names[key].append(name)
    return Tree(params, names, body)


def timeline_of(tree: Tree, plan: Plan, order: Order) -> Timeline:
    """Give every parameter a time: as seen, else as registered."""
    # a weight shared with the outside says nothing of the bounds of the body
    unshared = [key for key in tree.body if not tree.names[key]]
    seen = [key for key in unshared if key in order.first]
    if order.complete and not seen:
        # the forward went past the body (a task head alone, say), so it says nothing about what is before and after
        order = Order()
    first: dict[int, float] = {}
    side = -1.0
    for key, names in tree.names.items():
        side = math.inf if key in tree.body and not names else side
        other = plan.tower is not None and not any(inside(name, plan.tower) for name in names)
        first[key] = order.first.get(key, -1.0 if other else side)
    if order.complete:
        return Timeline(first, min(order.first[key] for key in seen), max(order.last[key] for key in seen))
    # the forward stopped early: everything it saw is before the end of the body
    start = min((order.first[key] for key in seen), default=max(order.last.values(), default=0) + 1)
    return Timeline(first | dict.fromkeys(unshared, start), start, max(order.last.values(), default=0) + 1)


def role_of(key: int, tree: Tree, plan: Plan, times: Timeline) -> Role:
    """Return the role of one parameter."""
    names = tree.names[key]
    if any(inside(name, plan.embed) for name in names):
        return "embed"
    # a block's weight that something before the body uses as well, as an embedding
    if key in tree.body:
        return "embed" if names and times.first[key] < times.start else "body"
    at_head = [inside(name, plan.head) for name in names]
    if times.first[key] <= times.end and not all(at_head):
        return "embed"
    if any(at_head):
        return "head"
    return "tail" if plan.backbone is None or any(inside(name, plan.backbone) for name in names) else "head"


def last_matrix(roles: Mapping[int, Role], tree: Tree, times: Timeline) -> set[int]:
    """Return the parameters of the module used last, if it lies behind the body and holds a matrix."""
    behind = sorted((key for key, role in roles.items() if role == "tail"), key=lambda key: times.first[key])
    if not behind:
        return set()
    module = tree.names[behind[-1]][0].rpartition(".")[0]
    held = {key for key in behind if tree.names[key][0].rpartition(".")[0] == module}
    return held if any(tree.params[key].ndim > 1 for key in held) else set()


def body_order(tree: Tree, times: Timeline) -> list[int]:
    """Return the positions of the blocks in order of first use; blocks without parameters of their own are omitted."""
    firsts: dict[int, float] = {}
    for key, position in sorted(tree.body.items(), key=lambda item: item[1]):
        firsts[position] = min(times.first[key], firsts.get(position, math.inf))
    return sorted(firsts, key=lambda position: firsts[position])
