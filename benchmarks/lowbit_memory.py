"""How much memory does a step take with frozen blocks in 4 or 8 bits: Llama-3-8B, without a GPU.

Run ``python -m benchmarks.lowbit_memory`` (about five minutes on one core). Every row is a prediction by
``sparing.memory.predict``: two steps of the unmodified transformers model on fake tensors, batch 1, 1024 tokens, bf16
weights, gradients and moments, fused AdamW, loss in float32 as ``sparing finetune`` computes it. LISA trains one block,
with a frozen embedding; the block is the lowest (the longest backward pass that a draw can have) or the middle one.

``steps``: steps of ``sparing finetune --weights nf4`` with checkpointing and two micro-batches, as `plan` prices them:
the loss in parts, with and without 32-bit copies of what trains, with moments of its number format or in 8 bits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing.jobs.lm.adapters import Lora, with_adapters_
from sparing.jobs.lm.losses import loss_of
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.optimizer import Apollo, GaLore, optimizer_of
from sparing.jobs.lm.prices import price
from sparing.jobs.lm.step import FitStep
from sparing.layersample import Fixed, LayerSampling, Sampler
from sparing.layersample.config import Frozen
from sparing.memory import CATEGORIES, predict
from sparing.report import environment
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "lowbit_memory.json"
COMMAND = "python -m benchmarks.lowbit_memory"
TOKENS, VOCAB, BLOCKS = 1024, 128256, 32
FORMS: tuple[Frozen | None, ...] = (None, "int8", "nf4")
adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)


def llama() -> nn.Module:
    """Llama-3-8B on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=BLOCKS, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=VOCAB, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def profile(model: nn.Module, names: set[str], checkpointing: bool) -> dict[str, Any]:
    """Bytes of a step in which the named parameters train."""
    ids = torch.arange(TOKENS)[None] % VOCAB

    def step(shapes: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
        (loss_of(shapes, **batch) / TOKENS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    found = predict(model, {"ids": ids, "labels": ids}, adamw, trainable=names, step=step, checkpointing=checkpointing)
    parts = {name: getattr(found, name) for name in (*CATEGORIES, "total")}
    return parts | {"phases": {name: phase.total for name, phase in found.phases.items()}}


def lisa(form: Frozen | None, *, head: bool, block: int, checkpointing: bool) -> dict[str, Any]:
    """One block of LISA, or of QLISA."""
    model, settings = llama(), LayerSampling(active=1, embed=False, head=head, sampler=Fixed(blocks=(block,)))
    low = LayerSampling(active=1, embed=False, head=head, sampler=Fixed(blocks=(block,)), frozen=form, exact=False)
    with Sampler(model, adamw(model.parameters()), low if form else settings) as sampler:
        sampler.begin_step(0)
        return profile(model, set(sampler.trainable), checkpointing)


def lora(form: Frozen | None, *, checkpointing: bool) -> dict[str, Any]:
    """LoRA of rank 16 on all linear layers of the blocks, or QLoRA."""
    model = with_adapters_(llama(), Lora(rank=16), 0, weights=form)
    return profile(model, {name for name, p in model.named_parameters() if p.requires_grad}, checkpointing)


def steps() -> Iterator[dict[str, Any]]:
    """Steps of QLISA as `finetune` runs them, by blocks that train, head, copies and moments."""
    source = Source(llama().config, "auto")
    for active, head, masters, moments in product((1, 2), (True, False), (False, True), ("adamw", "adamw-8bit")):
        step = FitStep(
            method=LayerSampling(active=active, embed=False, head=head, masters=masters), dtype="bfloat16", batch=1,
            length=TOKENS, accumulate=2, checkpointing=True, weights="nf4", masters=masters,
            optimizer=optimizer_of(moments, device="cuda", apollo=Apollo(), galore=GaLore()),
        )  # fmt: skip
        found = price(source, step)
        about = {"blocks": active, "head": head, "copies": masters, "moments": moments, "host": found.host}
        yield about | {name: getattr(found.bytes, name) for name in (*CATEGORIES, "total")}


def main() -> None:
    """Predict every row."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    # at the peak, in float32: their logarithms, and the gradients of those and of the logits
    logits = {"count": TOKENS * VOCAB, "bytes each at the peak": 3 * 4}
    for form in FORMS:
        for checkpointing in (False, True):
            cases: dict[str, Callable[[], dict[str, Any]]] = {
                f"{'LISA' if form is None else 'QLISA'}, block {block}{'' if head else ', head frozen'}": partial(
                    lisa, form, head=head, block=block, checkpointing=checkpointing
                )
                for head in (True, False)
                for block in (0, BLOCKS // 2)
            }
            cases["LoRA" if form is None else "QLoRA"] = partial(lora, form, checkpointing=checkpointing)
            for name, case in cases.items():
                about = {"method": name, "frozen weights": form or "bfloat16", "checkpointing": checkpointing}
                rows[f"{name} {form} {checkpointing}"] = about | case()
                settings = {"tokens": TOKENS, "batch": 1, "vocabulary": VOCAB, "logits": logits}
                document: dict[str, Any] = {
                    "command": COMMAND,
                    "environment": environment() | {"command": COMMAND},
                    "settings": settings,
                }
                write_whole(RESULT, json.dumps(document | {"rows": rows}, indent=1, allow_nan=False) + "\n")
    document["steps"] = list(steps())
    write_whole(RESULT, json.dumps(document | {"rows": rows}, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
