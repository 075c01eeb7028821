"""Everything a run reads, opened and checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparing.errors import UserError, require
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.lm import models
from sparing.jobs.lm.labels import all_tokens, render
from sparing.jobs.lm.losses import isolates_documents
from sparing.jobs.lm.packing import Packed, pack
from sparing.jobs.lm.records import Chat, Example, Pair, Text, read_examples, split
from sparing.jobs.torch_state import device_for

WORDS = 12  # words of a text that serve as a prompt


@dataclass(slots=True)
class Inputs:
    """A model, its tokenizer, and the rows to train and measure on."""

    model: nn.Module  # on its device, in its number format, as it lies on the disk
    tokenizer: Any
    data: Packed
    held_out: Packed | None
    prompts: tuple[str, ...]  # texts to continue before and after
    chat: bool  # whether the prompts are renderings of conversations, special tokens included


def opening(tokenizer: Any, example: Example) -> str:
    """The part of an example that can be a prompt: of a text its first words, of a chat all before its last answer."""
    if isinstance(example, Pair):
        return example.prompt
    if isinstance(example, Text):
        return " ".join(example.text.split()[:WORDS])
    last = max(index for index, (role, _) in enumerate(example.messages) if role == "assistant")
    return render(tokenizer, example.messages[:last], opened=True)


def prompts_for(tokenizer: Any, settings: Finetune, examples: Sequence[Example]) -> tuple[str, ...]:
    """Prompts of a run as the model reads them: those given, or the openings of two examples."""
    if not settings.max_new_tokens:
        return ()
    if not settings.prompts:
        return tuple(filter(None, (opening(tokenizer, example) for example in examples[:2])))
    if isinstance(examples[0], Chat):
        return tuple(render(tokenizer, [("user", prompt)], opened=True) for prompt in settings.prompts)
    return settings.prompts


def _rows(tokenizer: Any, examples: Sequence[Example], settings: Finetune, path: Path) -> Packed:
    try:
        found = all_tokens(tokenizer, examples)
    except UserError as error:
        raise UserError(f"{path.name}, {error.what}", got=error.got, why=error.why, do=error.do) from None
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    return pack(found, length=settings.length, pad=pad, packing=settings.packing)


def _check_fit(model: nn.Module, settings: Finetune, parts: Sequence[Packed]) -> None:
    limit = models.most_positions(model)
    fits = limit is None or settings.length <= limit
    require(fits, "length", settings.length, f"the model has {limit} positions", f"pass --length {limit} or less")
    known, highest = models.vocabulary(model), max(int(part.ids.max()) for part in parts)
    why = f"the model knows {known} tokens, the tokenizer gives token {highest}"
    require(highest < known, "model", settings.model, why, "use the tokenizer that belongs to the model")
    if any(part.positions is not None for part in parts):
        why = "records that share a row would see each other: this model cannot be told where one begins"
        require(isolates_documents(model), "packing", type(model).__name__, why, "pass --no-packing")


def gather(settings: Finetune) -> Inputs:
    """Read and check everything; nothing is written."""
    device = device_for(settings.device)
    examples = read_examples(settings.data)
    train, held = split(examples, 0.0 if settings.held_out_data else settings.held_out, settings.seed)
    measured = settings.held_out_data or settings.data
    if settings.held_out_data is not None:
        held = read_examples(settings.held_out_data)
    # Before the tokenizer, whose error would hide what is wrong with the directory.
    models.config_of(settings.model)
    tokenizer = models.load_tokenizer(settings.model)
    data = _rows(tokenizer, train, settings, settings.data)
    held_out = _rows(tokenizer, held, settings, measured) if held else None
    model = models.load_model(settings.model, dtype=getattr(torch, settings.dtype), device=device)
    _check_fit(model, settings, [data] if held_out is None else [data, held_out])
    prompts = prompts_for(tokenizer, settings, held or train)
    return Inputs(model, tokenizer, data, held_out, prompts, chat=isinstance(examples[0], Chat))
