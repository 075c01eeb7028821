"""Token weights for online adaptation: every method, five seeds, equal CPU time; and how well directions point.

Run ``python -m benchmarks.adapt_table`` (about fifty minutes of CPU time on one core; every row is kept as it is done,
so the same command goes on after an interruption). Two tables:

- ``answers``: stories15M adapts to a stream of test documents with token weights that each method learnt in the same
  CPU seconds; loss of the answers, exact match, F1, and change on other text.
- ``cosine``: at one window of documents, the cosine of a (FG)²U estimate to the exact hypergradient (checkpointed
  reverse), with directions in φ and in ψ, both given the same CPU seconds.

Scaled down from the papers: stories15M (15 M weights, all of them adapted) instead of 82 M, T = 12 documents of at most
64 tokens instead of 24 or 48 of up to 1,024, a token-weight network of 0.25 M parameters over frozen features.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from sparing.hypergrad import hypergradient
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.forward import ForwardGradient
from sparing.jobs.adapt import meta
from sparing.jobs.adapt.evaluate import adapt_model, evaluate_network, losses, score, stream_weights, token_rows
from sparing.jobs.adapt.meta import arm_of
from sparing.jobs.adapt.problem import Inputs, draw_window, load, prepare, problem, streams
from sparing.jobs.adapt.settings import EVERY, Adapt
from sparing.report import Progress, environment
from sparing.vectors import dot, norm

RESULT = Path(__file__).parent / "results" / "adapt_table.json"
SEEDS = range(5)
SETTINGS = Adapt(seconds=75.0, stream=30, held_out_documents=16, measurements=3)
POINT = 20.0
"""CPU seconds that each space gets for its estimate in the table of cosines."""


def inputs_of(inputs: Inputs, seed: int) -> tuple[Inputs, Adapt]:
    """The streams of a seed around the same model."""
    settings = replace(SETTINGS, seed=seed)
    return Inputs(inputs.lm, inputs.data, *streams(inputs.lm, inputs.data, settings)), settings


def validate_(inputs: Inputs, state: meta.TrainState, settings: Adapt) -> float:
    """Objective on the validation stream at the rate of meta-training; the best network is kept."""
    weights, window = stream_weights(state.phi, inputs.validation), inputs.validation
    theta = adapt_model(inputs.lm, weights, window.stream.texts, lr=settings.inner_lr, clip=settings.inner_clip)
    nll, kl = losses(inputs.lm, theta, window)
    meta.keep_best_(state, nll + settings.locality * kl)
    return nll + settings.locality * kl


def answers_row(inputs: Inputs, seed: int, name: str) -> dict[str, object]:
    """Learn one method's weights for one seed and mark its answers."""
    own, settings = inputs_of(inputs, seed)
    if name == "base":
        found, _ = score(own.lm, own.lm.theta, own.test)
        return {"steps": 0, "seconds": 0.0, **found, "questions": len(own.test.stream.questions.expected)}
    arm, state, path = arm_of(name, settings), meta.start(own.test.features.shape[1], settings), []
    validate_(own, state, settings)
    with Progress(f"{name}, seed {seed}", total=settings.steps, unit="outer step") as bar:
        while arm.method is not None and not meta.ended(state, settings):
            before = meta.budget_used(state, settings)
            path.append(meta.outer_step_(state, own.lm, own.data, settings, arm))
            if meta.evaluation_due(before, meta.budget_used(state, settings), settings.measurements):
                path[-1]["validation"] = validate_(own, state, settings)
            bar.advance(answers=path[-1]["outer"])
    row, tried, _ = evaluate_network(own, state.best, settings)
    tokens = token_rows(own.lm, own.test, stream_weights(state.best, own.test), count=6) if path else []
    kept = [
        {key: line[key] for key in ("step", "seconds", "outer", "norm", "validation") if key in line} for line in path
    ]
    return {"steps": state.step, "seconds": state.seconds, **row, "sweep": tried, "path": kept, "tokens": tokens}


def pointing(
    posed: object, phi: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], seed: int
) -> dict[str, float]:
    """Average estimates of four directions until the time is up; cosine of their mean to the exact hypergradient."""
    begin, count, total = time.process_time(), 0, {name: torch.zeros_like(value) for name, value in phi.items()}
    spent = 0.0
    while not count or spent * (count + 1) / count < POINT:  # no estimate is begun that would pass the limit
        guess = hypergradient(posed, phi, ForwardGradient(directions=4), seed=10_000 * seed + count).grad
        total = {name: total[name] + guess[name] for name in total}
        count, spent = count + 1, time.process_time() - begin
    cosine = float(dot(total, exact) / (norm(total) * norm(exact)))
    return {"cosine": cosine, "directions": 4 * count, "seconds": spent}


def cosine_row(inputs: Inputs, seed: int) -> dict[str, object]:
    """Both spaces at one seed: φ after two exact outer steps, so that every layer of the network matters."""
    settings = replace(SETTINGS, seed=seed)
    state = meta.start(inputs.test.features.shape[1], settings)
    for _ in range(2):
        meta.outer_step_(state, inputs.lm, inputs.data, settings, arm_of("checkpointed", settings))
    sizes = {"documents": settings.documents, "context": settings.question_length}
    window = draw_window(inputs.lm, inputs.data, 999, **sizes, seed=seed)
    fixed = {"lr": settings.inner_lr, "locality": settings.locality, "clip": settings.inner_clip}
    posed = {space: problem(inputs.lm, window, bottleneck=space == "psi", **fixed) for space in ("psi", "phi")}
    begin = time.process_time()
    exact = hypergradient(posed["psi"], state.phi, Checkpointed(), seed=seed).grad
    row: dict[str, object] = {"exact_seconds": time.process_time() - begin, "tokens": len(window.features)}
    row["parameters"] = sum(value.numel() for value in state.phi.values())
    for space, one in posed.items():
        row |= {f"{space}_{key}": value for key, value in pointing(one, state.phi, exact, seed).items()}
    return row


def read() -> dict[str, dict[str, object]]:
    """Rows that are done, by key."""
    if not RESULT.exists():
        return {}
    found = json.loads(RESULT.read_text())
    return found["rows"] if found["settings"] == plain() else {}


def plain() -> dict[str, object]:
    """What rows must share to stand in one table."""
    known = {**asdict(SETTINGS), "point": POINT}
    known.pop("out")
    return json.loads(json.dumps(known, default=str))


def write(rows: dict[str, dict[str, object]], spent: float) -> None:
    """Keep the rows, whole or not at all."""
    document = {"settings": plain(), "environment": environment(), "rows": rows}
    draft = RESULT.with_suffix(".draft")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(RESULT)
    sys.stderr.write(f"{len(rows)} rows, {spent:.0f} s of CPU time in this process\n")


def wanted(inputs: Inputs) -> dict[str, Callable[[], dict[str, object]]]:
    """Every row by key, in an order that makes whole seeds early."""
    todo: dict[str, Callable[[], dict[str, object]]] = {}
    for seed in SEEDS:
        todo[f"cosine/both/{seed}"] = lambda seed=seed: cosine_row(inputs, seed)
        for name in ("base", *EVERY):
            todo[f"answers/{name}/{seed}"] = lambda seed=seed, name=name: answers_row(inputs, seed, name)
    return todo


def main() -> None:
    """Do what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("runs/adapt-table/base.safetensors"))
    options = parser.parse_args()
    if "MALLOC_MMAP_MAX_" not in os.environ:  # fresh pages for every large tensor double the time of every method
        once = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(5 * 10**8)}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.adapt_table", *sys.argv[1:]], os.environ | once)
    torch.set_num_threads(1)
    rows, inputs = read(), prepare(*load(SETTINGS), SETTINGS, options.base)
    for key, make in wanted(inputs).items():
        if key not in rows:
            kind, label, seed = key.split("/")
            rows[key] = {"table": kind, "method": label, "seed": int(seed), **make()}
            write(rows, time.process_time())


if __name__ == "__main__":
    main()
