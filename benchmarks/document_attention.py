"""Does a packed row gain from attention within each document over one with a mask of all pairs of its tokens?

Run ``python -m benchmarks.document_attention`` (twenty minutes on a quiet core). A Llama of SmolLM2-135M's shape with
random weights takes forward and backward passes of rows that hold documents of equal length. The arms take turns, so
that a machine that slows down slows both; bytes are those that `plan` predicts for full fine-tuning of the same step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparing.jobs.lm.documents import loader_arguments
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.names import Attention
from sparing.jobs.lm.packing import Packed
from sparing.jobs.lm.prices import price
from sparing.jobs.lm.step import FitStep
from sparing.layersample.price.predict import Full
from sparing.report import Progress, environment
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "document_attention.json"
COMMAND = "python -m benchmarks.document_attention"
ARMS: tuple[Attention, ...] = ("sdpa", "documents")
CELLS = ((512, 128), (512, 512), (1024, 128), (1024, 256), (2048, 128), (2048, 256), (2048, 1024))
ROUNDS = 9


def config() -> Any:
    """SmolLM2-135M's shape, ten of its blocks."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip


def model_of(attention: Attention) -> nn.Module:
    """The model, with the same weights for every arm."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made: nn.Module = AutoModelForCausalLM.from_config(config(), dtype=torch.float32, **loader_arguments(attention))
    return made.train()


def rows(length: int, document: int) -> Packed:
    """One row of documents of equal length; 128 of its tokens are learned from, so that the head weighs little."""
    ids = torch.arange(length)[None].mul(31).remainder(49152)
    labels = torch.full_like(ids, -100)
    labels[:, -128:] = ids[:, -128:]
    return Packed(ids, labels, torch.arange(length)[None].remainder(document))


def seconds(model: nn.Module, data: Packed) -> float:
    """One forward and backward pass."""
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    loss_sum(model, data, torch.tensor([0]), at_once=256).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - begin


def main() -> None:
    """Time and price every cell."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    models, found = {arm: model_of(arm) for arm in ARMS}, []
    with Progress("cells", total=len(CELLS), unit="cell") as bar:
        for length, document in CELLS:
            data = rows(length, document)
            times: dict[Attention, list[float]] = {arm: [] for arm in ARMS}
            for turn in range(1 + ROUNDS):
                for arm in ARMS if turn % 2 else ARMS[::-1]:
                    taken = seconds(models[arm], data)
                    if turn:
                        times[arm].append(taken)
            ratios = [a / b for a, b in zip(times["sdpa"], times["documents"], strict=True)]
            step = FitStep(method=Full(), dtype="float32", batch=1, length=length, accumulate=1, loss_tokens=256)
            steps = {arm: replace(step, attention=arm) for arm in ARMS}
            peaks = {arm: price(Source(config(), arm), one).bytes.activations for arm, one in steps.items()}
            found.append({
                "length": length, "document": document, "seconds": times, "activations": peaks,
                "faster": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "rounds": ROUNDS,
            })  # fmt: skip
            bar.advance(length=length, document=document)
    document_of = {"command": COMMAND, "environment": environment() | {"command": COMMAND}, "cells": found}
    write_whole(RESULT, json.dumps(document_of, indent=1, allow_nan=False) + "\n")


def table() -> str:
    """The table of ``docs/results/step-time.md``."""
    from benchmarks.memory_tables import table as drawn

    lines = []
    for cell in json.loads(RESULT.read_text(encoding="utf-8"))["cells"]:
        middle = {arm: statistics.median(times) for arm, times in cell["seconds"].items()}
        held = {arm: nbytes / 1e6 for arm, nbytes in cell["activations"].items()}
        lines.append([
            str(cell["length"]), str(cell["document"]), f"{middle['sdpa']:.3f}", f"{middle['documents']:.3f}",
            f"{cell['faster']:.2f} [{cell['lowest']:.2f}, {cell['highest']:.2f}]×",
            f"{held['sdpa']:.0f}", f"{held['documents']:.0f}",
        ])  # fmt: skip
    return drawn(
        ["tokens of a row", "of a document", "mask, s", "documents, s", "faster", "mask, MB", "documents, MB"], lines
    )


if __name__ == "__main__":
    main()
