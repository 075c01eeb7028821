"""What ``sparing.valley`` says of trained nets: five training seeds, every number with its interval.

Run ``python -m benchmarks.valley`` for everything (hours on two cores), or one part of it with ``--only``. A finished
row is not measured again; trained nets lie in a folder of the user's cache, not in the repository.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

_PLACES = {
    "scans": ("noises", "ratio", "groups", "special", "scales", "hyper", "statistics", "fits"),
    "soups": ("soups", "forecast", "line"),
    "lines": ("peers",),
    "steering": ("steering",),
    "strangers": ("strangers",),
    "soft": ("soft",),
    "soft_text": ("soft_text",),
    "signals": ("signals",),
    "resnet50": ("resnet50",),
    "text": ("text", "merges"),
    "search": ("search",),
    "precision": ("precision",),
    "speed": ("speed",),
    "coverage": ("coverage",),
    "landscapes": ("landscapes",),
}
PARTS: dict[str, Callable[[], None]] = {
    name: lambda place=place, name=name: getattr(import_module(f"benchmarks.valley.{place}"), name)()
    for place, names in _PLACES.items()
    for name in names
}
"""Part -> what measures it."""
