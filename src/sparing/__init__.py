"""Train deep networks with little: little memory, a slow network, few tuning runs, data that may not be pooled.

Every technique has the same three sides: *predict* the price from shapes alone, *apply* it to a model nobody edited,
*show* the measured numbers beside the prediction.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparing.blocks import Block, find_blocks
    from sparing.errors import UserError
    from sparing.seeds import stream

__all__ = ["Block", "UserError", "find_blocks", "stream"]

_HOMES = {"Block": "blocks", "UserError": "errors", "find_blocks": "blocks", "stream": "seeds"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: the command line speaks before torch is loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
