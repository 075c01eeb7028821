"""Influences of training rows by this library and by bergson's MAGIC: the same numbers, seconds and bytes.

Run ``python -m benchmarks.attribution_peers --python $SPARING_BERGSON``: a quarter of an hour of CPU. Every
measurement is a fresh process of that interpreter, the arms take turns, and rows that the result holds are kept.
A GPT-2 of two blocks reads *Alice* by bytes; the same model object, rows, order, rates and optimizer for both.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.hypergrad_cost import ALLOCATOR, resident
from benchmarks.valley import store
from sparing import hypergrad as hg
from sparing.jobs.subjects.text import text_of
from sparing.seeds import stream

ROUNDS, MOVED, STEP = 5, 4, 1e-5
"""Rounds of times; rows whose weight is moved, and by how much, for differences of whole runs."""
ARMS: dict[str, dict[str, Any]] = {
    "sparing": {"states": "sqrt"}, "sparing, 16 states": {"states": 16},
    "bergson, sqrt": {"save_mode": "sqrt"}, "bergson, log": {"save_mode": "log"},
}  # fmt: skip
"""What is kept of the run: by default each graph of about √T steps at once here, and of one step there."""
CASES: dict[str, dict[str, Any]] = {
    "mean of 8 queries, T = 64": {}, "each of 4 queries, T = 32": {"each": 4, "steps": 32},
}  # fmt: skip
CHECKS: dict[str, dict[str, Any]] = {
    f"{name}, {'tied' if tied else 'not tied'}":
    {"optimizer": name.lower(), "tied": tied, "steps": 24, "width": 32, "eps_root": 1e-25}
    for tied in (False, True)
    for name in ("SGD", "AdamW")
}  # fmt: skip
"""In float64. bergson adds ``eps_root`` under the root of AdamW, 1e-17 by default, torch and this library nothing."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What both sides are given."""

    optimizer: str = "adamw"
    steps: int = 64
    width: int = 64
    tied: bool = False
    each: int = 0  # queries that are attributed one by one; 0: the mean of all
    folder: str | None = None  # of checkpoints; the system's for temporary files
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
        object.__setattr__(self, "queries", lines[chosen[self.count : self.count + (self.each or 8)]])
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


def sparing_run(task: Task, states: Any) -> Callable[[], Tensor]:
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
        return hg.attribute(given, target, hg.Checkpointed(states=states), check=0).influence

    return run


def arm_of(name: str, task: Task) -> Callable[[], Tensor]:
    """What does one attribution by an arm."""
    if name.startswith("sparing"):
        return sparing_run(task, **ARMS[name])
    from benchmarks.peers import bergson_run

    return bergson_run.prepare(task, each=bool(task.each), **ARMS[name])


def loss_after(task: Task, weights: Tensor) -> float:
    """Mean loss of the queries after training with these weights of rows, by ``torch.optim``."""
    model = task.fresh()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    if task.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), betas=task.betas, eps=task.eps, weight_decay=0.01)

    def losses(ids: Tensor) -> Tensor:
        scores = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(scores.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)

    for step, rows in enumerate(task.batches):
        optimizer.param_groups[0]["lr"] = task.rate(step)
        optimizer.zero_grad()
        ((weights[rows] * losses(task.rows[rows])).sum() / len(rows)).backward()
        optimizer.step()
    with torch.no_grad():
        return float(losses(task.queries).mean())


def slopes(loss: Callable[[Task, Tensor], float], task: Task) -> Tensor:
    """Central differences of a whole run in the weights of the first rows, (MOVED,)."""

    def moved(row: int, by: float) -> float:
        weights = torch.ones(task.count)
        weights[row] += by
        return loss(task, weights)

    return torch.tensor([(moved(row, STEP) - moved(row, -STEP)) / (2 * STEP) for row in range(MOVED)])


def far(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖."""
    return float((found - truth).norm() / truth.norm())


def checked(name: str) -> dict[str, Any]:
    """Both sides' influences against each other, and each against differences of its own training, in float64."""
    from benchmarks.peers import bergson_run

    torch.set_default_dtype(torch.float64)  # bergson's weights of rows are of the default type
    task = Task(**CHECKS[name])
    mine, sqrt, log = (arm_of(arm, task)() for arm in ("sparing", "bergson, sqrt", "bergson, log"))
    ours, theirs = slopes(loss_after, task), slopes(bergson_run.loss_after, task)
    return {
        "difference": far(sqrt, mine), "log": far(log, sqrt), "sparing": far(mine[:MOVED], ours),
        "bergson": far(sqrt[:MOVED], theirs), "runs": far(theirs, ours),
    }  # fmt: skip


def timed(name: str) -> dict[str, Any]:
    """Seconds of every arm in turn, whole attributions, after a round of four steps; how far influences lie apart."""
    for arm in ARMS:
        arm_of(arm, Task(**CASES[name] | {"steps": 4}))()
    taken: dict[str, dict[str, list[float]]] = {arm: {"cpu": [], "wall": []} for arm in ARMS}
    found = {}
    for _ in range(ROUNDS):
        for arm in ARMS:
            run = arm_of(arm, Task(**CASES[name]))
            gc.collect()
            cpu, wall = time.process_time(), time.perf_counter()
            found[arm] = run()
            taken[arm]["cpu"].append(time.process_time() - cpu)
            taken[arm]["wall"].append(time.perf_counter() - wall)
    return {"seconds": taken, "difference": {arm: far(influence, found["sparing"]) for arm, influence in found.items()}}


def held(name: str, arm: str) -> dict[str, Any]:
    """Bytes that one attribution adds to the resident set of a fresh process."""
    arm_of(arm, Task(**CASES[name] | {"steps": 4}))()
    run = arm_of(arm, Task(**CASES[name]))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    floor = resident("VmRSS")
    run()
    peak = resident("VmHWM")
    return {"peak": peak - floor, "process": peak}


KINDS: dict[str, Callable[..., dict[str, Any]]] = {"checks": checked, "times": timed, "bytes": held}


def in_fresh_process(python: str, kind: str, *names: str) -> dict[str, Any]:
    """What a process of that interpreter measures; it writes a file, since bergson's bars fill its output."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [python, "-W", "ignore", "-m", "benchmarks.attribution_peers", "--child", str(out), kind, *names]
        variables = os.environ | (ALLOCATOR if kind == "bytes" else {})
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        row: dict[str, Any] = json.loads(out.read_text())
    return row


class Store(store.Store):
    """A JSON file with one row per measurement, by key."""

    def __init__(self) -> None:
        """Open the committed file."""
        self.path = store.RESULTS / "attribution_peers.json"
        self.command = "python -m benchmarks.attribution_peers --python $SPARING_BERGSON"
        self.rows = self._read()


def run(python: str) -> None:
    """Measure what the file does not have yet."""
    kept = Store()
    jobs: list[tuple[str, ...]] = [("checks", name) for name in CHECKS]
    for name in CASES:
        jobs += [*(("bytes", name, arm) for arm in ARMS), ("times", name)]
    for kind, *names in jobs:
        about = dict(zip(("table", "case", "arm"), (kind, *names), strict=False))
        kept.once(", ".join((kind, *names)), lambda kind=kind, names=names, about=about: {
            **about, **in_fresh_process(python, kind, *names),
        })  # fmt: skip


def main() -> None:
    """Measure, or be one of the processes that do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="interpreter of an environment with bergson 2.5.1")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.child:
        out, kind, *names = given.child
        Path(out).write_text(json.dumps(KINDS[kind](*names)))
    elif given.python:
        run(given.python)
    else:
        parser.error("--python: pass the interpreter of an environment that has bergson; see benchmarks/peers")


if __name__ == "__main__":
    main()
