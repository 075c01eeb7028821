"""Are LoRA's weight norms skewed towards the embedding by training, or by how peft draws the adapters?

Run ``python -m benchmarks.norm_skew`` (about four CPU minutes on one core; finished rows are kept). Figure 2 of the
paper shows, layer by layer, the mean over fine-tuning steps of the norm of LoRA's adapters and of fully trained
weights, and takes its skew as the reason to train embedding and head always. Here two pretrained models are fine-tuned
on *Alice in Wonderland* by three arms, and each layer's norm is read before the first step, in the mean over the steps,
and as the length that the weights themselves have moved:

    full           every weight
    LoRA           peft's adapters of rank 128 on all linears, the embedding and the head, as peft draws them
    LoRA, scaled   the same, the embedding's adapter drawn with the deviation of the others' (1/√(3r), not 1)

peft draws the embedding's B from N(0, 1) and every linear's A uniformly with variance 1/(3·fan-in); the other halves
are zero. Norms before any step are therefore √(d·r), √(7r/3) for a block of seven linears and √(r/3) for the head.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from sparing.data import fetch, load_text
from sparing.report import Progress, environment
from sparing.report.atomic import write_whole
from sparing.seeds import number, stream

RESULT = Path(__file__).parent / "results" / "norm_skew.json"
COMMAND = "python -m benchmarks.norm_skew"
RANK, ALPHA, LENGTH = 128, 32, 96
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RATES = {"full": 3e-4, "LoRA": 6e-4, "LoRA, scaled": 6e-4}
"""AdamW's rate by arm: those the paper chose for its smallest model."""
FIGURE = {
    "LLaMA-2-7B, embedding": (732.0, math.sqrt(4096 * RANK)), "LLaMA-2-7B, a block": (17.4, math.sqrt(7 * RANK / 3)),
    "LLaMA-2-7B, head": (6.65, math.sqrt(RANK / 3)), "GPT-2, embedding": (311.0, math.sqrt(768 * RANK)),
    "GPT-2, a block": (13.1, math.sqrt(4 * RANK / 3)),
}  # fmt: skip
"""Norms under LoRA as read off Figure 2, means over training; and before any step, as peft draws them (GPT-2's blocks
have four linears)."""
CASES = {"stories15m": (3, 30, 1), "smollm2-135m-instruct": (1, 4, 1)}
"""Model -> seeds, optimizer steps, rows of a step."""


@functools.cache
def _pretrained(name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(fetch(name), dtype=torch.float32)
    return model


def model_of(name: str, arm: str, seed: int) -> nn.Module:
    """The pretrained model, with adapters where the arm has them."""
    model = copy.deepcopy(_pretrained(name))
    if arm == "full":
        return model
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[*LINEARS, "embed_tokens", "lm_head"])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied weights, which is what these models have
        torch.manual_seed(number(seed, "adapters"))
        adapted: nn.Module = get_peft_model(model, settings)
    if arm == "LoRA, scaled":
        with torch.no_grad():
            for name_, weight in adapted.named_parameters():
                if "lora_embedding_B" in name_:
                    weight.mul_(1 / math.sqrt(3 * RANK))
    return adapted


def layer_of(name: str) -> str:
    """The layer that a parameter belongs to."""
    if ".layers." in name:
        return f"block {name.split('.layers.')[1].split('.')[0]}"
    return "head" if "lm_head" in name else "embedding" if "embed_tokens" in name else "norm"


def by_layer(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of all tensors of a layer together."""
    squares: dict[str, float] = {}
    for name, tensor in tensors.items():
        layer = layer_of(name)
        squares[layer] = squares.get(layer, 0.0) + float(tensor.detach().double().square().sum())
    return {layer: math.sqrt(square) for layer, square in squares.items() if layer != "norm"}


def effective(model: nn.Module) -> dict[str, Tensor]:
    """What the arm has added to each weight: B·A·scale of every adapter; empty without adapters."""
    found = {}
    for name, module in model.named_modules():
        if getattr(module, "lora_A", None) or getattr(module, "lora_embedding_A", None):
            found[name] = module.get_delta_weight("default").detach()  # type: ignore[operator]
    return found


@functools.cache
def tokens(name: str) -> Tensor:
    """The book, in rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetch(name))
    ids = tokenizer(load_text("alice", first=20_000), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids).unfold(0, LENGTH, LENGTH)


def fine_tuned(name: str, arm: str, seed: int, advance: Callable[[], None]) -> dict[str, Any]:
    """One run: norms before, in the mean over steps, and of what moved; the loss at both ends."""
    _, steps, batch = CASES[name]
    model, rows = model_of(name, arm, seed), tokens(name)
    trained = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
    base = by_layer({key: weight for key, weight in model.named_parameters() if "lora_" not in key})
    start = by_layer(trained)
    before = {key: weight.detach().clone() for key, weight in trained.items()} if arm == "full" else {}
    optimizer = torch.optim.AdamW(trained.values(), RATES[arm], weight_decay=0.0)
    draws, losses, norms, slopes = stream(seed, "rows"), [], [], []
    for _ in range(steps):
        chosen = rows[torch.randint(0, len(rows), (batch,), generator=draws)]
        loss = model(input_ids=chosen, labels=chosen).loss
        loss.backward()
        slopes.append(by_layer({key: w.grad for key, w in trained.items() if w.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(by_layer(trained))
        advance()
    moved = {key: trained[key].detach() - old for key, old in before.items()} or effective(model)
    return {
        "model": name, "arm": arm, "seed": seed, "steps": steps, "width": int(model.config.hidden_size),
        "blocks": int(model.config.num_hidden_layers), "start": start, "mean": _mean(norms), "end": norms[-1],
        "moved": by_layer(moved), "weights": base, "gradient": _mean(slopes), "losses": [losses[0], losses[-1]],
    }  # fmt: skip


def _mean(each: list[dict[str, float]]) -> dict[str, float]:
    return {layer: fmean(one[layer] for one in each) for layer in each[0]}


def _plain(value: Any) -> Any:
    """Six digits of every number."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _write(document: dict[str, Any]) -> None:
    write_whole(RESULT, json.dumps(document, indent=0, allow_nan=False) + "\n")


def main() -> None:
    """Measure what is not there yet."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else {}
    runs = [(name, arm, seed) for name, (seeds, *_) in CASES.items() for seed in range(seeds) for arm in RATES]
    left = [run for run in runs if " ".join(map(str, run)) not in rows]
    about = {"command": COMMAND, "environment": environment() | {"command": COMMAND}}
    figure = {name: {"read": read, "drawn": drawn} for name, (read, drawn) in FIGURE.items()}
    about["paper"] = {"source": "Pan et al. 2024, Figure 2, read off", **figure}
    settings = {"rank": RANK, "alpha": ALPHA, "tokens in a row": LENGTH, "rates": RATES, "cases": CASES}
    with Progress("norms", total=sum(CASES[name][1] for name, *_ in left)) as bar:
        for run in left:
            rows[" ".join(map(str, run))] = _plain(fine_tuned(*run, advance=bar.advance))
            _write(about | {"settings": settings, "rows": rows})
    _write(about | {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
