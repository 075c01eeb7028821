"""The finished model as an ordinary transformers checkpoint: dense zeros, multipliers in the weights, no hooks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from sparing.jobs.disk import write_folder
from sparing.jobs.lm.models import save_pretrained
from sparing.jobs.pretrain.state import TrainState
from sparing.scaling.backends import convert_
from sparing.scaling.fold import fold_
from sparing.scaling.live import masks_of


def plain_copy(state: TrainState) -> nn.Module:
    """A copy of the model that needs nothing of this package: evaluation mode, masked weights zero."""
    model = copy.deepcopy(state.model)
    model.zero_grad(set_to_none=True)  # gradients were copied along
    masks = masks_of(model)
    convert_(model, masks, backend="dense")
    fold_(model, masks)
    return model.eval()


def save_model(model: Any, tokenizer: Any, target: Path) -> None:
    """Write model and tokenizer, whole or not at all."""
    write_folder(target, lambda draft: save_pretrained(model.cpu(), tokenizer, draft))
