"""What a language model writes: greedy continuations of prompts, and samples from a named random stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparing.jobs.lm.models import most_positions
from sparing.jobs.torch_state import device_of, measuring, seeded

TEMPERATURE, TOP = 0.8, 40  # how samples are drawn: logits over this, among so many likeliest tokens


def _ids(tokenizer: Any, text: str, special: bool) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def _generate(model: Any, ids: Tensor, **how: Any) -> Tensor:
    """Ids of a prompt and what follows it, shape (n,)."""
    from transformers import GenerationConfig

    ids = ids.to(device_of(model))
    new: Tensor = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=GenerationConfig(**how)
    )
    return new[0]


def continuations(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int, special: bool = True
) -> list[str]:
    """Continue each prompt greedily, so that before and after differ by training alone.

    ``special``: whether the tokenizer adds special tokens; a rendered conversation has them already.
    """
    if max_new_tokens == 0:
        return []
    end = tokenizer.eos_token_id
    pad = next((i for i in (tokenizer.pad_token_id, end) if i is not None), 0)
    # A prompt that leaves no room for its continuation keeps its end, which the continuation depends on most.
    limit = most_positions(model) or 2**30
    # where the model has no place for both, each gets half
    room = max(limit // 2, limit - max_new_tokens)
    how = {"do_sample": False, "eos_token_id": end, "pad_token_id": pad}
    texts = []
    with measuring(model):
        for prompt in prompts:
            ids = _ids(tokenizer, prompt, special)[:, -room:]
            start = ids.shape[1]
            new = _generate(model, ids, max_new_tokens=min(max_new_tokens, limit - start), **how)
            # Decoded alone, some tokenizers would drop the first space of what was added.
            before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (new[:start], new))
            follows = whole.startswith(before)
            texts.append(whole[len(before) :] if follows else tokenizer.decode(new[start:], skip_special_tokens=True))
    return texts


def sample_texts(model: Any, tokenizer: Any, openings: Sequence[str], *, length: int, seed: int) -> list[str]:
    """Sample continuations of ``openings`` from a named random stream, up to ``length`` tokens with the opening."""
    end = tokenizer.eos_token_id
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP, "eos_token_id": end, "pad_token_id": end or 0}
    texts = []
    with measuring(model):
        for index, opening in enumerate(openings):
            ids = _ids(tokenizer, opening, special=False)[:, : max(1, length - 1)]
            with seeded(seed, "sample", index, device=device_of(model)):
                new = _generate(model, ids, max_new_tokens=max(1, length - ids.shape[1]), **how)
            texts.append(tokenizer.decode(new[ids.shape[1] :], skip_special_tokens=True))
    return texts
