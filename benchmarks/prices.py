"""What the library predicts, beforehand, of cases that are measured: here, or by the other benchmarks.

Run ``python -m benchmarks.prices`` (about three CPU minutes on one core). It writes five tables:

    memory      bytes of a training step of small language models: predicted, the ledger of live tensors of a real step,
                and by how much the resident set of a fresh process grows when it builds the model and takes two steps
    unrolling   bytes, work and cosine that the planner of hypergradients gives for the arms of ``hypergrad_cost``
    directions  expected cosine of sampled hypergradients on the problems of ``hypergrad_cosine``
    steps       how many times fewer operations a step of ``step_time`` takes than full fine-tuning
    sparse      bytes and live parameters of the sparse Llama of ``scaling_speed``

Nothing in the last four is measured here; docs/results/predicted.md sets them beside what was.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.hypergrad_cosine import sampled_size
from benchmarks.hypergrad_cost import ALLOCATOR, MEMORY_DEPTHS, TIME_DEPTHS, resident
from benchmarks.hypergrad_toys import TOYS, reweighting
from sparing import hypergrad as hg
from sparing import layersample as ls
from sparing import memory
from sparing.layersample.price.predict import Full
from sparing.report import Progress, Record, environment, print_table

RESULT = Path(__file__).parent / "results" / "prices.jsonl"
ADAMW = partial(torch.optim.AdamW, lr=1e-4, foreach=False)
SPARSITIES = (0.5, 0.75, 0.875, 0.9375, 0.969, 0.984, 0.992)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small language model and a way to train it."""

    family: str = "llama"
    """``llama`` or ``gpt2``."""
    layers: int = 6
    """Blocks (count)."""
    width: int = 384
    """Hidden width."""
    way: str = "full"
    """``full``, ``lisa`` (two blocks, embedding and head), ``frozen`` (without the embedding) or ``lora``."""
    dtype: str = "float32"
    """Of weights, gradients and moments."""
    checkpointing: bool = False
    """Whether blocks recompute their activations."""

    @property
    def label(self) -> str:
        """Its name in the table."""
        extra = (", checkpointing" if self.checkpointing else "") + (f", {self.dtype}" * (self.dtype != "float32"))
        return f"{self.family} {self.layers}×{self.width}, {self.way}{extra}"


CASES = (
    *(Case(way=way) for way in ("full", "lisa", "frozen", "lora")), Case(checkpointing=True),
    Case(family="gpt2"), Case(family="gpt2", way="lisa"),
)  # fmt: skip


def model_of(case: Case, layers: int | None = None, width: int | None = None) -> nn.Module:
    """The model, with adapters where the way has them."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    layers, width = layers or case.layers, width or case.width
    if case.family == "gpt2":
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64, vocab_size=8192, n_positions=256, **none)
        config.use_cache, model = False, GPT2LMHeadModel(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers, vocab_size=8192,
            num_attention_heads=width // 64, num_key_value_heads=width // 64, max_position_embeddings=256,
            use_cache=False,
        ))  # fmt: skip
    model = model.to(getattr(torch, case.dtype))
    if case.way != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    adapted: nn.Module = get_peft_model(
        model, LoraConfig(r=16, target_modules="all-linear", fan_in_fan_out=case.family == "gpt2")
    )
    return adapted


def settings_of(case: Case) -> dict[str, Any]:
    """What ``predict`` and ``measure`` are told beside the model."""
    active = (case.layers - 2, case.layers - 1)
    body = ".layers." if case.family == "llama" else ".h."

    def trains(name: str) -> bool:
        outside = body not in name and not (case.way == "frozen" and ("embed" in name or ".w" in name))
        return outside or any(f"{body}{block}." in name for block in active)

    return {"checkpointing": case.checkpointing} | ({"trainable": trains} if case.way in {"lisa", "frozen"} else {})


def batch(length: int = 128) -> dict[str, torch.Tensor]:
    """Two rows of token ids."""
    ids = torch.arange(2 * length).remainder(8192).reshape(2, length)
    return {"input_ids": ids, "labels": ids.clone()}


def child(at: int) -> None:
    """Inside a fresh process: how much the resident set grows at most; printed in bytes."""
    case = CASES[at]
    torch.set_num_threads(1)
    memory.measure(lambda: model_of(case, 2, 64), batch(16), ADAMW, checkpointing=case.checkpointing)  # libraries load
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    floor = resident("VmRSS")
    model, given = model_of(case), settings_of(case)
    for name, weight in model.named_parameters():
        weight.requires_grad_(weight.requires_grad and given.get("trainable", lambda _: True)(name))
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer, rows = ADAMW([w for w in model.parameters() if w.requires_grad]), batch()
    model.train()
    for _ in range(2):
        model(**rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(json.dumps({"process": resident("VmHWM") - floor}) + "\n")


def memory_rows() -> Iterator[dict[str, Any]]:
    """Predicted, by the ledger, and by the process."""
    for at, case in enumerate(CASES):
        make, given = partial(model_of, case), settings_of(case)
        predicted = memory.predict(make(), batch(), ADAMW, **given)
        ledger = memory.measure(make, batch(), ADAMW, **given)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.prices", "--child", str(at)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ALLOCATOR)
        found = json.loads(done.stdout.splitlines()[-1])
        yield {"case": case.label, "predicted": predicted.total, "ledger": ledger.total, **found}


def unrolling_rows() -> Iterator[dict[str, Any]]:
    """The planner's prices of the arms of ``hypergrad_cost``."""
    arms: dict[str, Any] = {"Reverse": hg.Reverse(), "Checkpointed": hg.Checkpointed(states="sqrt")}
    arms |= {f"ForwardGradient b={b}": hg.ForwardGradient(directions=b) for b in (1, 8, 32)}
    for steps in sorted({*MEMORY_DEPTHS, *TIME_DEPTHS}):
        toy = reweighting(steps=steps).toy()
        for name, method in arms.items():
            price = hg.predict(toy.problem, toy.phi, method)
            yield {
                "arm": name, "steps": steps, "bytes": price.bytes, "gradient_steps": price.gradient_steps,
                "cosine": price.cosine,
            }  # fmt: skip


LAWS = {"(FG)²U": hg.Rademacher(), "orthonormal": hg.Orthonormal(), "Hadamard": hg.Hadamard()}


def direction_rows() -> Iterator[dict[str, Any]]:
    """Expected cosines; one seed tells the sizes."""
    for name, make in TOYS.items():
        toy = make(0)
        inside = sampled_size(toy)
        sizes = {family: (law, inside) for family, law in LAWS.items()}
        if toy.problem.through is not None:
            sizes["(FG)²U in φ"] = (LAWS["(FG)²U"], toy.size)
        for family, (law, size) in sizes.items():
            for dial in (1, 4, 16, 64, 256):
                if (law.limit(size) or dial) >= dial:
                    row = {"problem": name, "family": family, "dial": dial, "size": size}
                    yield row | {"cosine": law.cosine(dial, size)}


def step_rows() -> Iterator[dict[str, Any]]:
    """Ideal speed-ups of the arms of ``step_time``."""
    from benchmarks import step_time

    for case in step_time.CASES:
        top, active = case.layers - 1, (case.layers // 4, 2 * case.layers // 3)
        ways: dict[str, tuple[Any, Any]] = {
            "full": (Full(), None), "LISA, 2 blocks": (ls.LayerSampling(active=2), active),
            "LISA, embedding frozen, low blocks": (ls.LayerSampling(active=2, embed=False), (0, 1)),
            "LISA, embedding frozen, high blocks": (ls.LayerSampling(active=2, embed=False), (top - 1, top)),
        }  # fmt: skip
        with torch.device("meta"):
            model = step_time.model_of(case)
        for arm, (settings, blocks) in ways.items():
            if blocks is not None:
                settings = ls.LayerSampling(active=2, embed=settings.embed, sampler=ls.Fixed(blocks=blocks))
            price = ls.predict(model, settings, batch=case.batch, length=case.length, dtype=torch.float32)
            yield {"model": case.name, "arm": arm, "faster": price.ratio}


def sparse_rows() -> Iterator[dict[str, Any]]:
    """Bytes held by the sparse Llama after a step, optimizer included, and its live parameters."""
    from benchmarks import scaling_speed
    from sparing.scaling.plans.planning import plan
    from sparing.scaling.plans.price import predict

    model = scaling_speed.llama(512)
    for sparsity in SPARSITIES:
        price = predict(model, plan(model, density=1 - sparsity), tokens=512)
        held = [each.params + each.grads + each.optimizer for each in (price.bytes_dense, price.bytes_sparse)]
        yield {"sparsity": sparsity, "masked": held[0], "auto": held[1], "live": price.live}


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "memory": memory_rows, "unrolling": unrolling_rows, "directions": direction_rows, "steps": step_rows,
    "sparse": sparse_rows,
}  # fmt: skip


def main() -> None:
    """Write the record, part by part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=[*PARTS], default=[*PARTS], help="keep the rows of the others")
    parser.add_argument("--child", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is about to go
    if options.child is not None:
        child(options.child)
        return
    units = {"predicted": "B", "ledger": "B", "process": "B", "bytes": "B", "masked": "B", "auto": "B", "faster": "×"}
    before = Record.read(RESULT) if RESULT.exists() else None
    record = Record(
        question="What does the library predict of cases that are measured?", settings={"cases": list(CASES)}, seed=0,
        environment=environment() | {"command": "python -m benchmarks.prices"}, units=units,
    )  # fmt: skip
    with Progress("prices", total=len(options.part), unit="part") as bar:
        for part, rows in PARTS.items():
            found = list(rows()) if part in options.part else (before.table(part) if before else [])
            for row in found:
                record.add(part, **{name: value for name, value in row.items() if name != "table"})
            if part in options.part:
                bar.advance(part=part)
    record.write(RESULT)
    for part in PARTS:
        print_table(record.table(part), title=part, units=units)


if __name__ == "__main__":
    main()
