"""Token weights on stories15M: every method at rates of its own, equal CPU time; and how well directions point.

Run ``python -m benchmarks.adapt_table`` (about an hour and a half of CPU time on one core; every row is kept as it is
done, so the same command goes on after an interruption). Three tables:

- ``tuning``: each learnt arm's inner rate, and at it its outer rate, by the validation stream of a seed that is in no
  other table, at the rate of adapting that is best there; both sweeps go on until the best rate is inside.
- ``answers``: the model adapts to a stream of test documents with token weights that each method learnt in the same
  CPU seconds at those rates; loss of the answers, exact match, F1, and change on other text. Controls are no adapting,
  uniform weights, and weight on names and numbers alone. Rates of adapting are chosen on validation documents.
- ``cosine``: at one window of documents, the cosine of a (FG)²U estimate to the exact hypergradient (checkpointed
  reverse), with directions in φ and in ψ, both given the same CPU seconds.

Scaled down from the papers: stories15M (15 M weights, all of them adapted) instead of 82 M, T = 12 documents of at most
64 tokens instead of 24 or 48 of up to 1,024, a token-weight network of 0.25 M parameters over frozen features.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.sweeps import inside
from benchmarks.token_weights import names
from benchmarks.valley import store
from sparing.hypergrad import hypergradient
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.forward import ForwardGradient
from sparing.jobs.adapt import meta
from sparing.jobs.adapt.evaluate import (
    adapt_model,
    best_rate,
    evaluate_network,
    losses,
    score,
    stream_weights,
    sweep,
    token_rows,
)
from sparing.jobs.adapt.meta import arm_of
from sparing.jobs.adapt.problem import Inputs, Window, draw_window, load, prepare, problem, streams
from sparing.jobs.adapt.settings import EVERY, Adapt, Name
from sparing.jobs.adapt.weights import START
from sparing.report import Progress
from sparing.vectors import dot, norm

RESULT = Path(__file__).parent / "results" / "adapt_table.json"
SEEDS, TUNING = range(5), 8
"""Seeds of the tables; the last one only chooses rates."""
RATES = (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2, 0.16)
"""Of adapting; the best is chosen for each network."""
INNER, OUTER = (5e-3, 1e-2, 2e-2), (1e-3, 3e-3, 1e-2)
"""Rates of meta-training tried at first: of SGD on the model, of Adam on the network."""
SETTINGS = Adapt(seconds=75.0, stream=30, held_out_documents=16, measurements=3, rates=RATES)
POINT = 20.0
"""CPU seconds that each space gets for its estimate in the table of cosines."""
CONTROLS = ("base", "uniform", "names")
LEARNT: tuple[Name, ...] = tuple(name for name in EVERY if name != "uniform")

Row = dict[str, Any]


def inputs_of(inputs: Inputs, seed: int, **rates: float) -> tuple[Inputs, Adapt]:
    """The streams of a seed around the same model, and its settings."""
    settings = replace(SETTINGS, seed=seed, **rates)
    return Inputs(inputs.lm, inputs.data, *streams(inputs.lm, inputs.data, settings)), settings


def objectives(inputs: Inputs, weights: torch.Tensor, settings: Adapt) -> list[dict[str, float]]:
    """What the validation stream says of weights of its tokens (n,), at every rate of adapting."""
    at = {"locality": settings.locality, "clip": settings.inner_clip}
    return sweep(inputs.lm, weights, inputs.validation, settings.rates, **at)


def validate_(inputs: Inputs, state: meta.TrainState, settings: Adapt) -> float:
    """Objective on the validation stream at the rate of meta-training; the best network is kept."""
    weights, window = stream_weights(state.phi, inputs.validation), inputs.validation
    theta = adapt_model(inputs.lm, weights, window.stream.texts, lr=settings.inner_lr, clip=settings.inner_clip)
    nll, kl = losses(inputs.lm, theta, window)
    meta.keep_best_(state, nll + settings.locality * kl)
    return nll + settings.locality * kl


def learn(own: Inputs, name: Name, settings: Adapt) -> tuple[meta.TrainState, list[dict[str, Any]]]:
    """Meta-train one arm for its seconds; its state, and a line for each outer step."""
    arm, state = arm_of(name, settings), meta.start(own.test.features.shape[1], settings)
    path: list[dict[str, Any]] = []
    validate_(own, state, settings)
    with Progress(f"{name}, seed {settings.seed}", total=settings.steps, unit="outer step") as bar:
        while not meta.ended(state, settings):
            before = meta.budget_used(state, settings)
            path.append(meta.outer_step_(state, own.lm, own.data, settings, arm))
            if meta.evaluation_due(before, meta.budget_used(state, settings), settings.measurements):
                path[-1]["validation"] = validate_(own, state, settings)
            bar.advance(answers=path[-1]["outer"])
    return state, path


def tuning_row(inputs: Inputs, name: Name, **rates: float) -> Row:
    """One arm at rates that it is tried at: the objective on the validation stream at its best rate of adapting."""
    own, settings = inputs_of(inputs, TUNING, **rates)
    state, _ = learn(own, name, settings)
    swept = objectives(own, stream_weights(state.best, own.validation), settings)
    at = next(row for row in swept if row["lr"] == best_rate(swept))
    return {"steps": state.step, "seconds": state.seconds, **rates, "adapting": swept, **at}


def control_row(inputs: Inputs, seed: int, name: str) -> Row:
    """Mark the answers after no adapting, or with weights that nothing learnt."""
    own, settings = inputs_of(inputs, seed)
    if name == "base":
        found, _ = score(own.lm, own.lm.theta, own.test)
        return {"steps": 0, "seconds": 0.0, **found, "questions": len(own.test.stream.questions.expected)}

    def weights(window: Window) -> torch.Tensor:
        return torch.full((len(window.features),), START) if name == "uniform" else names(own.lm, window)

    swept = objectives(own, weights(own.validation), settings)
    lr, clip = best_rate(swept), settings.inner_clip
    theta = adapt_model(own.lm, weights(own.test), own.test.stream.texts, lr=lr, clip=clip)
    found, _ = score(own.lm, theta, own.test)
    return {"steps": 0, "seconds": 0.0, "lr": lr, **found, "sweep": swept}


def answers_row(inputs: Inputs, seed: int, name: Name, **rates: float) -> Row:
    """Learn one method's weights for one seed at its own rates and mark its answers."""
    own, settings = inputs_of(inputs, seed, **rates)
    state, path = learn(own, name, settings)
    row, tried, _ = evaluate_network(own, state.best, settings)
    tokens = token_rows(own.lm, own.test, stream_weights(state.best, own.test), count=6)
    kept = [
        {key: line[key] for key in ("step", "seconds", "outer", "norm", "validation") if key in line} for line in path
    ]
    learnt = {"steps": state.step, "seconds": state.seconds, **rates}
    return {**learnt, **row, "sweep": tried, "path": kept, "tokens": tokens}


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


def cosine_row(inputs: Inputs, seed: int) -> Row:
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
    row: Row = {"exact_seconds": time.process_time() - begin, "tokens": len(window.features)}
    row["parameters"] = sum(value.numel() for value in state.phi.values())
    for space, one in posed.items():
        row |= {f"{space}_{key}": value for key, value in pointing(one, state.phi, exact, seed).items()}
    return row


class Rows(store.Store):
    """The result file: rows by key, all of the same settings; several processes may fill one file."""

    def __init__(self, path: Path) -> None:
        self.path, self.command = path, "python -m benchmarks.adapt_table"
        self.rows = self._read()
        known = {**asdict(SETTINGS), "point": POINT}
        known.pop("out")
        asked = json.loads(json.dumps(known, default=str))
        if self.once("settings", lambda: {"table": "settings", **asked}) != {"table": "settings", **asked}:
            raise SystemExit(f"{path}: its rows are of other settings; pass another --out")

    def at(self, table: str, method: str, seed: int, make: Callable[[], Row], *, rates: str = "") -> Row:
        """A row, made and written if it is not there yet."""
        known: Row = {"table": table, "method": method, "seed": seed}
        return self.once(f"{table}/{method}/{rates or seed}", lambda: known | make())


def own_rates(inputs: Inputs, rows: Rows, name: Name) -> dict[str, float]:
    """The rates of meta-training that are best for an arm on the validation stream of the tuning seed."""

    def ends(inner: float, outer: float) -> float:
        rates = {"inner_lr": inner, "outer_lr": outer}
        make = partial(tuning_row, inputs, name, **rates)
        found = rows.at("tuning", name, TUNING, make, rates=f"{inner:g}/{outer:g}")["objective"]
        return math.inf if found is None else found  # a file holds no number that is not finite

    inner, _ = inside(INNER, lambda inner: ends(inner, OUTER[1]))
    outer, _ = inside(OUTER, lambda outer: ends(inner, outer))
    return {"inner_lr": inner, "outer_lr": outer}


def main() -> None:
    """Do what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("runs/adapt-table/base.safetensors"))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--arms", nargs="+", choices=LEARNT, default=LEARNT, help="in which order arms are tuned")
    options = parser.parse_args()
    if "MALLOC_MMAP_MAX_" not in os.environ:  # fresh pages for every large tensor double the time of every method
        once = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(5 * 10**8)}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.adapt_table", *sys.argv[1:]], os.environ | once)
    torch.set_num_threads(1)
    rows, inputs = Rows(options.out), prepare(*load(SETTINGS), SETTINGS, options.base)
    own = {name: own_rates(inputs, rows, name) for name in options.arms}
    for seed in options.seeds:
        for control in CONTROLS:
            rows.at("answers", control, seed, partial(control_row, inputs, seed, control))
        for name, rates in own.items():
            rows.at("answers", name, seed, partial(answers_row, inputs, seed, name, **rates))
        rows.at("cosine", "both", seed, partial(cosine_row, inputs, seed))


if __name__ == "__main__":
    main()
