"""A plan as plain JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from sparing.errors import UserError
from sparing.scaling.entries import Entry
from sparing.scaling.rules import RULES, CompleteP, Factors, Rule

if TYPE_CHECKING:
    from sparing.scaling.plan import Plan


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    others = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in {"entries", "rule"}}
    lines = [asdict(line) | {"shape": list(line.shape)} for line in plan.entries.values()]
    return {"entries": lines, "rule": rule_to_json(plan.rule), **others}


def from_json(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a plan."""
    lines = [
        Entry(**line | {"shape": tuple(line["shape"]), "factors": Factors(**line["factors"])})
        for line in plain["entries"]
    ]
    return {**plain, "entries": {line.name: line for line in lines}, "rule": rule_from_json(plain["rule"])}


def rule_to_json(rule: Rule) -> dict[str, Any]:
    """Return a rule's name and settings."""
    settings: dict[str, Any] = asdict(rule) if is_dataclass(rule) and not isinstance(rule, type) else {}
    return {"name": type(rule).__name__, **settings}


def rule_from_json(plain: Mapping[str, Any]) -> Rule:
    """Make a rule from its name and settings."""
    settings = {key: value for key, value in plain.items() if key != "name"}
    if settings.get("depth") is not None:
        settings["depth"] = CompleteP(**settings["depth"])
    known = {cls.__name__: cls for cls in RULES}
    if plain["name"] not in known:
        raise UserError("rule", got=plain["name"], why="no such rule", do=f"one of {', '.join(known)}")
    return known[plain["name"]](**settings)
