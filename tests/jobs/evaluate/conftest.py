"""A second model to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zoo


@pytest.fixture
def tuned_dir(tmp_path: Path, tokenizer) -> Path:
    """The model of ``model_dir`` with other weights."""
    zoo.redraw_(zoo.llama(layers=3, vocab=258, dtype=torch.float32), seed=7).save_pretrained(tmp_path / "tuned")
    tokenizer.save_pretrained(tmp_path / "tuned")
    return tmp_path / "tuned"
