"""What do frozen blocks in 4 and 8 bits cost a fine-tuned model: LISA and QLISA, LoRA and QLoRA on SmolLM2-135M.

Run ``python -m benchmarks.lowbit_quality`` (about 25 CPU minutes on one core; finished rows are kept). A 135 M
parameter Llama in bfloat16 learns the first part of *Stories to Tell to Children* and is measured on rows of its end.
Within a seed all arms see the same rows in the same order, LISA's arms draw the same blocks and LoRA's start from the
same adapters, so differences are paired. LISA and LoRA each keep the learning rate that did best without quantisation
in a small sweep, measured on rows of its own; their quantised arms take it over.

The packaged weights of this model were rounded to four bits once (Q4_1), so what rounding alone costs is not what it
would cost the original weights.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from sparing.data import fetch, load_text
from sparing.jobs.finetune.loop import fit
from sparing.jobs.finetune.settings import Training
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.packing import Packed, pack_stream
from sparing.layersample import LayerSampling, Reshuffle, Sampler
from sparing.layersample.config import Frozen
from sparing.report import environment
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "lowbit_quality.json"
COMMAND = "python -m benchmarks.lowbit_quality"
MODEL, TEXT, LENGTH = "smollm2-135m-instruct", "bryant-stories", 128
TRAIN, SWEEP, TEST = slice(0, 380), slice(400, 412), slice(440, 456)  # rows of the book; none is in two parts
STEPS, BATCH, SEEDS, SWEEP_SEED = 16, 1, 5, 100
RATES = {"LISA": (1e-4, 3e-4, 1e-3), "LoRA": (3e-4, 1e-3, 3e-3)}
LAYERS = functools.partial(LayerSampling, active=2, period=2, sampler=Reshuffle(), masters=True)
ARMS: dict[str, tuple[str, Frozen | None, bool]] = {
    "LISA": ("LISA", None, True),
    "QLISA, NF4": ("LISA", "nf4", True),
    "QLISA, int8": ("LISA", "int8", True),
    "LoRA": ("LoRA", None, True),
    "QLoRA, NF4": ("LoRA", "nf4", True),
    "QLISA, NF4, rounded when blocks leave": ("LISA", "nf4", False),
}
"""Arm -> method, number format of frozen blocks, whether exact weights stay in host memory."""


@functools.cache
def rows() -> Packed:
    """The book in rows."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(fetch(MODEL))(load_text(TEXT), add_special_tokens=False, verbose=False)
    return pack_stream(ids["input_ids"], LENGTH)


def part(of: slice) -> Packed:
    """Some rows of the book."""
    return rows().taken(torch.arange(rows().rows)[of])


def pretrained() -> nn.Module:
    """The model as its package has it, in bfloat16."""
    return copy.deepcopy(_loaded())


@functools.cache
def _loaded() -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(fetch(MODEL), dtype=torch.bfloat16)
    return model


def trained(arm: str, rate: float, seed: int, measured: slice) -> dict[str, Any]:
    """Fine-tune once; the held-out loss is that of the model that would be saved."""
    method, form, exact = ARMS[arm]
    begin, model = time.process_time(), pretrained()
    settings = LAYERS(exact=exact) if method == "LISA" else Lora(rank=16)
    pace = {"lr": rate, "steps": STEPS, "batch": BATCH, "accumulate": 1, "seed": seed, "weights": form}
    record = fit(model, part(TRAIN), Training(method=settings, **pace), label="")
    loss, _ = held_out_loss(model, part(measured))
    losses = [row["loss"] for row in record.table("train")]
    spent = time.process_time() - begin
    return {"arm": arm, "seed": seed, "rate": rate, "loss": loss, "train": losses, "cpu_seconds": round(spent, 1)}


def untrained(form: Frozen | None) -> dict[str, Any]:
    """The held-out loss before any step, of the model as it is or with all blocks rounded."""
    model = pretrained()
    if form is None:
        return {"loss": held_out_loss(model, part(TEST))[0]}
    optimizer = torch.optim.SGD(model.parameters())
    with Sampler(model, optimizer, LayerSampling(frozen=form)):
        return {"loss": held_out_loss(model, part(TEST))[0]}


def paired(found: dict[str, Any], arm: str, base: str) -> dict[str, float]:
    """Mean difference over seeds that both arms have, with the half width of its 95 % interval (Student's t)."""
    seeds = [s for s in range(SEEDS) if f"{arm} {s}" in found and f"{base} {s}" in found]
    gaps = [found[f"{arm} {s}"]["loss"] - found[f"{base} {s}"]["loss"] for s in seeds]
    if len(gaps) < 2:
        return {"n": len(gaps)}
    quantile = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}[len(gaps)]
    return {"n": len(gaps), "mean": fmean(gaps), "half": quantile * stdev(gaps) / math.sqrt(len(gaps))}


def main() -> None:
    """Measure what is not there yet."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    parts: dict[str, dict[str, Any]] = {name: known.get(name, {}) for name in ("untrained", "sweep", "runs")}

    def keep(name: str, key: str, row: dict[str, Any]) -> None:
        parts[name][key] = row
        gaps = {a: paired(parts["runs"], a, "LISA" if "LISA" in a else "LoRA") for a in ARMS if a.startswith("Q")}
        settings = {
            "model": MODEL, "text": TEXT, "tokens in a row": LENGTH, "steps": STEPS, "rows of a step": BATCH,
            "LISA": LAYERS().describe(), "LoRA rank": 16, "held-out rows": TEST.stop - TEST.start,
        }  # fmt: skip
        about = {"command": COMMAND, "environment": environment() | {"command": COMMAND}, "settings": settings}
        write_whole(RESULT, json.dumps(about | parts | {"difference": gaps}, indent=1, allow_nan=False) + "\n")

    forms: tuple[Frozen | None, ...] = (None, "nf4", "int8")
    for form in forms:
        if str(form) not in parts["untrained"]:
            keep("untrained", str(form), untrained(form))
    for method, rates in RATES.items():
        for rate in rates:
            if (key := f"{method} {rate:g}") not in parts["sweep"]:
                keep("sweep", key, trained(method, rate, SWEEP_SEED, SWEEP))
        best = min(rates, key=lambda rate: parts["sweep"][f"{method} {rate:g}"]["loss"])
        for seed in range(SEEDS):
            for arm in (arm for arm, (kind, *_) in ARMS.items() if kind == method):
                if (key := f"{arm} {seed}") not in parts["runs"]:
                    keep("runs", key, trained(arm, best, seed, TEST))


if __name__ == "__main__":
    main()
