"""Chapter on memory: fine-tune a real language model four ways, full, LISA, LISA with a frozen embedding, LoRA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from sparing.blocks import tied
from sparing.jobs.demo.chapter import Row, begin_on, keyed, load_or_omit, seeds_of
from sparing.jobs.demo.inputs import Inputs, gather
from sparing.jobs.demo.settings import Settings
from sparing.jobs.finetune.loop import fit
from sparing.jobs.finetune.settings import Training
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.step import Method
from sparing.jobs.lm.texts import continuations
from sparing.jobs.run import Run
from sparing.jobs.step import DivergedError
from sparing.layersample import LayerSampling
from sparing.layersample.price.activations import LoRA
from sparing.layersample.price.predict import Full, predict
from sparing.layersample.price.shape import Shape
from sparing.memory import CATEGORIES
from sparing.report import Progress, Record, plots

if TYPE_CHECKING:
    from torch import nn

FROZEN: Final = "LISA, embedding frozen"
ROLES: Final[dict[str, plots.Role]] = {"full": "reference", "LISA": "ours", FROZEN: "extension", "LoRA": "rival"}
ARMS: Final = tuple(ROLES)  # in the order of every table and picture

LARGE: Final = Shape(layers=32, width=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
"""LLaMA-2-7B, which is predicted beside the small model that is measured."""

LARGE_TOKENS: Final = 1024  # of the one row of a step (count)

RANK: Final = 8  # of LoRA's adapters (count)


def method_of(arm: str, model: nn.Module) -> Method:
    """What trains in an arm; a head that shares the embedding's weights is frozen with it."""
    if arm == "full":
        return Full()
    if arm == "LoRA":
        return Lora(rank=RANK, alpha=16.0)
    if arm == "LISA":
        return LayerSampling(active=2, period=5)
    # a tied head is the embedding: it cannot train while that is frozen
    return LayerSampling(active=2, period=5, embed=False, head=not tied(model))


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One contender on its materials."""

    name: str  # one of ``ARMS``
    inputs: Inputs
    seed: int  # of order, draws and dropout

    def training(self, model: nn.Module, lr: float, *, trial: bool) -> Training:
        """The settings of a run: short for a trial of a learning rate, whole otherwise."""
        steps = self.inputs.trial if trial else self.inputs.steps
        every = 0 if trial else max(2, steps // 8)
        return Training(
            method=method_of(self.name, model), lr=lr, steps=steps, batch=self.inputs.batch, accumulate=1,
            seed=self.seed, warmup=min(2, steps - 1), schedule="constant" if trial else "cosine", evaluate_every=every,
        )  # fmt: skip


def try_rate(arm: Arm, lr: float, record: Record, bar: Progress) -> float:
    """Train a fresh model for a few steps; its development loss (nat/token), infinite if it diverged."""
    model, _ = arm.inputs.load()
    try:
        fit(model, arm.inputs.train, arm.training(model, lr, trial=True), label="")
        loss = held_out_loss(model, arm.inputs.dev, batch=4)[0]
    except DivergedError:
        loss = float("inf")
    record.add("sweep", method=arm.name, lr=lr, dev_loss=loss)
    bar.advance(method=arm.name, dev_loss=loss)
    return loss


def full_run(arm: Arm, lr: float, record: Record, bar: Progress) -> None:
    """Train an arm at its rate and write its curve, bytes, speed and samples."""
    made = arm.inputs
    model, tokenizer = made.load()
    training = arm.training(model, lr, trial=False)
    texts = {}
    if arm.name == "full":
        texts["before"] = continuations(model, tokenizer, made.prompts, max_new_tokens=48)
    run = fit(model, made.train, training, held_out=made.test, label=arm.name, memory=True)
    texts[f"after {arm.name}"] = continuations(model, tokenizer, made.prompts, max_new_tokens=48)
    curve: list[Row] = run.table("held_out")
    for row in curve:
        record.add("curve", method=arm.name, **{key: row[key] for key in ("step", "loss", "perplexity", "seconds")})
    for row in run.table("switches"):
        record.add("switches", method=arm.name, **row)
    held = keyed(run.table("memory"), "category")
    for kind in ("predicted", "measured"):
        record.add("memory", method=arm.name, kind=kind, **{part: held[part][kind] for part in CATEGORIES})
    for when, written in texts.items():
        for prompt, text in zip(made.prompts, written, strict=True):
            record.add("samples", prompt=prompt, when=when, text=text)
    first, last, peak = curve[0], curve[-1], held["total"]
    record.add(
        "arms", method=arm.name, lr=lr, loss_before=first["loss"], loss_after=last["loss"],
        perplexity_after=last["perplexity"], seconds_per_step=last["seconds"] / last["step"],
        peak_predicted=peak["predicted"], peak_measured=peak["measured"],
    )  # fmt: skip
    bar.advance(method=arm.name, lr=f"{lr:g}")


def run_again(arm: Arm, lr: float, record: Record, bar: Progress) -> None:
    """Train an arm with another seed of rows and draws, and write what it ends with."""
    model, _ = arm.inputs.load()
    fit(model, arm.inputs.train, replace(arm.training(model, lr, trial=False), evaluate_every=0), label="")
    record.add("again", method=arm.name, seed=arm.seed, loss_after=held_out_loss(model, arm.inputs.test, batch=4)[0])
    bar.advance(method=arm.name, lr=f"{lr:g}")


def price_large(record: Record) -> None:
    """Predict what a step of every arm would hold for a model of seven billion parameters, in bfloat16."""
    for arm in ARMS:
        layers = LayerSampling(active=2, embed=arm == "LISA")
        method = Full() if arm == "full" else LoRA(rank=RANK) if arm == "LoRA" else layers
        price = predict(LARGE, method, batch=1, length=LARGE_TOKENS, dtype=torch.bfloat16).bytes
        parts = {part: getattr(price, part) for part in CATEGORIES}
        record.add("large", method=arm, peak=price.total, **parts)


def run_chapter(run: Run) -> None:
    """For each arm, take the rate of least development loss and train with it; test rows choose nothing."""
    settings: Settings = run.settings
    if len(run.record.table("arms")) == len(ARMS):
        return

    def read() -> Inputs:
        return gather(settings.source, settings.out, settings.scale)

    # a model that was asked for by name must be there
    inputs = load_or_omit(read) if settings.source == "auto" else read()
    begin_on(run, "materials", inputs.title, licence=inputs.licence)
    # a single rate is taken untried
    tried = {name: rates if len(rates := inputs.rates[name]) > 1 else () for name in ARMS}
    first, *others = seeds_of(settings)
    total, done = sum(map(len, tried.values())) + len(ARMS) * (1 + len(others)), len(run.results("memory: "))
    run.once("large: prices", partial(price_large, run.record))
    with Progress("fine-tune", total=total, unit="run", resume_at=done) as bar:
        for name in ARMS:
            arm = Arm(name=name, inputs=inputs, seed=first)
            losses = {
                lr: run.once(f"memory: {name} at {lr:g}", partial(try_rate, arm, lr, run.record, bar))
                for lr in tried[name]
            }
            lr = min(losses, key=losses.__getitem__) if losses else inputs.rates[name][0]
            for seed in others:
                again = replace(arm, seed=seed)
                run.once(f"memory: {name}, seed {seed}", partial(run_again, again, lr, run.record, bar))
            run.once(f"memory: {name}", partial(full_run, arm, lr, run.record, bar))
