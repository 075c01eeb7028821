"""Keep transformers' own progress bars out of ours."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet_bars() -> Iterator[None]:
    """Switch transformers' bars for loading, saving and reading GGUF off, and back to what they were on exit."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    shown, bar = logging.is_progress_bar_enabled(), getattr(gguf, "tqdm", None)
    logging.disable_progress_bar()
    # this one bar does not obey the switch
    if bar is not None:
        gguf.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        if bar is not None:
            gguf.tqdm = bar
        if shown:
            logging.enable_progress_bar()
