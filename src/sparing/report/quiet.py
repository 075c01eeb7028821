"""Libraries that talk: while they are imported, and where a result of ours says the same."""

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


@contextlib.contextmanager
def errors_alone(library: str) -> Iterator[None]:
    """Of a library's log only errors."""
    logger = logging.getLogger(library)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
