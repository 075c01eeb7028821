"""The partition of a model into embedding, repeated blocks, tail and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from sparing.blocks.declared import Declared, declared
from sparing.blocks.names import named_parameters, unwrap
from sparing.blocks.order import Order, example_for, observe
from sparing.blocks.repeated import describe, named_by_user, repeated, sequence
from sparing.blocks.roles import Plan, Role, body_order, last_matrix, role_of, timeline_of, tree_of
from sparing.errors import UserError

_OUTSIDE: tuple[Role, ...] = ("embed", "tail", "head")


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A part of a model that is trained, frozen, moved or measured as one."""

    name: str
    """Canonical dotted path of the module for the body (``"model.layers.3"``), the role itself for the others."""

    role: Role
    """``embed`` is used before the body or between its blocks, ``tail`` after it, ``head`` gives the output."""

    index: int
    """Position within its role in order of use, from 0."""

    params: Mapping[str, nn.Parameter]
    """Canonical name -> parameter; a tied parameter is here once, under the first role that uses it."""


def find_blocks(
    model: nn.Module, *, body: str | Sequence[str] | None = None, example: object | None = None
) -> list[Block]:
    """Divide all parameters of a model into blocks.

    The body is the first of these that exists: what ``body`` says; the layers that a Hugging Face model declares; the
    one family of repeated blocks; for a plain ``Sequential`` without any, its inner children (the first is ``embed``,
    the last ``head``). Every parameter outside the body is ``embed`` if it is first used before the body ends, else
    ``tail`` or ``head``. The head is the output embedding of a Hugging Face language model, everything after the
    backbone of another Hugging Face model, and elsewhere the last module used if it holds a matrix.

    The order of use is read from a forward pass of a copy on fake tensors, where an input is known: from ``example``,
    or from the configuration of a Hugging Face model. What was not seen (no input known, or a model that needs data to
    choose its path) is ordered by registration: before the body's first block or after. Other towers of a multimodal
    model and their projectors, which text alone does not pass, come before the decoder: ``embed``.

    A ``UserError`` is raised if there are no repeated blocks or more than one kind, with a list of what was found; if
    ``body`` does not lead to blocks; if the model does not run on ``example``.

    Args:
        model: Any module; it is neither run nor changed.
        body: Dotted path of a ``ModuleList`` or ``Sequential``; or several paths, of blocks or of ``ModuleList``s.
        example: Input of the model (tensor, tuple of arguments or mapping), real, fake or meta.

    Returns:
        The blocks in order of use, a partition of ``named_parameters(model)``; roles without parameters are omitted.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> for block in find_blocks(mlp):
        ...     print(block.role, block.name, *block.params)
        embed embed 0.weight 0.bias
        body 2 2.weight 2.bias
        head head 4.weight 4.bias
    """
    facts = declared(model)
    plan, guess = _plan(model, body, facts)
    tree = tree_of(model, plan.blocks)
    times = timeline_of(tree, plan, _order(model, facts, example, [block.module for block in plan.blocks]))
    # by identity: a tied parameter has several names and one role
    roles = {key: role_of(key, tree, plan, times) for key in tree.params}
    if guess:
        roles |= dict.fromkeys(last_matrix(roles, tree, times), "head")
    held: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in named_parameters(model).items():
        role = roles[id(parameter)]
        part = plan.blocks[tree.body[id(parameter)]].path if role == "body" else f"<{role}>"
        held.setdefault(part, {})[name] = parameter
    paths = [path for at in body_order(tree, times) if (path := plan.blocks[at].path) in held]
    body_blocks = [Block(path, "body", index, held[path]) for index, path in enumerate(paths)]
    embed, tail, head = ([Block(role, role, 0, held[f"<{role}>"])] if f"<{role}>" in held else [] for role in _OUTSIDE)
    return embed + body_blocks + tail + head


def _order(model: nn.Module, facts: Declared | None, example: object | None, blocks: Sequence[nn.Module]) -> Order:
    """Watch a forward where an input is known."""
    if example is not None:
        order = observe(model, example, blocks)
        if order.error is not None:
            raise UserError(
                "example", got=f"{type(order.error).__name__}: {str(order.error)[:200]}",
                why="the model could not run on its shapes alone",
                do="pass what the model's forward accepts, or leave example out to go by the order of registration",
            ) from order.error  # fmt: skip
        return order
    known = example_for(facts.model.module) if facts else None
    if facts is None or known is None:
        return Order()
    # a wrapper may take other inputs than the Hugging Face model inside it: then that one is run alone
    order = observe(model, known, blocks)
    inner = facts.model.module
    return order if order.complete or inner is unwrap(model) else observe(inner, known, blocks)


def _plan(model: nn.Module, body: str | Sequence[str] | None, facts: Declared | None) -> tuple[Plan, bool]:
    """Choose the body and note the parts whose role is known; say whether the head is left to be guessed."""
    blocks = named_by_user(model, body) if body is not None else (facts and facts.blocks) or repeated(model)
    if blocks and facts:
        known = {"embed": facts.embed, "head": facts.head, "backbone": facts.backbone, "tower": facts.tower}
        return Plan(blocks=blocks, **known), False
    if blocks:
        return Plan(blocks=blocks), True
    # a plain stack of layers repeats nothing: its ends are embedding and head by position
    if len(row := sequence(model)) > 1:
        return Plan(blocks=row[1:-1], embed=row[0].path, head=row[-1].path), False
    raise UserError(
        "model", got=type(unwrap(model)).__name__, why="it has no repeated blocks",
        do=f"pass body=, the path of a list or the paths of the blocks; there is {describe(model)}",
    )  # fmt: skip
