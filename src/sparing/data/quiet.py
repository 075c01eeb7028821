"""Keep transformers' own progress bars out of ours."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet_bars() -> Iterator[None]:
    """Switch transformers' bars for loading and saving off, and back to what they were on exit.

    Yields:
        Nothing.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
