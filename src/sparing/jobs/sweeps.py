"""What verbs that keep trials in an optuna study share."""

from __future__ import annotations

from typing import Any

from sparing.errors import UserError


def needed() -> Any:
    """Return optuna, or say how to install it."""
    try:
        import optuna
    except ImportError:
        do = "run: pip install 'sparing[sweep]'"
        raise UserError("optuna", got="no such package", why="it keeps the runs of a study", do=do) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
