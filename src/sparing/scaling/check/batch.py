"""Default batches: for language models, image classifiers and chains that begin with a Linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.errors import UserError, require
from sparing.seeds import stream

Batch = Mapping[str, Any] | tuple[Tensor, Tensor]
"""Keyword arguments of the model, or inputs and classes."""

# Sequences or images, tokens in a sequence, and vectors (counts). Few, because an update is coherent with a layer's
# inputs only where there are fewer different ones than live inputs; outputs of a ReLU have a mean, so 64 vectors pass.
ROWS, LENGTH, VECTORS = 2, 4, 64


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that the model computes itself, or cross-entropy for a pair (inputs, classes)."""
    if isinstance(batch, Mapping):
        found = getattr(model(**batch), "loss", None)
        why = f"{type(model).__name__} returns no loss for it"
        require(
            found is not None, "batch", f"a mapping of {', '.join(batch)}", why, "give it labels too, or pass loss="
        )
        return found if isinstance(found, Tensor) else torch.as_tensor(found)
    inputs, classes = batch
    output = model(inputs)
    return F.cross_entropy(output.flatten(0, -2), classes.flatten())


def check_batch(batch: object) -> None:
    """Refuse what ``loss_of`` cannot take, such as inputs without targets or the list that a DataLoader gives."""
    pair = isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch)
    if isinstance(batch, Tensor):
        got = f"a tensor of shape {tuple(batch.shape)}"
    else:
        got = f"{type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, tuple) else ''}"
    why = "it does not say what is input and what is target"
    do = "pass a tuple (inputs, classes), a mapping of the model's arguments with labels, or loss= of your own"
    require(pair or isinstance(batch, Mapping), "batch", got, why, do)


def default_batch(model: nn.Module) -> Batch:
    """Return random inputs and targets that fit the model: the same for models of equal inputs and outputs."""
    config: Any = getattr(model, "config", None)
    generator = stream(0, "coordinate", "batch")
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    if (vocabulary := getattr(config, "vocab_size", None)) is not None:
        tokens = torch.randint(vocabulary, (ROWS, LENGTH), generator=generator)
        return {"input_ids": tokens, "labels": tokens}
    if (side := getattr(config, "image_size", None)) is not None:
        shape = (ROWS, config.num_channels, side, side)
        labels = torch.randint(config.num_labels, (ROWS,), generator=generator)
        return {
            "pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype),
            "labels": labels,
        }
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    convolutional = any(isinstance(module, nn.modules.conv._ConvNd | nn.Embedding) for module in model.modules())
    if not linear or convolutional:
        do = "pass batch=(inputs, classes), or batch={...} and loss="
        raise UserError("batch", got="none", why=f"{type(model).__name__} does not say what it takes", do=do)
    inputs = torch.randn(VECTORS, linear[0].in_features, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(linear[-1].out_features, (VECTORS,), generator=generator)
