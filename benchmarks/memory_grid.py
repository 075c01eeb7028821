"""How much memory does fine-tuning take: full, LoRA and LISA, from GPT-2 to LLaMA-2-70B, without a GPU.

Run ``python -m benchmarks.memory_grid`` (about ten minutes on one core, under 1 GiB). Every row is a prediction by
``sparing.memory.predict``: two steps of the unmodified transformers model on fake tensors, batch 1, 1024 tokens, bf16
weights, gradients and moments, AdamW one parameter at a time. Beside it: a closed formula, the paper's Table 1 and the
peaks that others measured on an H100. Rows already in the result file are kept; ``--again`` starts over. At the end the
tables of ``docs/results/memory.md`` are written anew.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.memory_formula import peak_by_formula
from benchmarks.memory_tables import with_tables
from sparing.memory import predict
from sparing.memory.sizes import CATEGORIES

RESULT = Path(__file__).parent / "results" / "memory_grid.json"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "memory.md"
TOKENS = 1024
GB = 1e9

LLAMA: dict[str, dict[str, Any]] = {
    "TinyLlama-1.1B": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "Mistral-7B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
    "LLaMA-2-7B": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "Llama-3.1-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "LLaMA-2-70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 32000,
    },
}  # fmt: skip
MODELS = ("GPT-2 small", *LLAMA)

FULL, LORA, LISA = "full", "LoRA r={}", "LISA E+H{}"
METHODS = (FULL, *(LORA.format(r) for r in (128, 256, 512)), *(LISA.format(more) for more in ("", "+2L", "+4L")))
FROZEN = "E frozen, H+2L"
OPTIMIZERS = {
    "loop": partial(torch.optim.AdamW, foreach=False),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
}

# Table 1 of Pan et al. 2024 (arXiv:2403.17919), as printed ("G"); for LLaMA-2-70B the figure of one of four devices
PAPER = {
    "GPT-2 small": (3.8, 3.3, 3.5, 3.7, 3.3, 3.3, 3.4),
    "TinyLlama-1.1B": (13, 7.9, 8.6, 10, 7.4, 8.0, 8.3),
    "Mistral-7B": (59, 23, 26, 28, 21, 23, 24),
    "LLaMA-2-7B": (59, 23, 26, 28, 21, 23, 24),
    "LLaMA-2-70B": (None, 79, None, None, 71, 75, 79),
}
# Tian et al. 2026 (arXiv:2604.07808): peaks on an H100, batch 1, 1024 tokens, as printed
H100 = {
    ("TinyLlama-1.1B", FULL): 8.76, ("TinyLlama-1.1B", "LoRA r=128"): 4.71, ("TinyLlama-1.1B", "LISA E+H+2L"): 4.93,
    ("LLaMA-2-7B", FULL): 51.32, ("LLaMA-2-7B", "LoRA r=128"): 19.97, ("LLaMA-2-7B", "LISA E+H+2L"): 22.31,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the grid."""

    model: str
    """Name in ``MODELS``."""
    method: str
    """What trains."""
    attention: str = "sdpa"
    """Attention of transformers."""
    optimizer: str = "loop"
    """Form of AdamW: one parameter at a time, all at once, or fused."""
    dropout: float = 0.0
    """Dropout before LoRA's adapters (share)."""
    checkpointing: bool = False
    """Whether blocks recompute their activations."""
    mask: bool = False
    """Whether the batch has an attention mask that must be kept, as padded text does."""
    targets: str = "all"
    """Where LoRA's adapters sit: ``all`` linears, embedding and head (the paper), or only the ``body``'s linears."""
    adapters: str = "bfloat16"
    """Type of LoRA's adapters; peft's own default is float32."""

    @property
    def key(self) -> str:
        """Identity in the result file."""
        return " | ".join(str(value) for value in asdict(self).values())


def cases() -> Iterator[Case]:
    """Yield the grid, small models first, then its variations."""
    grid = [Case(model=model, method=method) for model in MODELS for method in (*METHODS, FROZEN)]
    yield from grid
    for case in grid:
        if case.model in {"GPT-2 small", "LLaMA-2-7B"}:
            yield replace(case, attention="eager")
    for case in grid:
        if case.model in {"Mistral-7B", "LLaMA-2-7B", "Llama-3.1-8B"} and case.method in {FULL, "LISA E+H+2L", FROZEN}:
            yield replace(case, checkpointing=True)
    yield from variations()


def variations() -> Iterator[Case]:
    """Yield what a setting that the sources leave open would change."""
    seven = partial(Case, model="LLaMA-2-7B")
    for method in METHODS[1:4]:
        yield seven(method=method, dropout=0.1)
    for model in ("TinyLlama-1.1B", "LLaMA-2-7B"):
        for adapters in ("bfloat16", "float32"):
            yield Case(model=model, method="LoRA r=128", targets="body", adapters=adapters)
        for method in (FULL, "LISA E+H+2L"):
            yield Case(model=model, method=method, mask=True)
    for method in (FULL, "LISA E+H+2L"):
        for optimizer in ("foreach", "fused"):
            yield seven(method=method, optimizer=optimizer)


def layers_of(model: str) -> int:
    """Decoder layers (count)."""
    return LLAMA[model]["num_hidden_layers"] if model in LLAMA else 12


def build(case: Case) -> nn.Module:
    """Make the model of a case, under the meta device; bf16."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    common = {"use_cache": False, "attn_implementation": case.attention}
    if case.model in LLAMA:
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**LLAMA[case.model], **common))
    else:
        model = GPT2LMHeadModel(GPT2Config(**common))
    model = model.to(torch.bfloat16)
    return with_adapters(model, case) if case.method.startswith("LoRA") else model


def with_adapters(model: nn.Module, case: Case) -> nn.Module:
    """Wrap every linear of the blocks, the embedding and the head in LoRA, as the paper's script does."""
    from peft import LoraConfig, get_peft_model

    is_llama = case.model in LLAMA
    body = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    ends = ["embed_tokens", "lm_head"]
    if not is_llama:
        body, ends = ["c_attn", "c_proj", "c_fc"], ["wte", "lm_head"]
    targets = body + (ends if case.targets == "all" else [])
    rank = int(case.method.removeprefix("LoRA r="))
    settings = LoraConfig(
        r=rank, lora_alpha=32, lora_dropout=case.dropout, target_modules=targets, fan_in_fan_out=not is_llama
    )
    wrapped = get_peft_model(model, settings)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(getattr(torch, case.adapters))
    return wrapped


def active_layers(case: Case) -> tuple[int, ...]:
    """Indices of the blocks that train: γ spread evenly, or the two in the middle when the embedding is frozen."""
    count = layers_of(case.model)
    if case.method == FROZEN:
        return (count // 2 - 1, count // 2)
    active = {"LISA E+H": 0, "LISA E+H+2L": 2, "LISA E+H+4L": 4}.get(case.method, count)
    return tuple((2 * k + 1) * count // (2 * active) for k in range(active))


def trainable_of(case: Case) -> Callable[[str], bool] | None:
    """Say which parameters train; ``None`` for LoRA, where peft has set the flags."""
    if case.method.startswith("LoRA"):
        return None
    chosen = active_layers(case)

    def trainable(name: str) -> bool:
        for part in ("model.layers.", "transformer.h."):
            if name.startswith(part):
                return int(name.removeprefix(part).split(".")[0]) in chosen
        return not (case.method == FROZEN and any(part in name for part in ("embed", "wte", "wpe")))

    return trainable


def row_of(case: Case) -> dict[str, Any]:
    """Predict one case."""
    names = ("input_ids", "labels", "attention_mask") if case.mask else ("input_ids", "labels")
    batch = dict.fromkeys(names, ((1, TOKENS), torch.long))
    started = time.perf_counter()
    profile = predict(
        partial(build, case), batch, OPTIMIZERS[case.optimizer], trainable=trainable_of(case),
        checkpointing=case.checkpointing, device="cuda",
    )  # fmt: skip
    forward, step = profile.phases["forward"], profile.phases["step"]
    known = case == Case(model=case.model, method=case.method) and case.method in METHODS
    return {
        **asdict(case),
        "active_layers": None if case.method.startswith("LoRA") else list(active_layers(case)),
        "params": step.params, "grads": step.grads, "optimizer_state": step.optimizer,
        "activations_at_forward_end": forward.activations,
        "peak": profile.total,
        "peak_composition": {name: getattr(profile, name) for name in CATEGORIES},
        "formula": formula_of(case),
        "paper_g": PAPER[case.model][METHODS.index(case.method)] if known and case.model in PAPER else None,
        "h100": H100.get((case.model, case.method)) if known else None,
        "seconds": round(time.perf_counter() - started, 2),
        "process_peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def formula_of(case: Case) -> int | None:
    """The closed formula, where it applies: Llama, fused attention, no adapters, no checkpointing, AdamW in a loop."""
    plain = Case(model=case.model, method=case.method)
    if case.model not in LLAMA or case != plain or case.method.startswith("LoRA"):
        return None
    return peak_by_formula(LLAMA[case.model], active_layers(case), TOKENS, embedding=case.method != FROZEN)


def main() -> None:
    """Fill the result file row by row, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="forget the rows that are there")
    again = parser.parse_args().again
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    result = json.loads(RESULT.read_text()) if RESULT.exists() and not again else {"rows": {}}
    result |= {"command": shlex.join(["python", "-m", "benchmarks.memory_grid", *sys.argv[1:]]), "units": "bytes",
               "setting": f"batch 1, {TOKENS} tokens, bf16, second step",
               "versions": {name: version(name) for name in ("torch", "transformers", "peft")}}  # fmt: skip
    grid = list(cases())
    for number, case in enumerate(grid, 1):
        if case.key not in result["rows"]:
            result["rows"][case.key] = row = row_of(case)
            write(RESULT, json.dumps(result, indent=1) + "\n")
            print(f"{number}/{len(grid)} {case.key}: {row['peak'] / GB:.2f} GB in {row['seconds']} s", file=sys.stderr)
    write(PAGE, with_tables(PAGE.read_text(), list(result["rows"].values())))


def write(path: Path, text: str) -> None:
    """Replace a file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    main()
