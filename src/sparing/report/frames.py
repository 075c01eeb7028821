"""Tables for those who go on computing: a pandas DataFrame where pandas is installed, else the rows themselves."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any


def as_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame, or as a list of dictionaries where pandas is not installed.

    Example:
        >>> len(as_frame([{"lambda": 0.0, "loss": 0.3}]))
        1
    """
    if importlib.util.find_spec("pandas") is None:
        return [dict(row) for row in rows]
    return importlib.import_module("pandas").DataFrame(list(rows))
