"""Names of a package that are imported when first asked for, so that help and refusals need not wait for torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def names_from(package: str, **homes: str) -> Callable[[str], Any]:
    """What a package takes for ``__getattr__``: each name's module, or ``module.name`` where it is called otherwise."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, _, known_as = homes[name].partition(":")
        return getattr(import_module(home if "." in home else f"{package}.{home}"), known_as or name)

    return find
