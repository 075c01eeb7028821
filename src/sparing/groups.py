"""Parameter groups as plain data: names and options, changed by functions from groups to groups, bound at the end.

Every function raises ``UserError`` for a name that no group holds, so a misspelt one is never ignored.
Parameters of equal options are always in one group; groups and names are in order of first appearance.

Example:
    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    >>> groups = scale(groups_of(model, lr=1e-3, weight_decay=0.1), {"1.weight": 0.25})
    >>> optimizer = torch.optim.AdamW(bind(groups, model))
    >>> [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
    [(1, 0.001), (1, 0.00025), (2, 0.001)]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sparing.blocks import named_parameters, tied
from sparing.errors import UserError, require


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that an optimizer treats alike. No tensor in it: it can be printed, compared, saved and sent."""

    names: tuple[str, ...]  # canonical parameter names, as ``sparing.blocks.named_parameters`` gives them
    options: Mapping[str, Any]  # the optimizer's options by name: ``lr`` (step size), ``weight_decay``, ``betas`` …


Groups = Sequence[Group]


def groups_of(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, decay_vectors: bool = False, **options: Any
) -> tuple[Group, ...]:
    """Return the groups of all parameters of a model, frozen ones too.

    A frozen parameter has no gradient and every optimizer of torch passes it over, so it may thaw later.

    Example:
        >>> for group in groups_of(nn.Linear(2, 2), lr=0.1, weight_decay=0.01):
        ...     print(group)
        Group(names=('weight',), options={'lr': 0.1, 'weight_decay': 0.01})
        Group(names=('bias',), options={'lr': 0.1, 'weight_decay': 0.0})
    """
    for what, value in (("lr", lr), ("weight_decay", weight_decay)):
        require(value >= 0, what, value, "a step needs a number >= 0", f"pass {what} >= 0")
    _require_free(options)
    decays = {name: decay_vectors or p.ndim > 1 for name, p in named_parameters(model).items()}
    return _regroup(
        (name, {"lr": lr, "weight_decay": weight_decay if decay else 0.0, **options}) for name, decay in decays.items()
    )


def scale(groups: Groups, factors: Mapping[str, float], *, option: str = "lr") -> tuple[Group, ...]:
    """Multiply an option of some parameters; scaling twice is scaling by the products."""
    _require_known(groups, factors)

    def scaled(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if name not in factors:
            return options
        if option not in options:
            raise UserError(
                "option", got=repr(option), why=f"the group of {name!r} has {', '.join(options)}", do="name one of them"
            )
        return {**options, option: options[option] * factors[name]}

    return _regroup((name, scaled(name, options)) for name, options in _flat(groups))


def keep(groups: Groups, names: Collection[str]) -> tuple[Group, ...]:
    """Keep only these parameters."""
    wanted = _require_known(groups, names)
    return _regroup((name, options) for name, options in _flat(groups) if name in wanted)


def drop(groups: Groups, names: Collection[str]) -> tuple[Group, ...]:
    """Omit these parameters."""
    unwanted = _require_known(groups, names)
    return _regroup((name, options) for name, options in _flat(groups) if name not in unwanted)


def override(groups: Groups, names: Collection[str], **options: Any) -> tuple[Group, ...]:
    """Set options of some parameters."""
    _require_free(options)
    chosen = _require_known(groups, names)
    return _regroup((name, {**old, **options} if name in chosen else old) for name, old in _flat(groups))


def bind(groups: Groups, model: nn.Module) -> list[dict[str, Any]]:
    """Put the parameters in: what an optimizer of torch takes as its first argument.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> torch.optim.SGD(bind(groups_of(layer, lr=0.1), layer)).param_groups[0]["param_names"]
        ['weight', 'bias']
    """
    params, aliases, seen = named_parameters(model), tied(model), set[str]()
    for name, _ in _flat(groups):
        require(name not in seen, "groups", f"{name!r} twice", "it would be stepped twice", "drop it from one")
        if name not in params:
            hint = f"its owner {aliases[name]!r}" if name in aliases else "a name of named_parameters(model)"
            raise UserError("groups", got=repr(name), why="the model has no parameter of that name", do=f"use {hint}")
        seen.add(name)
    return [
        {**group.options, "params": [params[name] for name in group.names], "param_names": list(group.names)}
        for group in groups
    ]


def _flat(groups: Groups) -> list[tuple[str, Mapping[str, Any]]]:
    """Return every name with its options, in order."""
    return [(name, group.options) for group in groups for name in group.names]


def _regroup(pairs: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[Group, ...]:
    """Gather names of equal options; groups and names stay in order of first appearance."""
    gathered: dict[Any, tuple[Mapping[str, Any], list[str]]] = {}
    for name, options in pairs:
        # lists (betas from JSON) compare by content; tensors only by identity, since == gives a tensor
        frozen = ((option, tuple(value) if isinstance(value, list) else value) for option, value in options.items())
        key = tuple(sorted(frozen))
        gathered.setdefault(key, (options, []))[1].append(name)
    return tuple(Group(tuple(names), dict(options)) for options, names in gathered.values())


def _require_known(groups: Groups, names: Iterable[str]) -> set[str]:
    """Return the names as a set, all of them in some group."""
    wanted = {names} if isinstance(names, str) else set(names)
    if strange := sorted(wanted - {name for name, _ in _flat(groups)}):
        raise UserError(
            "parameter name", got=f"{strange[0]!r}" + (f" and {len(strange) - 1} more" if len(strange) > 1 else ""),
            why="no group holds it", do="use the canonical names of sparing.blocks.named_parameters",
        )  # fmt: skip
    return wanted


def _require_free(options: Mapping[str, Any]) -> None:
    """Refuse options that would overwrite what ``bind`` fills in."""
    if taken := sorted(options.keys() & {"params", "param_names"}):
        raise UserError("option", got=repr(taken[0]), why="torch keeps the parameters there", do="choose another name")
