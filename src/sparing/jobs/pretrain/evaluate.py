"""What a model has learnt: loss on text it has not seen, per token and per byte, and text of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparing.jobs.live import device_of, measuring, seeded
from sparing.jobs.lm.losses import Measure, held_out_loss, perplexity
from sparing.jobs.pretrain.inputs import Part

TEMPERATURE, TOP = 0.8, 40  # how samples are drawn: logits over this, among so many likeliest tokens


def evaluate(model: nn.Module, part: Part, *, batch: int, loss_of: Measure = held_out_loss) -> dict[str, Any]:
    """Held-out ``loss`` (nat/token), ``bits_per_byte`` (comparable between tokenizers), ``perplexity``, ``tokens``."""
    loss, tokens = loss_of(model, part.rows, batch=batch)
    bits = loss / math.log(2) / part.bytes_per_token
    return {"loss": loss, "bits_per_byte": bits, "perplexity": perplexity(loss), "tokens": tokens}


def sample_texts(model: Any, tokenizer: Any, openings: Sequence[str], *, length: int, seed: int) -> list[str]:
    """Sample continuations of ``openings`` from a named random stream, up to ``length`` tokens with the opening."""
    from transformers import GenerationConfig

    end = tokenizer.eos_token_id
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": TOP, "eos_token_id": end, "pad_token_id": end or 0}
    texts = []
    with measuring(model):
        for index, opening in enumerate(openings):
            ids = tokenizer(opening, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"]
            ids = ids[:, : max(1, length - 1)].to(device_of(model))
            plan = GenerationConfig(max_new_tokens=max(1, length - ids.shape[1]), **how)
            with seeded(seed, "sample", index, device=device_of(model)):
                new = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=plan)
            texts.append(tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True))
    return texts
