"""The model of ladder 1: a Llama of our own, 13.7 M parameters in 16 blocks, trained once on books for grown-ups.

``python -m benchmarks.layers.base`` makes it and keeps it in the cache; run again it goes on where it stopped, to the
same bits. ``--state`` tells how far it is. The table of tokens has 4 % of the weights and the head as many, so that
both memory and the choice of layers can show; the two are not tied.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from benchmarks import onednn
from benchmarks.layers.texts import LENGTH, books, cut, layers_folder, old_rows, spread
from sparing.data.cache import locked
from sparing.jobs import checkpoint
from sparing.jobs.disk import write_folder
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import TrainState, restore_, start, take_step_
from sparing.jobs.folder_lock import hold_, release_
from sparing.jobs.lm.corpus import byte_pairs
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.models import load_model, load_tokenizer, save_pretrained
from sparing.jobs.lm.packing import Packed
from sparing.jobs.pretrain.models import fresh_model
from sparing.layersample.price.predict import Full
from sparing.report import Progress

MEASURED = 64
"""Held-out rows that are measured along the way (count)."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights; another recipe is another model in another folder."""

    layers: int = 16
    width: int = 256
    hidden: int = 688
    heads: int = 4
    vocabulary: int = 2048
    batch: int = 8
    """Rows of 128 tokens in a step (count)."""
    steps: int = 5000
    lr: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.1
    seed: int = 0

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        words = json.dumps(asdict(self) | {"length": LENGTH}, sort_keys=True)
        return layers_folder() / f"base-{hashlib.sha256(words.encode()).hexdigest()[:8]}"

    @property
    def tokens(self) -> int:
        """Tokens read (count)."""
        return self.steps * self.batch * LENGTH

    def training(self) -> Training:
        """As our loop takes it: AdamW, a rise and half a cosine."""
        pace: dict[str, Any] = {"steps": self.steps, "batch": self.batch, "lr": self.lr, "warmup": self.warmup}
        return Training(method=Full(), accumulate=1, weight_decay=self.weight_decay, seed=self.seed, **pace)


RECIPE = Recipe()


def tokenizer_of(recipe: Recipe) -> Any:
    """Byte pairs of the books, made once."""
    place = recipe.folder / "tokenizer"
    with locked(recipe.folder, "tokenizer"):
        if not place.exists():
            made = byte_pairs("".join(cut(text)[0] for text in books().values()), recipe.vocabulary)
            write_folder(place, made.save_pretrained)
    return load_tokenizer(place)


def fresh(recipe: Recipe) -> nn.Module:
    """The model before training."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=recipe.vocabulary, hidden_size=recipe.width, intermediate_size=recipe.hidden,
        num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.heads,
        max_position_embeddings=2 * LENGTH, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return fresh_model(config, seed=recipe.seed)


class Run:
    """The pretraining of a recipe, from its start or its last checkpoint."""

    def __init__(self, recipe: Recipe, state: TrainState, learnt: Packed, held: Packed) -> None:
        """Take up the last checkpoint, if there is one."""
        self.recipe, self.state, self.learnt, self.held = recipe, state, learnt, held
        self.place = recipe.folder / "checkpoints"
        self.curve: list[dict[str, float]] = []
        self.recent: list[float] = []
        self.spent, self.began = 0.0, time.process_time()
        if found := checkpoint.saved(self.place):
            tree = checkpoint.load(found[-1], run=recipe.folder.name)
            restore_(state, tree)
            self.curve, self.spent = tree["curve"], tree["spent"]

    def keep(self) -> dict[str, float]:
        """Measure, and write a checkpoint."""
        loss, _ = held_out_loss(self.state.model, self.held, batch=8)
        spent = self.spent + time.process_time() - self.began
        row = {"step": self.state.step, "train": fmean(self.recent), "held_out": loss, "cpu_seconds": round(spent, 1)}
        self.curve.append(row)
        self.recent = []
        tree = self.state.tree() | {"curve": self.curve, "spent": spent}
        checkpoint.save(self.place, self.state.step, tree, run=self.recipe.folder.name)
        return row

    def go(self, every: float, until: int | None = None) -> None:
        """Train to the end, or ``until`` a step, with a checkpoint every so many seconds."""
        stop, due = until or self.state.steps, time.monotonic() + every
        label = f"pretrain {self.recipe.tokens / 1e6:.1f} M tokens"
        with Progress(label, total=self.state.steps, resume_at=self.state.step) as bar:
            while self.state.step < stop:
                loss = take_step_(self.state, self.learnt)["loss"]
                self.recent.append(loss)
                bar.advance(loss=loss)
                if time.monotonic() >= due or self.state.step == stop:
                    bar.advance(0, held_out=self.keep()["held_out"])
                    due = time.monotonic() + every


def pretrain(recipe: Recipe = RECIPE, *, every: float = 240.0, until: int | None = None) -> Path:
    """Make the model unless it is there.

    Args:
        recipe: What to make.
        every: Seconds between checkpoints.
        until: Step to stop at; none: the end.

    Returns:
        Its folder, as ``save_pretrained`` writes it, which is there once the last step is done.
    """
    final = recipe.folder / "model"
    if made(recipe):
        return final
    recipe.folder.mkdir(parents=True, exist_ok=True)
    hold_(recipe.folder)
    try:
        tokenizer = tokenizer_of(recipe)
        learnt, held = old_rows(tokenizer)
        model = fresh(recipe)
        with start(model, recipe.training(), rows=learnt.rows) as state:
            run = Run(recipe, state, learnt, spread(held, MEASURED))
            run.go(every, until)
        if state.step == recipe.steps:
            (recipe.folder / "curve.json").write_text(json.dumps(run.curve, indent=0) + "\n")
            write_folder(final, lambda draft: save_pretrained(model, tokenizer, draft))
    finally:
        release_(recipe.folder)
    return final


def made(recipe: Recipe = RECIPE) -> bool:
    """Whether it is there."""
    return (recipe.folder / "model").exists()


def load(recipe: Recipe = RECIPE) -> nn.Module:
    """The model, which is made if it is not there."""
    return load_model(pretrain(recipe), dtype=torch.float32)


def state_of(recipe: Recipe) -> str:
    """How far it is, in a line."""
    if made(recipe):
        curve = json.loads((recipe.folder / "curve.json").read_text())
    elif found := checkpoint.saved(recipe.folder / "checkpoints"):
        curve = checkpoint.load(found[-1], run=recipe.folder.name)["curve"]
    else:
        return "not begun"
    last = curve[-1]
    left = last["cpu_seconds"] / last["step"] * (recipe.steps - last["step"])
    return (
        f"step {last['step']:,} of {recipe.steps:,}, loss {last['train']:.3f}, held out {last['held_out']:.3f}, "
        f"{last['cpu_seconds'] / 3600:.2f} CPU h spent, {left / 3600:.2f} left"
    )


def main() -> None:
    """Make it, or tell how far it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", action="store_true", help="tell how far it is, and do nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    onednn.use()
    print(state_of(RECIPE) if options.state else pretrain())


if __name__ == "__main__":
    main()
