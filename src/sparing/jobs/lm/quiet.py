"""Imports of libraries that talk while they are imported."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """No warnings and no log lines: torchao and bitsandbytes tell which of their kernels they did not find.

    transformers and peft import both where they are installed, for models that nobody quantized.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
