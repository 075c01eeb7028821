"""What a merge costs: peak memory beyond the process, and CPU seconds beside mergekit's, on files made at random.

Both run as processes of their own on the same sharded folders, in turn (ours, theirs, ours, …), one thread each; CPU
seconds are user and system time of the merge alone, imports left out. Peak memory is the rise of the resident set over
what the process had before it merged. Times mean something on an idle machine only; memory does always::

    python -m benchmarks.valley.merge_costs --only memory
    python -m benchmarks.valley.merge_costs --only time --python mergekit-env/bin/python

``--tiny`` merges files of a few hundred kB once and keeps nothing: it shows that both programs run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.valley.store import Store
from sparing.valley.merging.files import INDEX, KINDS, TensorEntry, memory_of, write_header

# The shape of a 7B Llama is 4096 × 11008 and 32 layers; these have its proportions in two sizes
SIZES = {"narrow": (512, 1376, 8, 8192), "wide": (1024, 2752, 8, 16384)}  # width, hidden, layers, vocabulary
SEVEN = {"seven": (4096, 11008, 1, 32000)}
"""Tensors of a 7B model in bfloat16, embeddings and one of its 32 layers: memory alone is measured on them."""
TINY = {"tiny": (64, 128, 1, 256)}
METHODS = {
    "linear": "parameters: {weight: 0.5}",
    "slerp": "parameters: {t: 0.4}",
    "task_arithmetic": "parameters: {weight: 0.4}",
    "ties": "parameters: {weight: 0.5, density: 0.3}",
    "dare_ties": "parameters: {weight: 0.5, density: 0.3}",
    "della": "parameters: {weight: 0.5, density: 0.5}",
    "breadcrumbs": "parameters: {weight: 0.5, density: 0.8}",
    "nuslerp": "parameters: {weight: 0.5}",
    "multislerp": "parameters: {weight: 0.5}",
    "model_stock": "parameters: {}",
    "sce": "parameters: {select_topk: 0.3}",
}
OURS = """
import json, re, resource, sys, time, warnings
from pathlib import Path
import torch
torch.set_num_threads(1)
from sparing.valley.recipes.apply import merge_recipe
warnings.simplefilter("ignore")
merge_recipe("warm.yml", sys.argv[2] + "-warm")
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")
before, start = peak(), time.process_time()
merge_recipe(sys.argv[1], sys.argv[2])
print(json.dumps({"cpu": time.process_time() - start, "rise": peak() - before}))
"""
THEIRS = """
import json, re, sys, time, yaml
from pathlib import Path
import torch
torch.set_num_threads(1)
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
def run(file, out):
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(open(file))), out,
              MergeOptions(random_seed=0, quiet=True, write_model_card=False, copy_tokenizer=False))
run("warm.yml", sys.argv[2] + "-warm")
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")
before, start = peak(), time.process_time()
run(sys.argv[1], sys.argv[2])
print(json.dumps({"cpu": time.process_time() - start, "rise": peak() - before}))
"""


def write_model(folder: Path, size: tuple[int, int, int, int], seed: int, kind: str = "F32") -> int:
    """Write a Llama of random weights in shards, a tensor at a time; returns its bytes."""
    width, hidden, layers, words = size
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "vocab_size": words,
              "intermediate_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 8}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    outside = {
        "model.embed_tokens.weight": (words, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (words, width),
    }
    shards = [outside]
    for at in range(layers):
        block = f"model.layers.{at}."
        shapes = {f"{block}self_attn.{one}_proj.weight": (width, width) for one in "qkvo"}
        shapes |= {f"{block}mlp.{one}_proj.weight": (hidden, width) for one in ("gate", "up")}
        shapes |= {f"{block}mlp.down_proj.weight": (width, hidden)}
        shards.append(shapes | {f"{block}{one}_layernorm.weight": (width,) for one in ("input", "post_attention")})
    near, own = (torch.Generator().manual_seed(at) for at in (0, seed + 1))
    where, total = {}, 0
    for at, shapes in enumerate(shards, 1):
        name = f"model-{at:05}-of-{len(shards):05}.safetensors"
        entries = {key: TensorEntry(folder / name, shape, kind, 0) for key, shape in shapes.items()}
        with (folder / name).open("wb") as file:
            write_header(file, entries, {"format": "pt"})
            for shape in shapes.values():
                value = torch.randn(shape, generator=near) + 0.05 * torch.randn(shape, generator=own)
                file.write(memory_of(value.to(KINDS[kind])))
        where |= dict.fromkeys(shapes, name)
        total += sum(entry.size for entry in entries.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return total


def recipe(method: str, base: str, models: tuple[str, ...], dtype: str = "float32") -> str:
    """A recipe of a method."""
    named = "".join(f"  - model: {model}\n" for model in models)
    head = "" if method in {"linear", "nuslerp", "multislerp"} else f"base_model: {base}\n"
    return f"models:\n{named}merge_method: {method}\n{head}{METHODS[method]}\ndtype: {dtype}\n"


def run(program: str, python: str, folder: Path, size: str, method: str) -> dict[str, Any]:
    """One merge in a process of its own; its CPU seconds and the rise of its memory (bytes)."""
    for name, at in (("recipe.yml", size), ("warm.yml", "warm")):
        two = (f"{at}-base", f"{at}-a") if method == "slerp" else (f"{at}-a", f"{at}-b")
        dtype = "bfloat16" if at in SEVEN else "float32"
        (folder / name).write_text(recipe(method, f"{at}-base", two, dtype))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path("src").absolute()) if program == OURS else ""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        ran = subprocess.run([python, "-c", program, "recipe.yml", f"{out}/merged"], cwd=folder, env=environment,
                             check=True, capture_output=True, text=True)  # fmt: skip
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Fill results/valley_merge_memory.json and valley_merge_time.json, a row for each size and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("memory", "time"), required=True)
    parser.add_argument("--python", type=Path, help="of the environment that has mergekit 0.1.5, for times")
    parser.add_argument("--rounds", type=int, default=5, help="of each pair of times (count)")
    parser.add_argument("--tiny", action="store_true", help="one small size, one round, nothing kept")
    given = parser.parse_args()
    alone = given.only == "time" and given.python is None
    if alone:
        parser.error("--only time takes --python, of the environment that has mergekit")
    with tempfile.TemporaryDirectory() as made:
        store = Store(f"merge_{given.only}")
        if given.tiny:
            store.path, store.rows = Path(made) / store.path.name, {}
        sizes = TINY if given.tiny else {**SIZES, **(SEVEN if given.only == "memory" else {})}
        fill(store, Path(made), given, sizes, 1 if given.tiny else given.rounds)


def fill(store: Store, folder: Path, given: Any, sizes: Mapping[str, tuple[int, int, int, int]], rounds: int) -> None:
    """Make the models and measure every method of every size."""
    store.command = f"python -m benchmarks.valley.merge_costs --only {given.only}"
    store.command += "" if given.only == "memory" else " --python mergekit-env/bin/python"
    for size, shape in {"warm": (32, 64, 1, 64), **sizes}.items():
        total = 0
        for at, name in enumerate(("base", "a", "b")):
            total = write_model(folder / f"{size}-{name}", shape, at, "BF16" if size in SEVEN else "F32")
        for method in METHODS if size != "warm" else ():

            def memory(method: str = method, size: str = size, total: int = total) -> Mapping[str, Any]:
                found = run(OURS, sys.executable, folder, size, method)
                return {"size": size, "method": method, "model_bytes": total, "rise_bytes": found["rise"]}

            def one_round(method: str = method, size: str = size) -> Mapping[str, Any]:
                ours = run(OURS, sys.executable, folder, size, method)
                theirs = run(THEIRS, str(given.python.absolute()), folder, size, method)
                return {"size": size, "method": method, "ours": ours["cpu"], "theirs": theirs["cpu"],
                        "ratio": theirs["cpu"] / ours["cpu"], "load": os.getloadavg()[0],
                        "rise": ours["rise"], "their_rise": theirs["rise"]}  # fmt: skip

            if given.only == "memory":
                store.once(f"{size} {method}", memory)
                continue
            for at in range(rounds):
                store.once(f"{size} {method} round {at}", partial(one_round))


if __name__ == "__main__":
    main()
