"""What a model has learnt: held-out loss, continuations of a prompt, movement of its blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import find_blocks
from sparing.jobs.live import measuring
from sparing.jobs.lm.stored import Stored

_PIECE = 2**20  # elements compared at once


def continuations(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int, special: bool = True
) -> list[str]:
    """Continue each prompt greedily, so that before and after differ by training alone.

    ``special``: whether the tokenizer adds special tokens; a rendered conversation has them already.
    """
    if max_new_tokens == 0:
        return []
    from transformers import GenerationConfig

    end = tokenizer.eos_token_id
    pad = next((i for i in (tokenizer.pad_token_id, end) if i is not None), 0)
    plan = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=end, pad_token_id=pad)
    # A prompt that leaves no room for its continuation keeps its end, which the continuation depends on most.
    room = max(1, (getattr(model.config, "max_position_embeddings", None) or 2**30) - max_new_tokens)
    found = []
    with measuring(model):
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special, verbose=False)["input_ids"]
            ids = ids[:, -room:].to(model.device)
            new = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=plan)
            found.append(_added(tokenizer, new[0], ids.shape[1]))
    return found


def _added(tokenizer: Any, ids: Tensor, start: int) -> str:
    """The text that the tokens from ``start`` add; decoded alone, some tokenizers would drop its first space."""
    before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:start], ids))
    added: str = whole[len(before) :]
    return added if whole.startswith(before) else tokenizer.decode(ids[start:], skip_special_tokens=True)


def movement(model: nn.Module, original: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Per block in order of use, ``moved`` = ‖Δθ‖ / ‖θ‖: 2-norms in float64 over its parameters, θ before training."""
    rows = []
    for block in find_blocks(model):
        pairs = (
            original.beside(model, block.params)
            if isinstance(original, Stored)
            else [(value.detach(), name) for name, value in block.params.items()]
        )
        moved = size = 0.0
        for now, name in pairs:
            for part, was in _pieces(now, original[name]):
                moved += (part - was).square().sum().item()
                size += was.square().sum().item()
        ratio = math.sqrt(moved / size) if size else math.nan
        rows.append({"block": block.name, "role": block.role, "index": block.index, "moved": ratio})
    return rows


def _pieces(now: Tensor, was: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors in float64, piece by piece: a whole embedding would need eight bytes an element, twice."""
    pieces = (torch.split(tensor.flatten(), _PIECE) for tensor in (now, was.to(now.dtype)))
    for part, before in zip(*pieces, strict=True):
        yield part.double().cpu(), before.double().cpu()
