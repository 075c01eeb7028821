"""How far are the bytes that `plan` predicts from those of every block run, and from what others predict or measured?

Run ``python -m benchmarks.plan_cells`` (about an hour on one core; goes on where it stopped; ``--plans`` times those
anew). Nothing is allocated: models have the sizes of real ones and no weights. Three tables:

    cells       twelve families × six methods × rows packed or with one document each, 1,024 tokens, bfloat16: the price
                that `plan` shows, from a few blocks or a formula, against every block run on fake tensors with the real
                optimizer, and the processor seconds of both
    plans       processor seconds of a whole ``sparing plan`` of each family, page included
    published   peaks that others measured on an H100, beside ours and those of accelerate, torch-kitsune, training_hub
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.optimizer import AdamW
from sparing.jobs.lm.prices import price
from sparing.jobs.lm.step import FitStep, Method
from sparing.layersample import Fixed, LayerSampling
from sparing.layersample.price.predict import Full
from sparing.memory import predict
from sparing.report import Progress, Record, environment

RESULT = Path(__file__).parent / "results" / "plan_cells.jsonl"
TOKENS = 1024

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("llama", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "head_dim": 64}),
    "Qwen3-4B": ("qwen3", {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True, "head_dim": 128}),
    "Gemma-3-1B": ("gemma3_text", {
        "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512}),
    "Phi-3-mini": ("phi3", {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32064, "pad_token_id": 32000}),
    "Mixtral-8x7B": ("mixtral", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8}),
    "Qwen3-30B-A3B": ("qwen3_moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8}),
    "gpt-oss-20b": ("gpt_oss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32}),
    "GPT-2 XL": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "Pythia-1.4B": ("gpt_neox", {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 16,
        "vocab_size": 50304}),
    "T5-large": ("t5", {
        "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16,
        "decoder_start_token_id": 0}),
    "ViT-L/16": ("vit", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}),
    "Whisper-large": ("whisper", {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
        "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
        "vocab_size": 51866}),
}  # fmt: skip

METHODS: dict[str, tuple[Method, bool]] = {
    "full": (Full(), False),
    "full, checkpointing": (Full(), True),
    "LISA, 2 blocks": (LayerSampling(active=2, sampler=Fixed(blocks=(0, 1))), False),
    "LISA, 4 blocks, embedding frozen, checkpointing": (
        LayerSampling(active=4, embed=False, head=False, sampler=Fixed(blocks=(0, 1, 2, 3))),
        True,
    ),
    "LoRA, rank 16": (Lora(rank=16), False),
    "LoRA, rank 16, checkpointing": (Lora(rank=16), True),
}
"""Method, of layer sampling with the lowest blocks, and whether blocks compute their activations again."""

# Peaks that others measured on an H100 (bytes), batch 1. GRASS (arXiv:2604.07808), table of memory: 1,024 tokens in
# bfloat16, its unit must be GiB. Soup (MakazhanAlpamys/Soup#377): weights were loaded in float32, the length of rows is
# not published; Alpaca's are short. Full fine-tuning of Llama-3.1-8B ran out of memory at 73.94 GB.
GRASS, SOUP = 2**30, 10**9
PUBLISHED = {
    ("LLaMA-2-7B", "full"): 51.32 * GRASS, ("LLaMA-2-7B", "LISA, 2 blocks"): 22.31 * GRASS,
    ("LLaMA-2-7B", "LoRA, rank 128"): 19.97 * GRASS, ("TinyLlama-1.1B", "full"): 8.76 * GRASS,
    ("TinyLlama-1.1B", "LISA, 2 blocks"): 4.93 * GRASS, ("TinyLlama-1.1B", "LoRA, rank 128"): 4.71 * GRASS,
    ("Qwen2.5-3B", "full"): 57.60 * SOUP, ("Qwen2.5-3B", "LISA, 2 blocks"): 19.37 * SOUP,
    ("Qwen2.5-3B", "LoRA, rank 16"): 15.93 * SOUP, ("Llama-3.1-8B", "full"): None,
    ("Llama-3.1-8B", "LISA, 2 blocks"): 52.14 * SOUP, ("Llama-3.1-8B", "LoRA, rank 16"): 34.56 * SOUP,
}  # fmt: skip
SHAPES = {
    "LLaMA-2-7B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000}),
    "TinyLlama-1.1B": ("llama", {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000}),
    "Qwen2.5-3B": ("qwen2", {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}),
    "Llama-3.1-8B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256}),
}  # fmt: skip
SHORT = {"Qwen2.5-3B", "Llama-3.1-8B"}
"""Those of Soup: float32, and priced at 256 tokens with checkpointing."""


def config_of(family: str) -> Any:
    """The configuration of a family's model."""
    from transformers import AutoConfig

    kind, sizes = FAMILIES[family]
    return AutoConfig.for_model(kind, **sizes)


def cells(family: str) -> Iterator[dict[str, Any]]:
    """Both prices of every method and kind of row."""
    source = Source(config_of(family), "auto")
    for packed in (True, False) if source.causal else (False,):
        for name, (method, again) in METHODS.items():
            step = FitStep(
                method=method, dtype="bfloat16", batch=1, length=TOKENS, accumulate=2, packing=packed,
                checkpointing=again, attention="auto",
            )  # fmt: skip
            begin = time.process_time()
            few = price(source, step).bytes.total
            middle = time.process_time()
            model = source.build(step)
            whole = predict(
                model, source.batch(step), lambda found: AdamW().make([{"params": found}], lr=1e-4),
                trainable=source.trained(model, method), loss=source.loss(model, step), checkpointing=again,
                accumulate=2, device="cuda",
            ).total  # fmt: skip
            yield {
                "family": family, "method": name, "rows": "packed" if packed else "one document",
                "predicted": few, "every_block": whole, "error": 100 * (few / whole - 1),
                "seconds": middle - begin, "seconds_every_block": time.process_time() - middle,
            }  # fmt: skip


def plan_seconds(family: str) -> float:
    """Processor seconds of a whole ``sparing plan`` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config_of(family).save_pretrained(folder)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "sparing", "plan", folder, "--card", "h100", "--out", f"{folder}/out"]
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def published() -> Iterator[dict[str, Any]]:
    """Peaks that others measured, beside ours and those of other estimators."""
    from transformers import AutoConfig

    from benchmarks.peers import estimators

    for (model, way), measured in PUBLISHED.items():
        kind, sizes = SHAPES[model]
        source = Source(AutoConfig.for_model(kind, **sizes), "sdpa")
        rank = int(way.split()[-1]) if way.startswith("LoRA") else None
        method = Full() if way == "full" else Lora(rank=rank) if rank else LayerSampling(active=2)
        short = model in SHORT
        length, dtype = (256, "float32") if short else (TOKENS, "bfloat16")
        step = FitStep(
            method=method, dtype=dtype, batch=1, length=length, accumulate=1, packing=False, loss_tokens=0,
            checkpointing=short,
        )  # fmt: skip
        bare = source.build(FitStep(method=Full(), dtype=dtype))
        row: dict[str, Any] = {
            "model": model, "method": way, "length": length, "dtype": dtype, "measured": measured,
            "predicted": price(source, step).bytes.total,
            "accelerate": estimators.accelerate(bare, dtype) if way == "full" else None,
        }  # fmt: skip
        # none of them knows layer sampling
        if not isinstance(method, LayerSampling):
            low, high = estimators.training_hub(bare, length=length, rank=rank)
            row |= {"kitsune": estimators.kitsune(bare, dtype, length=length, rank=rank)}
            row |= {"training_hub_low": low, "training_hub_high": high}
        yield row


def main() -> None:
    """Measure what is not in the file yet, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(FAMILIES))
    parser.add_argument("--plans", action="store_true", help="time the plans anew, on a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    held = ["predicted", "every_block", "measured", "accelerate", "kitsune", "training_hub_low", "training_hub_high"]
    units = {
        **dict.fromkeys(held, "B"), "error": "%",
        **dict.fromkeys(["seconds", "seconds_every_block", "plan"], "s"),
    }  # fmt: skip
    record = Record(
        question="How far are predicted bytes from those of every block?", settings={"tokens": TOKENS}, seed=0,
        environment=environment(), units=units,
    )  # fmt: skip
    known = Record.read(RESULT).rows if RESULT.exists() else []
    done = {row["family"] for row in known if row["table"] == "plans"}
    for row in known:
        if row["table"] == "cells" or (row["table"] == "plans" and not options.plans):
            record.add(row["table"], **{k: v for k, v in row.items() if k != "table"})
    with Progress("families", total=len(options.only), unit="model") as bar:
        for family in options.only:
            if family not in done:
                for cell in cells(family):
                    record.add("cells", **cell)
            if family not in done or options.plans:
                record.add("plans", family=family, plan=plan_seconds(family))
                record.write(RESULT)
            bar.advance(family=family)
    for row in published():
        record.add("published", **row)
    record.write(RESULT)
    worst = max((abs(row["error"]) for row in record.table("cells")), default=0.0)
    sys.stdout.write(json.dumps({"cells": len(record.table("cells")), "worst_percent": worst}) + "\n")


if __name__ == "__main__":
    main()
