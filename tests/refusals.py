"""A call that must be refused with a message; one line where pytest's block takes two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparing.errors import UserError


def refused(match: str, call: Callable[..., Any], /, *given: Any, **options: Any) -> None:
    """Require that a call raises ``UserError`` with a message that holds the pattern."""
    with pytest.raises(UserError, match=match):
        call(*given, **options)
