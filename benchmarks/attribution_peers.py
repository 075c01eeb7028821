"""Influences of training rows by this library and by bergson's MAGIC: the same numbers, seconds and bytes.

Run ``python -m benchmarks.attribution_peers --python $SPARING_BERGSON``: half an hour of CPU. Every measurement is a
fresh process of that interpreter, the arms take turns, and rows that the result holds are kept.
A GPT-2 of two blocks reads *Alice* by bytes; the same model object, rows, order, rates and optimizer for both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.hypergrad_cost import resident
from benchmarks.valley import store
from sparing import hypergrad as hg
from sparing.jobs.subjects.text import text_of
from sparing.seeds import stream

ROUNDS = 5
ARMS: dict[str, dict[str, Any]] = {
    "sparing": {}, "bergson, sqrt": {"save_mode": "sqrt"}, "bergson, log": {"save_mode": "log"},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "AdamW, T = 64": {}, "AdamW, T = 256": {"steps": 256}, "AdamW, T = 64, each of 8 queries": {"each": True},
    "SGD, T = 64": {"optimizer": "sgd"}, "AdamW, T = 64, width 256": {"width": 256},
}  # fmt: skip
CHECKS: dict[str, dict[str, Any]] = {
    f"{name}, {'tied' if tied else 'not tied'}": {"optimizer": optimizer, "tied": tied, "steps": 24}
    for name, optimizer in (("SGD", "sgd"), ("AdamW", "adamw"))
    for tied in (False, True)
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What both sides are given."""

    optimizer: str = "adamw"
    steps: int = 64
    width: int = 64
    tied: bool = False
    each: bool = False
    double: bool = False
    folder: str | None = None  # of checkpoints
    batch: int = 8
    length: int = 64
    count: int = 128
    betas: tuple[float, float] = (0.95, 0.975)
    eps: float = 1e-6
    eps_root: float = 1e-17
    rows: Tensor = field(init=False)  # tokens, (n, length)
    queries: Tensor = field(init=False)  # tokens, (k, length)
    batches: list[Tensor] = field(init=False)  # row numbers by step

    def __post_init__(self) -> None:
        text = torch.tensor(list((text_of("alice") or "").encode()))
        tokens = torch.unique(text, return_inverse=True)[1]  # every token is in use
        lines = tokens[: len(tokens) // self.length * self.length].view(-1, self.length)
        chosen = torch.randperm(len(lines), generator=stream(0, "peers", "rows"))
        object.__setattr__(self, "rows", lines[chosen[: self.count]])
        object.__setattr__(self, "queries", lines[chosen[self.count : self.count + 8]])
        passes = -(-self.batch * self.steps // self.count)
        orders = [torch.randperm(self.count, generator=stream(0, "peers", "order", at)) for at in range(passes)]
        object.__setattr__(self, "batches", list(torch.cat(orders)[: self.batch * self.steps].split(self.batch)))

    def rate(self, step: Any) -> Any:
        """The rate at a step, which falls in a line; a number or a tensor."""
        return (0.003 if self.optimizer == "adamw" else 0.1) * (1 - step / self.steps)

    def fresh(self) -> torch.nn.Module:
        """The model at its start: the same weights at each call."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=2, n_head=4, n_embd=self.width, n_positions=self.length, vocab_size=int(self.rows.max()) + 1,
            tie_word_embeddings=self.tied, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval().requires_grad_(True)


def sparing_run(task: Task) -> Callable[[], Tensor]:
    """The same by ``attribute``."""

    def run() -> Tensor:
        theta, call = hg.stateless(task.fresh())

        def losses(weights: Any, ids: Tensor) -> Tensor:
            scores = call(weights, input_ids=ids, use_cache=False).logits
            found = functional.cross_entropy(scores[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
            return found.mean(1)

        def target(weights: Any) -> Tensor:
            found = losses(weights, task.queries)
            return found if task.each else found.mean()

        chosen: Any = hg.SGD(lr=task.rate, momentum=0.9)
        if task.optimizer == "adamw":
            chosen = hg.AdamW(lr=task.rate, betas=task.betas, eps=task.eps, weight_decay=0.01)
        given = hg.TrainingRun(
            losses=lambda weights, rows: losses(weights, task.rows[rows]), rows=task.count, batches=task.batches,
            init=theta, optimizer=chosen,
        )  # fmt: skip
        return hg.attribute(given, target, check=0).influence

    return run


def arm_of(name: str, task: Task) -> Callable[[], Tensor]:
    """What does one attribution by an arm."""
    if name == "sparing":
        return sparing_run(task)
    from benchmarks.peers import bergson_run

    found: Callable[[], Tensor] = bergson_run.prepare(task, each=task.each, **ARMS[name])
    return found


def child(name: str, changes: dict[str, Any], out: str) -> None:
    """Inside a fresh process: warm up on four steps, then one whole attribution; write what it took and found."""
    torch.set_num_threads(1)
    if changes.get("double"):
        torch.set_default_dtype(torch.float64)  # bergson's weights of rows are of the default type
    arm_of(name, Task(**changes | {"steps": 4}))()
    run = arm_of(name, Task(**changes))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    floor, cpu, wall = resident("VmRSS"), time.process_time(), time.perf_counter()
    influence = run()
    taken = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    taken |= {"peak": resident("VmHWM") - floor, "process": resident("VmHWM")}
    torch.save({"taken": taken, "influence": influence}, out)
