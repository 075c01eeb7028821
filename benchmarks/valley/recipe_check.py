"""Recipes through mergekit and through ours, on tiny models in float32: the largest difference of any weight.

mergekit runs as a program of its own in an environment of its own (see ``benchmarks.peers``)::

    python -m benchmarks.valley.recipe_check --python mergekit-env/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.valley.recipes import EXAMPLES, METHODS, RANDOM
from benchmarks.valley.store import Store
from sparing.valley.recipes.apply import merge_recipe

WORDS = [f"w{at}" for at in range(60)]

# One process for all: importing mergekit takes longer than all merges
THEIRS = """
import json, sys, yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
for name, text, out in json.load(open(sys.argv[1])):
    options = MergeOptions(random_seed=0, quiet=True, lora_merge_cache="lora-cache", write_model_card=False)
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), out, options)
"""


def write_tokenizer(folder: Path, added: list[str]) -> int:
    """Write a tokenizer of whole words, with tokens added to it; return how many there are."""
    words = {word: at for at, word in enumerate(["<unk>", "</s>", *WORDS])}
    entries = [{"id": at, "content": word, "special": True} for word, at in list(words.items())[:2]]
    entries += [{"id": len(words) + at, "content": word, "special": True} for at, word in enumerate(added)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [flags | one for one in entries],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(words) + len(added)


def write_models(folder: Path) -> None:
    """Write a base, models near it, one with two more tokens, an adapter, and two GPT-2."""
    for at, name in enumerate(("base", "orca", "wizard", "platypus", "chat", "gpt2", "gpt2-b")):
        (folder / name).mkdir()
        rows = write_tokenizer(folder / name, ["<|im_end|>", "<|im_start|>"] if name == "chat" else [])
        small = {"vocab_size": rows, "bos_token_id": 1, "eos_token_id": 1}
        torch.manual_seed(7)
        if name.startswith("gpt2"):
            model: Any = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, n_positions=32, **small))
        else:
            shape = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 4, "num_attention_heads": 4,
                     "num_key_value_heads": 2}  # fmt: skip
            model = LlamaForCausalLM(LlamaConfig(**shape, **small))
        torch.manual_seed(at)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.02 * (name != "base") * torch.randn_like(value))
        model.save_pretrained(folder / name)
    adapter = folder / "adapter"
    adapter.mkdir()
    targets = {
        f"model.layers.{at}.self_attn.{one}_proj": (32, 16 if one == "v" else 32) for at in range(4) for one in "qv"
    }
    factors = {}
    for at, (target, (width, height)) in enumerate(targets.items()):
        generator = torch.Generator().manual_seed(at)
        factors[f"base_model.model.{target}.lora_A.weight"] = 0.1 * torch.randn(4, width, generator=generator)
        factors[f"base_model.model.{target}.lora_B.weight"] = 0.1 * torch.randn(height, 4, generator=generator)
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none",
              "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "lora_dropout": 0.0}  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def largest_difference(ours: Path, theirs: Path) -> dict[str, Any]:
    """Compare two results: tensors by name, embeddings by token."""
    mine, other = tensors(ours), tensors(theirs)
    assert mine.keys() == other.keys(), mine.keys() ^ other.keys()
    words = [AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (ours, theirs)]
    assert words[0].keys() == words[1].keys()
    order = [torch.tensor([one[word] for word in sorted(one)]) for one in words]
    worst = 0.0
    for name, value in mine.items():
        pair = [value, other[name]]
        if "embed_tokens" in name or "lm_head" in name:
            pair = [tensor[rows] for tensor, rows in zip(pair, order, strict=True)]
        worst = max(worst, (pair[0] - pair[1]).abs().max().item())
    scale = max(value.abs().max().item() for value in other.values())
    return {"what": "largest difference of a weight", "value": worst, "largest_weight": scale, "tensors": len(mine)}


def kept_norms(base: Path, model: Path, *merged: Path) -> dict[str, Any]:
    """Of random methods: how far the L1 norms of ours and theirs lie from that of the task vector (relative)."""
    start, end, worst = tensors(base), tensors(model), 0.0
    for found in merged:
        for name, value in tensors(found).items():
            whole = (end[name] - start[name]).abs().sum().item()
            worst = max(worst, abs((value - start[name]).abs().sum().item() / whole - 1))
    return {"what": "L1 norm beside that of the change (relative)", "value": worst}


def main() -> None:
    """Fill results/valley_recipes.json, a row for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has mergekit 0.1.5")
    python = parser.parse_args().python.absolute()
    store = Store("recipes")
    store.command = "python -m benchmarks.valley.recipe_check --python mergekit-env/bin/python"
    parts = {"example": EXAMPLES, "method": METHODS, "random": RANDOM}
    recipes = {f"{part}: {name}": text for part, each in parts.items() for name, text in each.items()}
    missing = [key for key in recipes if key not in store.rows]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_models(folder)
        jobs = [(key, recipes[key], f"theirs-{at}") for at, key in enumerate(missing)]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        if missing:
            subprocess.run([str(python), "-c", THEIRS, "jobs.json"], check=True, env=environment, cwd=folder)
        for at, key in enumerate(missing):
            (folder / "recipe.yml").write_text(recipes[key])

            def measured(at: int, key: str) -> Mapping[str, Any]:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    ours = merge_recipe(folder / "recipe.yml", folder / f"ours-{at}")
                theirs = folder / f"theirs-{at}"
                found = kept_norms(folder / "base", folder / "orca", ours, theirs) if key.startswith("random") else (
                    largest_difference(ours, theirs))  # fmt: skip
                return {"recipe": key, **found}

            store.once(key, partial(measured, at, key))


if __name__ == "__main__":
    main()
