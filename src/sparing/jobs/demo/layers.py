"""First chapter: fine-tune a real language model with little memory; full, LISA, LISA with frozen embedding, LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.blocks import tied
from sparing.jobs.demo.inputs import Inputs
from sparing.jobs.demo.resuming import require_unchanged
from sparing.jobs.finetune.evaluate import continuations
from sparing.jobs.finetune.loop import fit
from sparing.jobs.finetune.settings import Full, Method, Training
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.step import DivergedError
from sparing.layersample import LayerSampling
from sparing.memory import CATEGORIES
from sparing.report import Progress, Record

if TYPE_CHECKING:
    from torch import nn

ARMS = ("full", "LISA", "LISA, embedding frozen", "LoRA")  # in the order of every table and picture


def method_of(arm: str, model: nn.Module) -> Method:
    """What trains in an arm; a head that shares the embedding's weights is frozen with it."""
    if arm == "full":
        return Full()
    if arm == "LoRA":
        return Lora(rank=8, alpha=16.0)
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
        made = self.inputs
        steps = made.trial if trial else made.steps
        every = 0 if trial else max(2, made.steps // 8)
        return Training(
            method=method_of(self.name, model), lr=lr, steps=steps, batch=made.batch, accumulate=1, seed=self.seed,
            warmup=min(2, steps - 1), schedule="constant" if trial else "cosine", evaluate_every=every,
        )  # fmt: skip


def try_rate(arm: Arm, lr: float) -> float:
    """Train a fresh model for a few steps; its development loss (nat/token), infinite if it diverged."""
    model, _ = arm.inputs.load()
    try:
        fit(model, arm.inputs.train, arm.training(model, lr, trial=True), label="")
    except DivergedError:
        return float("inf")
    return held_out_loss(model, arm.inputs.dev, batch=4)[0]


def sweep(arm: Arm, record: Record, bar: Progress) -> float:
    """The learning rate of least development loss; a single one is taken untried. Test rows are not looked at."""
    losses: dict[float, float] = {}
    tried = arm.inputs.rates[arm.name]
    if len(tried) == 1:
        return tried[0]
    for lr in tried:
        losses[lr] = try_rate(arm, lr)
        record.add("sweep", method=arm.name, lr=lr, dev_loss=losses[lr])
        bar.advance(method=arm.name, dev_loss=losses[lr])
    return min(losses, key=losses.__getitem__)


def full_run(arm: Arm, lr: float, record: Record) -> None:
    """Train an arm at its rate and write its curve, bytes, speed and samples."""
    made = arm.inputs
    model, tokenizer = made.load()
    training = arm.training(model, lr, trial=False)
    before = continuations(model, tokenizer, made.prompts, max_new_tokens=48) if arm.name == "full" else ()
    run = fit(model, made.train, training, held_out=made.test, label=arm.name, memory=True)
    after = continuations(model, tokenizer, made.prompts, max_new_tokens=48)
    for row in run.table("held_out"):
        record.add("curve", method=arm.name, **{key: row[key] for key in ("step", "loss", "perplexity", "seconds")})
    for row in run.table("switches") if "switches" in run.tables else ():
        record.add("switches", method=arm.name, **row)
    held = {str(row["category"]): row for row in run.table("memory")}
    for kind in ("predicted", "measured"):
        record.add("memory", method=arm.name, kind=kind, **{part: held[part][kind] for part in CATEGORIES})
    for number, text in enumerate(before):
        record.add("samples", prompt=made.prompts[number], when="before", text=text)
    for number, text in enumerate(after):
        record.add("samples", prompt=made.prompts[number], when=f"after {arm.name}", text=text)
    record.add("arms", **_summary(arm, lr, run))


def _summary(arm: Arm, lr: float, run: Record) -> dict[str, Any]:
    """The row of an arm: losses, seconds a step, bytes."""
    curve: list[dict[str, Any]] = run.table("held_out")
    peak = next(row for row in run.table("memory") if row["category"] == "total")
    first, last = curve[0], curve[-1]
    return {
        "method": arm.name, "lr": lr, "loss_before": first["loss"], "loss_after": last["loss"],
        "perplexity_after": last["perplexity"], "seconds_per_step": last["seconds"] / last["step"],
        "peak_predicted": peak["predicted"], "peak_measured": peak["measured"],
    }  # fmt: skip


def remaining(record: Record) -> list[str]:
    """The contenders that the record does not hold yet."""
    done = {row["method"] for row in record.table("arms")}
    return [name for name in ARMS if name not in done]


def run_chapter(inputs: Inputs, record: Record, *, seed: int, path: Path) -> None:
    """Run every arm that the record does not hold yet; the record is written after each."""
    require_unchanged(record, "materials", inputs.title)
    if not record.table("materials"):
        record.add("materials", name=inputs.title, licence=inputs.licence)
    open_arms = [Arm(name=name, inputs=inputs, seed=seed) for name in remaining(record)]
    trials = sum(len(tried) for arm in open_arms if len(tried := inputs.rates[arm.name]) > 1)
    with Progress("fine-tune", total=trials + len(open_arms), unit="run") as bar:
        for arm in open_arms:
            lr = sweep(arm, record, bar)
            full_run(arm, lr, record)
            record.write(path)
            bar.advance(method=arm.name, lr=f"{lr:g}")
