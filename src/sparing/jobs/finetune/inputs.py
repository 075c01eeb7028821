"""Everything a run reads, opened and checked before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparing.blocks import named_parameters
from sparing.errors import UserError, require
from sparing.jobs import hub
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.lm import models
from sparing.jobs.lm.adapters import adapter_config
from sparing.jobs.lm.files import Source, read
from sparing.jobs.lm.labels import Tokens, all_tokens, render
from sparing.jobs.lm.losses import isolates_documents
from sparing.jobs.lm.mixture import joined
from sparing.jobs.lm.packing import Packed, pack
from sparing.jobs.lm.records import Chat, Example, Pair, Text, split
from sparing.jobs.lm.templates import TODAY, tells_date
from sparing.jobs.torch_state import device_for
from sparing.layersample.lowbit import operations

WORDS = 12  # words of a text that serve as a prompt


@dataclass(slots=True)
class Inputs:
    """A model, its tokenizer, and the rows to train and measure on."""

    model: nn.Module  # on its device, in its number format, as it lies on the disk
    tokenizer: Any
    data: Packed
    held_out: Packed | None
    prompts: tuple[str, ...]  # texts to continue before and after
    templated: bool  # whether a chat template wrote the prompts, special tokens included
    notes: list[str]  # what of the files is not as it was given
    sources: list[dict[str, Any]]  # name of each file, and what came of it


def opening(tokenizer: Any, example: Example) -> str:
    """The part of an example that can be a prompt: of a text its first words, of a chat all before its last answer."""
    if isinstance(example, Pair):
        return example.prompt
    if isinstance(example, Text):
        return " ".join(example.text.split()[:WORDS])
    return render(tokenizer, example.messages[: example.learnt[-1]], tools=example.tools, opened=True)


def prompts_for(tokenizer: Any, settings: Finetune, examples: Sequence[Example]) -> tuple[str, ...]:
    """Prompts of a run as the model reads them: those given, or the openings of two examples."""
    if not settings.max_new_tokens:
        return ()
    if not settings.prompts:
        return tuple(filter(None, (opening(tokenizer, example) for example in examples[:2])))
    if isinstance(examples[0], Chat):
        turns = [[{"role": "user", "content": prompt}] for prompt in settings.prompts]
        return tuple(render(tokenizer, turn, opened=True) for turn in turns)
    return settings.prompts


class _Reader:
    """Sources as rows of tokens, with notes on what was left out or changed on the way."""

    def __init__(self, tokenizer: Any, settings: Finetune) -> None:
        """Begin."""
        self.tokenizer, self.settings = tokenizer, settings
        self.pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self.notes: list[str] = []
        self.sources: list[dict[str, Any]] = []
        self.prompting: list[Example] = []  # examples of the first source whose openings may be prompts

    def rows(self, source: Source, share: float) -> tuple[Packed, Packed | None]:
        """Rows to train on, and those of the share that is held out."""
        settings, refused = self.settings, list(source.left_out)
        parts = split(source.examples, share, settings.seed)
        tokens = [all_tokens(self.tokenizer, part, refused) for part in parts]
        if not tokens[0]:
            raise refused[0]
        self._note(source, refused, tokens)
        lost = {error.what for error in refused}
        self.prompting = self.prompting or [one for part in parts[::-1] for one in part if one.where not in lost]
        found = [
            pack(part, length=settings.length, pad=self.pad, packing=settings.packing) if part else None
            for part in tokens
        ]
        counts = {"records": len(source.examples) + len(source.left_out), "left_out": len(refused)}
        train, held = found
        assert train is not None
        self.sources.append({"file": source.name, **counts, "rows": train.rows, "held_out": held.rows if held else 0})
        return train, held

    def _note(self, source: Source, refused: Sequence[UserError], tokens: Sequence[Sequence[Tokens]]) -> None:
        name, count = source.name, len(source.examples) + len(source.left_out)
        if source.ignored:
            self.notes.append(f"{name}: these fields are not used: {', '.join(source.ignored)}")
        for why, times in Counter(error.why for error in refused).most_common():
            first = next(error for error in refused if error.why == why)
            said = f"{times:,} of {count:,} records {'is' if times == 1 else 'are'} left out"
            self.notes.append(f"{name}: {said}: {why} (first: {first.what})")
        if not isinstance(source.examples[0], Chat):
            return
        if more := sum(map(len, tokens)) - count + len(refused):
            said = f"{more:,} {'record' if more == 1 else 'records'} more, for the chat template rewrites earlier turns"
            self.notes.append(f"{name}: {said}: each is learnt as the model reads it when it is asked for it")
        if tells_date(self.tokenizer):
            self.notes.append(f"{name}: the chat template tells the day; every conversation says {TODAY:%d %B %Y}")
        ends = set(self.tokenizer.get_added_vocab().values())
        if ends and not ends.intersection(tokens[0][0].labels):
            self.notes.append(f"{name}: the chat template closes no answer with an end token, so none is learnt")


def _check_fit(model: nn.Module, settings: Finetune, parts: Sequence[Packed]) -> None:
    limit = models.most_positions(model)
    fits = limit is None or settings.length <= limit
    require(fits, "length", settings.length, f"the model has {limit} positions", f"pass --length {limit} or less")
    known, highest = models.vocabulary(model), max(int(part.ids.max()) for part in parts)
    why = f"the model knows {known} tokens, the tokenizer gives token {highest}"
    require(highest < known, "model", settings.model, why, "use the tokenizer that belongs to the model")
    if any(part.positions is not None for part in parts):
        why = "records that share a row would see each other: this model cannot be told where one begins"
        do = "pass --no-packing, or --attention documents"
        require(isolates_documents(model), "packing", type(model).__name__, why, do)


def _check_adapter(settings: Finetune, folder: Path, notes: list[str]) -> None:
    """Read the settings of an adapter; its tensors are held to the model where they are loaded."""
    made_for = Path(str(adapter_config(folder).base_model_name_or_path or "")).name
    # a hub's name or a path of another machine: the last part alone can be the same
    own = settings.model if hub.name_of(settings.model) else settings.model.resolve()
    if made_for and made_for.lower() != hub.title(own).lower():
        notes.append(f"{folder.name}: the adapter was made for {made_for}, and goes on in {hub.title(settings.model)}")


def gather(settings: Finetune) -> Inputs:
    """Read and check everything; nothing is written."""
    device = device_for(settings.device)
    if settings.weights is not None:
        operations()  # refuses where it is not installed, before anything is read
    sources = [read(path) for path in settings.data]
    apart = None if settings.held_out_data is None else read(settings.held_out_data, held_out=True)
    # Before the tokenizer, whose error would hide what is wrong with the directory.
    models.config_of(settings.model)
    tokenizer = models.load_tokenizer(settings.model)
    reader = _Reader(tokenizer, settings)
    measured: list[Packed | None]
    if apart is not None:
        # first, for its examples are the prompts
        measured = [reader.rows(apart, 0.0)[0]]
        reader.sources.clear()
        trained = [reader.rows(source, 0.0)[0] for source in sources]
    else:
        trained, measured = map(list, zip(*(reader.rows(one, settings.held_out) for one in sources), strict=True))
    held = [part for part in measured if part is not None]
    data = joined(trained, pad=reader.pad, shares=settings.mix)
    held_out = joined(held, pad=reader.pad) if held else None
    if settings.method == "lora" and settings.lora.adapter is not None:
        _check_adapter(settings, settings.lora.adapter, reader.notes)
    dtype = getattr(torch, settings.dtype)
    # the device may not hold the model before its blocks are quantised
    place = device if settings.weights is None else "cpu"
    model = models.load_model(settings.model, dtype=dtype, device=place, attention=settings.attention)
    _check_fit(model, settings, [data] if held_out is None else [data, held_out])
    reader.notes += [] if settings.keep_zeros else filling_zeros(model, lora=settings.method == "lora")
    prompts = prompts_for(tokenizer, settings, reader.prompting)
    templated = isinstance(reader.prompting[0], Chat) and bool(getattr(tokenizer, "chat_template", None))
    return Inputs(model, tokenizer, data, held_out, prompts, templated, reader.notes, reader.sources)


def filling_zeros(model: nn.Module, *, lora: bool) -> list[str]:
    """What to tell who trains a pruned model without asking for its zeros to stay."""
    matrices = {name: p.detach() for name, p in named_parameters(model).items() if p.ndim > 1}
    # a padding row is no pruning: a tenth, where ``--keep-zeros`` takes a hundredth
    sparse = [p for p in matrices.values() if p.numel() / 10 < p.numel() - int(p.count_nonzero()) < p.numel()]
    if not sparse:
        return []
    share = 1 - sum(int(p.count_nonzero()) for p in sparse) / sum(p.numel() for p in sparse)
    told = "merging what LoRA adds will fill them" if lora else "training will fill them; --keep-zeros keeps them"
    return [f"{len(sparse)} matrices of the model are pruned ({share:.0%} zeros): {told}"]
