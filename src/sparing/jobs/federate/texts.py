"""Clients that hold texts, and the language model that they train: LoRA on a local folder, or all of its weights."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparing.blocks.modes import evaluating
from sparing.errors import UserError, require
from sparing.federated.placement import device_of
from sparing.jobs.disk import digest, write_folder
from sparing.jobs.federate.inputs import Inputs, parted
from sparing.jobs.federate.settings import Settings
from sparing.jobs.lm import models
from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.jobs.lm.files import files_of, read, rows
from sparing.jobs.lm.labels import IGNORED, Tokens, all_tokens
from sparing.jobs.lm.packing import Packed, pack
from sparing.jobs.lm.records import Example, NothingToLearnError, example


@dataclass(frozen=True, slots=True)
class Adapted:
    """Makes the model that clients train; picklable, so that worker processes get it."""

    model: Path
    lora: Lora | None  # None: all weights train
    seed: int

    def __call__(self) -> nn.Module:
        """Load the model; with LoRA all else is frozen."""
        model = models.load_model(self.model, dtype=torch.float32)
        config: Any = model.config
        # training reads every row once, so what is kept for later tokens would only take memory
        config.use_cache = False
        return model if self.lora is None else with_adapters_(model, self.lora, self.seed)


@dataclass(frozen=True, slots=True, eq=False)
class NextTokens:
    """Accuracy and mean loss of a language model on held-out rows, over all labels."""

    inputs: Tensor  # token ids, int64, (rows, length)
    labels: Tensor  # ids where they are learnt, −100 elsewhere, int64, (rows, length); not shifted
    batch: int = 16  # rows at a time

    @property
    def targets(self) -> Tensor:
        """The tokens to predict, int64, (n,)."""
        after = self.labels[:, 1:]
        return after[after != IGNORED]

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return ``accuracy`` (share of tokens) and ``loss`` (mean, nats) in evaluation mode."""
        right, losses = self.rows(model)
        return {"accuracy": int(right.sum()) / len(right), "loss": float(losses.sum()) / len(right)}

    def rows(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return, on the CPU, whether each token is right, shape (n,), bool, and its loss (nats), float64."""
        right, losses, device = [], [], device_of(model)
        with torch.no_grad(), evaluating(model):
            for some in torch.split(torch.arange(len(self.inputs)), self.batch):
                ids, labels = self.inputs[some].to(device), self.labels[some].to(device)
                after = labels[:, 1:]
                logits = model(ids).logits[:, :-1][after != IGNORED]
                targets = after[after != IGNORED]
                right.append(logits.argmax(-1) == targets)
                losses.append(functional.cross_entropy(logits, targets, reduction="none").double())
        return torch.cat(right).cpu(), torch.cat(losses).cpu()


def next_token_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Mean loss (nats) of the labels of a batch; the label at i is predicted from the tokens before i."""
    logits = outputs.logits[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def model_of(settings: Settings) -> Adapted:
    """What makes the model of a run."""
    assert settings.model is not None
    own = settings.lora
    lora = Lora(rank=own.rank, alpha=own.alpha, targets=own.targets) if settings.trained == "lora" else None
    return Adapted(settings.model, lora, settings.seed)


def load_texts(settings: Settings) -> Inputs:
    """Read every client's texts as rows of tokens; the last rows of each are test rows."""
    assert settings.model is not None
    config, tokenizer = models.config_of(settings.model), models.load_tokenizer(settings.model)
    _check_length(settings, config)
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    found: list[Packed] = []
    left_out: list[UserError] = []
    for client, examples in _clients(Path(settings.data), settings.text.client, left_out):
        tokens = all_tokens(tokenizer, examples, left_out)
        require(bool(tokens), f"client {client}", "nothing to learn", "no record of it has tokens", "drop the client")
        found.append(_packed(client, tokens, settings.text.length, pad))
    _tell(found, left_out)
    width = max(part.length for part in found)
    ids = [functional.pad(part.ids, (0, width - part.length), value=pad) for part in found]
    labels = [functional.pad(part.labels, (0, width - part.length), value=IGNORED) for part in found]
    highest, known = max(int(part.max()) for part in ids), int(config.get_text_config().vocab_size)
    why = f"the model knows {known} tokens, the tokenizer gives token {highest}"
    require(highest < known, "model", settings.model, why, "use the tokenizer that belongs to the model")
    # a client of one row keeps it to train on
    kept = [max(1, part.rows - max(1, int(settings.text.test * part.rows))) for part in found]
    require(any(part.rows > n for part, n in zip(found, kept, strict=True)), "data", f"{len(found)} clients of one row",
            "no row is left to test on", "pass longer texts, or a smaller --text.length")  # fmt: skip
    groups = torch.tensor([client for client, n in enumerate(kept) for _ in range(n)])
    parts = (_cat(ids, kept, first=True), _cat(labels, kept, first=True), _cat(ids, kept, first=False),
             _cat(labels, kept, first=False))  # fmt: skip
    return parted(Path(settings.data).name, parts, groups, settings.seed, settings.held_out, classes=0)


def _packed(client: str, tokens: Sequence[Tokens], length: int, pad: int) -> Packed:
    """A client's rows, a document or a piece of one each."""
    try:
        return pack(tokens, length=length, pad=pad, packing=False)
    except UserError as error:
        do = "pass a larger --text.length, or drop the client"
        raise UserError("text.length", got=f"{length}, client {client}", why=error.why, do=do) from None


def _tell(found: Sequence[Packed], left_out: Sequence[UserError]) -> None:
    """Say on standard error what no client learns."""
    if left_out:
        first = left_out[0]
        sys.stderr.write(f"left out: {len(left_out):,} of the records (the first: {first.what}, {first.why})\n")
    dropped, cut = (sum(getattr(part, name) for part in found) for name in ("dropped", "cut"))
    if dropped or cut:
        sys.stderr.write(f"cut at the row length: {cut:,} tokens; rows left out, with nothing to learn: {dropped:,}\n")


def _cat(parts: Sequence[Tensor], kept: Sequence[int], *, first: bool) -> Tensor:
    """The rows of all clients to train on, or those to test on."""
    return torch.cat([part[:n] if first else part[n:] for part, n in zip(parts, kept, strict=True)])


def _clients(path: Path, field: str, left_out: list[UserError]) -> Iterator[tuple[str, Sequence[Example]]]:
    """Each client's name and records: of a folder each file is a client, of a file a field says whose a record is."""
    if path.is_dir():
        require(not field, "text.client", field, "in a folder each file is a client", "omit it, or pass one file")
        for file in files_of(path):
            source = read(file)
            left_out += source.left_out
            yield file.relative_to(path).as_posix(), source.examples
        return
    do = "pass a folder of texts, or a .jsonl file with --text.client"
    require(path.is_file(), "data", path, "there is no such folder or file", do)
    why = "who holds which record of one file is not known"
    require(bool(field), "text.client", "none", why, "pass the field that names the client, or a folder")
    require(not path.name.lower().endswith((".txt", ".txt.gz")), "data", path, "a text has no fields", do)
    by_client: dict[str, list[Example]] = {}
    for where, row in rows(path):
        got = row.pop(field, None) if isinstance(row, dict) else None
        require(isinstance(got, str | int), where, f"{field}: {got!r}", "it names no client", "write a name or number")
        try:
            by_client.setdefault(str(got), []).append(example(row, where, set()))
        except NothingToLearnError as error:
            left_out.append(error)
    require(any(by_client.values()), "data", path, "there is nothing to learn", "write records with a text")
    yield from sorted((name, examples) for name, examples in by_client.items() if examples)


def _check_length(settings: Settings, config: Any) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    fits = not isinstance(limit, int) or settings.text.length <= limit
    do = f"pass --text.length {limit} or less"
    require(fits, "text.length", settings.text.length, f"the model has {limit} positions", do)


def data_hash(path: Path) -> str | None:
    """SHA-256 of a file, or of the names and bytes of a folder's data files."""
    if not path.is_dir():
        return digest(path) if path.is_file() else None
    total = hashlib.sha256()
    for file in files_of(path):
        total.update(f"{file.relative_to(path)}:{digest(file)}\n".encode())
    return total.hexdigest()


def save_model(model: nn.Module, settings: Settings, place: Path) -> None:
    """Write a trained model, its LoRA merged, and the tokenizer, as transformers loads them."""
    assert settings.model is not None
    merge = getattr(model, "merge_and_unload", None)
    whole = model if merge is None else merge()
    tokenizer = models.load_tokenizer(settings.model)
    write_folder(place, lambda draft: models.save_pretrained(whole, tokenizer, draft))
