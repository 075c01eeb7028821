"""Entries and rules of a plan as plain JSON values, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from sparing.errors import UserError
from sparing.scaling.entries import Entry
from sparing.scaling.rules import RULES, CompleteP, Factors, Rule


def entries_to_json(entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """Return entries as JSON values, in order."""
    return [asdict(entry) | {"shape": list(entry.shape)} for entry in entries.values()]


def entries_from_json(plain: Iterable[Mapping[str, Any]]) -> dict[str, Entry]:
    """Read what ``entries_to_json`` wrote: canonical name -> entry."""
    read = [Entry(**{**e, "shape": tuple(e["shape"]), "factors": Factors(**e["factors"])}) for e in plain]
    return {entry.name: entry for entry in read}


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
