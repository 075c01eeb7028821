"""Our merges beside mergekit's, on two tiny language models: largest difference of any weight, by method.

mergekit runs as its own program in an environment of its own (see ``benchmarks.peers``)::

    python -m benchmarks.valley.mergekit_check --python mergekit-env/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.valley.store import Store
from sparing.valley.mergekit import NAME
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.ties import Ties

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "linear": ({"weight": [0.25, 0.75]}, Linear((0.25, 0.75))),
    "task_arithmetic": ({"weight": [0.4, 0.4]}, TaskArithmetic(0.4)),
    "ties": ({"weight": [1.0, 1.0], "density": 0.2}, Ties(0.2, tied="plus")),
    "dare_linear": ({"weight": [0.4, 0.4], "density": 0.5}, None),
    NAME: ({"weight": [1.0, 1.0], "density": 0.2}, SignAware(0.2)),
}
"""mergekit's name -> its settings, and ours; DARE draws at random, so that only its mean can be compared."""


def models(kind: str, folder: Path) -> list[Path]:
    """Write a base and two models near it."""
    small = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    paths = []
    for at, name in enumerate(("base", "a", "b")):
        torch.manual_seed(0)
        if kind == "gpt2":
            model: Any = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **small))
        else:
            shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
            model = LlamaForCausalLM(LlamaConfig(**shape, **small))
        torch.manual_seed(at)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.02 * (at > 0) * torch.randn_like(value))
        paths.append(folder / f"{kind}-{name}")
        model.save_pretrained(paths[-1])
    return paths


def theirs(python: Path, method: str, settings: Mapping[str, Any], paths: list[Path], out: Path) -> dict[str, Tensor]:
    """Run ``mergekit-yaml`` through our registering command."""
    shared = {name: value for name, value in settings.items() if name != "weight"}
    config = {
        "merge_method": method,
        "models": [
            {"model": str(path), "parameters": {"weight": weight}}
            for path, weight in zip(paths[1:], settings["weight"], strict=True)
        ],
        "parameters": shared,
        "dtype": "float32",
    } | ({} if method == "linear" else {"base_model": str(paths[0])})
    out.mkdir()
    (out / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    environment = os.environ | {"PYTHONPATH": "src", "HF_HUB_OFFLINE": "1"}
    command = [python, "-m", "sparing.valley.mergekit", out / "config.yml", out / "merged", "--random-seed", "0"]
    subprocess.run(list(map(str, command)), check=True, env=environment, capture_output=True)
    return {name: value for file in (out / "merged").glob("*.safetensors") for name, value in load_file(file).items()}


def compare(store: Store, python: Path, kind: str, folder: Path) -> None:
    """Merge by both, method by method."""
    paths = models(kind, folder)
    base, *states = [load_file(path / "model.safetensors") for path in paths]

    def measured(method: str) -> dict[str, Any]:
        settings, ours = CASES[method]
        got = theirs(python, method, settings, paths, folder / f"{kind}-{method}")
        if ours is None:  # mergekit restores the L1 norm that it drops; ours divides by 1 − p: only in the mean alike
            wanted, what = merge(states, base=base, method=TaskArithmetic(0.4)), "mean, in standard errors"
            differences = torch.cat([(got[name] - wanted[name]).flatten() for name in got])
            value = (differences.mean().abs() / (differences.std() / len(differences) ** 0.5)).item()
        else:
            wanted, what = merge(states, base=base, method=ours), "largest difference of a weight"
            value = max((got[name] - wanted[name]).abs().max().item() for name in got)
        return {"model": kind, "method": method, "what": what, "value": value}

    for method in CASES:
        store.once(f"{kind} {method}", partial(measured, method))


def main() -> None:
    """Fill results/valley_mergekit.json, a row for each model and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has mergekit 0.1.5")
    python = parser.parse_args().python.absolute()
    store = Store("mergekit")
    store.command = "python -m benchmarks.valley.mergekit_check --python mergekit-env/bin/python"
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("gpt2", "llama"):
            compare(store, python, kind, Path(folder))


if __name__ == "__main__":
    main()
