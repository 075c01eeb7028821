"""What to say where the price of a step is not known."""

from __future__ import annotations

from sparing.errors import UserError


def reason(error: Exception) -> str:
    """Why a prediction failed, in a clause that begins with "not predicted"."""
    if isinstance(error, UserError):
        return f"not predicted: {error}"
    lines = str(error).strip().splitlines()
    return f"not predicted: {type(error).__name__}: {' '.join(lines[0].split())[:160] if lines else 'without a word'}"
