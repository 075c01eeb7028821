"""How long is one step: full fine-tuning, LISA, LISA with a frozen embedding, LoRA; by phase, warm, interleaved.

Run ``python -m benchmarks.step_time`` (three minutes on two quiet cores). Every round times one step of every arm in
turn, so that a machine that slows down slows all arms alike; the figure of an arm is its median over the rounds. A
second part shows what a cold start does to such a comparison: fresh processes, one arm each, first step against later
ones, and one process that times its arms one after the other without warming up, as the published script does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from sparing.layersample import Fixed, LayerSampling, Sampler
from sparing.report import Progress, Record, environment
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "step_time.jsonl"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a batch to time."""

    name: str
    """Label of the rows."""
    layers: int
    """Decoder layers (count), N."""
    width: int
    """Hidden width, d."""
    vocab: int
    """Vocabulary (count), V."""
    batch: int
    """Sequences a step (count)."""
    length: int
    """Tokens a sequence (count)."""


CASES = (
    Case(name="Llama 12x384", layers=12, width=384, vocab=2048, batch=2, length=256),
    Case(name="Llama 12x768", layers=12, width=768, vocab=8192, batch=1, length=256),
)


def model_of(case: Case) -> nn.Module:
    """A randomly initialised fp32 Llama of that shape; timing needs no trained weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=case.width, intermediate_size=case.width * 8 // 3, num_hidden_layers=case.layers,
        num_attention_heads=case.width // 64, num_key_value_heads=case.width // 64, vocab_size=case.vocab,
        max_position_embeddings=case.length,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lisa(
    case: Case, blocks: tuple[int, ...], *, embed: bool
) -> Callable[[nn.Module], tuple[object, torch.optim.Optimizer]]:
    """LISA with fixed active blocks."""

    def build(model: nn.Module) -> tuple[object, torch.optim.Optimizer]:
        optimizer = adamw(model)
        sampler = Fixed(blocks=blocks)
        settings = LayerSampling(active=len(blocks), period=10**9, embed=embed, sampler=sampler)
        lived = Sampler(model, optimizer, settings, seed=0)
        lived.begin_step(0)
        return lived, optimizer

    return build


def lora(model: nn.Module) -> tuple[object, torch.optim.Optimizer]:
    """LoRA of rank 8 on every linear layer, as peft builds it."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is about to go
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    return adapted, adamw(adapted)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over everything that trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)


def arms(case: Case) -> dict[str, Callable[[nn.Module], tuple[object, torch.optim.Optimizer]]]:
    """The contenders; low and high say where the two active blocks lie."""
    top = case.layers - 1
    return {
        "full": lambda model: (model, adamw(model)),
        "LISA, 2 blocks": lisa(case, (case.layers // 4, 2 * case.layers // 3), embed=True),
        "LISA, embedding frozen, low blocks": lisa(case, (0, 1), embed=False),
        "LISA, embedding frozen, high blocks": lisa(case, (top - 1, top), embed=False),
        "LoRA r=8 (peft)": lora,
    }


def timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> dict[str, float]:
    """Seconds of one step by phase."""
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step = time.perf_counter()
    return {
        "forward": forward - start, "backward": backward - forward, "optimizer": step - backward, "total": step - start,
    }  # fmt: skip


def built(case: Case, arm: str) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    """A fresh model prepared for an arm, its optimizer, and what must stay alive."""
    model = model_of(case)
    keep, optimizer = arms(case)[arm](model)
    return (keep if isinstance(keep, nn.Module) else model), optimizer, keep


def tokens(case: Case) -> torch.Tensor:
    """Random ids, shape (batch, length)."""
    return torch.randint(case.vocab, (case.batch, case.length), generator=stream(0, "step_time"))


def interleaved(case: Case, rounds: int) -> list[dict[str, object]]:
    """Median, least and most seconds of each phase over ``rounds`` warm rounds, after two that do not count."""
    ready = {arm: built(case, arm) for arm in arms(case)}
    ids, times = tokens(case), {arm: [] for arm in ready}
    with Progress(case.name, total=rounds + 2, unit="round") as bar:
        for turn in range(rounds + 2):
            for arm, (model, optimizer, _) in ready.items():
                seconds = timed_step(model, optimizer, ids)
                if turn >= 2:
                    times[arm].append(seconds)
            bar.advance()
    reference = [seconds["total"] for seconds in times["full"]]
    return [summary(case, arm, seconds, reference) for arm, seconds in times.items()]


def summary(case: Case, arm: str, seconds: list[dict[str, float]], reference: list[float]) -> dict[str, object]:
    """One row: medians by phase, spread of the total, and how many times faster than full, round by round."""
    ratios = sorted(full / row["total"] for full, row in zip(reference, seconds, strict=True))
    totals = sorted(row["total"] for row in seconds)
    phases = {phase: statistics.median(row[phase] for row in seconds) for phase in seconds[0]}
    spread = {"total_min": totals[0], "total_max": totals[-1], "n": len(totals)}
    speed = {"faster": statistics.median(ratios), "faster_min": ratios[0], "faster_max": ratios[-1]}
    return {"model": case.name, "arm": arm, **phases, **spread, **speed}


def cold(case: Case, arm: str, steps: int = 10) -> list[dict[str, float]]:
    """The steps of a fresh process, from its very first."""
    command = [sys.executable, "-m", "benchmarks.step_time", "--cold", case.name, arm, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cold_child(name: str, names: str, steps: int) -> None:
    """Inside the fresh process: time ``steps`` steps of each arm in ``names`` (joined by |), print them as JSON."""
    case = next(case for case in CASES if case.name == name)
    rows = []
    for arm in names.split("|"):
        model, optimizer, _ = built(case, arm)
        rows += [{"arm": arm, "step": step, **timed_step(model, optimizer, tokens(case))} for step in range(steps)]
    sys.stdout.write(json.dumps(rows) + "\n")


def cold_rows(case: Case) -> list[dict[str, object]]:
    """First step and tenth step of each arm in its own process, then one unwarmed process through three arms."""
    rows: list[dict[str, object]] = []
    chosen = ["full", "LoRA r=8 (peft)", "LISA, 2 blocks"]
    for arm in chosen:
        rows += [{"model": case.name, "process": "own", **row} for row in cold(case, arm)]
    rows += [{"model": case.name, "process": "shared", **row} for row in cold(case, "|".join(chosen), steps=1)]
    return rows


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cold", nargs=3)
    options = parser.parse_args()
    if options.cold:
        cold_child(options.cold[0], options.cold[1], int(options.cold[2]))
        return
    units = dict.fromkeys(["forward", "backward", "optimizer", "total", "total_min", "total_max"], "s") | {
        "faster": "×"
    }
    record = Record(
        question="How much faster is a step when only a few layers train?",
        settings={"rounds": options.rounds, "cases": [asdict(case) for case in CASES]},
        seed=0, environment=environment(), units=units,
    )  # fmt: skip
    for case in CASES:
        for row in interleaved(case, options.rounds):
            record.add("warm", **row)
    for row in cold_rows(CASES[0]):
        record.add("cold", **row)
    record.write(RESULT)


if __name__ == "__main__":
    main()
