"""Few outer parameters, a long run, a memory cap: who ends lowest? ``python -m benchmarks.hypergrad_schedules``.

A character model (8 characters seen, 25,000 weights) is trained by AdamW for 250 steps on five texts at once. Outer
parameters: how much each text counts (four free logits) and the rate at three points of the run. Judge: the next
character of pages of one of the texts, of which the run has only the first 4 kB. Every arm but one may hold about four
states (weights and moments) beside the run; truncated reverse holds the graph of four steps. All have the same CPU
seconds, and a point that was found after them does not count. Searches and rules of thumb are in the table. The rate of
Adam on the outer parameters, and the step of differences, are the best on a seed of its own, the rate inside its
sweep; searches and rules of thumb have no such seed. Seeds draw initial weights, batches and directions; texts and
pages stay.

Each row is written as it is done; run it again to go on. About forty minutes of CPU time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.valley import store
from sparing import hypergrad as hg
from sparing.data.loaders import load_text
from sparing.errors import RunError, UserError
from sparing.seeds import number, stream

RESULT = Path(__file__).parent / "results" / "hypergrad_schedules.json"
STEPS, SEEN, BATCH, LETTERS = 250, 8, 16, 64
TEXTS = ("burgess-busterbrown", "alice", "bryant-stories", "enwik8", "alice, letters shuffled")
"""The first is the one that is judged."""
OWN, CHOOSE, TEST = 4_000, 8_000, 60_000
"""Bytes of it to train on, to choose by, and to judge by."""
SECONDS, SEEDS, TUNING, FRESH = 22.5, 5, 100, 3
RATES = (0.3, 1.0)
"""Rates of Adam tried at first; a sweep goes on by threes until the best lies inside."""
START = torch.tensor([0.0, 0.0, 0.0, 0.0, *[math.log(1e-3)] * 3])
STATES = 4


def differences(directions: int, **law: Any) -> dict[str, Any]:
    """Zeroth-order estimates by two steps; 1e-3 is within the rounding of these runs, as a warning says."""
    return {f", step {step:g}": hg.ZerothOrder(directions=directions, step=step, **law) for step in (0.03, 0.3)}


GRADIENTS: dict[str, dict[str, Any]] = {
    "(FG)²U b=4": {"": hg.ForwardGradient(directions=4)},
    "(FG)²U b=1": {"": hg.ForwardGradient(directions=1)},
    "forward mode, four tangents at a time": {"": hg.Forward(chunk=STATES)},
    "checkpointed, four states": {"": hg.Checkpointed(states=STATES)},
    "checkpointed, √T states: beyond the cap": {"": hg.Checkpointed()},
    "truncated, last 4 steps": {"": hg.Truncated(steps=4)},
    "zeroth order b=4": differences(4),
    "differences along every axis": differences(len(START), law=hg.Coordinate()),
}
"""Arm -> its variants, the best of which is run."""
SEARCHES = ("TPE", "random search")
GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
RULES: dict[str, Callable[[float], list[float]]] = {
    "best constant rate": lambda rate: [0.0] * 4 + [math.log(rate)] * 3,
    "best falling rate": lambda rate: [0.0] * 4 + [math.log(rate * 10**-fall) for fall in (0, 0.5, 1)],
    "best falling rate, own text and books": lambda rate: (
        [0.0, 0.0, -10.0, -10.0] + [math.log(rate * 10**-fall) for fall in (0, 0.5, 1)]
    ),
}
"""Rules of thumb: the best peak rate of ``GRID``, with all texts alike or without XML and shuffled letters."""
LOW, HIGH = (-3.0, math.log(1e-4)), (3.0, math.log(1e-1))
"""What searches draw from: logits, logarithms of rates."""


@dataclass(frozen=True)
class Corpus:
    """Characters of every text as numbers, and what chooses and judges."""

    train: tuple[Tensor, ...]
    choose: Tensor
    test: Tensor


def corpus() -> Corpus:
    """The texts by the 63 most frequent characters of all; any other is the last number."""
    texts = {name: load_text(name)[:400_000] for name in TEXTS[:4]}
    shuffled = list(texts["alice"])
    order = torch.randperm(len(shuffled), generator=stream(0, "schedules", "shuffled")).tolist()
    texts[TEXTS[4]] = "".join(shuffled[at] for at in order)
    common = {letter: at for at, (letter, _) in enumerate(Counter("".join(texts.values())).most_common(LETTERS - 1))}
    numbers = [torch.tensor([common.get(letter, LETTERS - 1) for letter in texts[name]]) for name in TEXTS]
    own, choose, test = numbers[0][: OWN + CHOOSE + TEST].split([OWN, CHOOSE, TEST])
    return Corpus((own, *numbers[1:]), choose, test)


def start_of(seed: int) -> dict[str, Tensor]:
    """Initial weights of a seed."""
    source = stream(seed, "schedules", "start")
    shapes = {"letters": (LETTERS, 16), "in": (16 * SEEN, 128), "out": (128, LETTERS)}
    return {name: torch.randn(shape, generator=source) * shape[0] ** -0.5 for name, shape in shapes.items()}


def nats(theta: dict[str, Tensor], text: Tensor, at: Tensor) -> Tensor:
    """Loss of the character after each place, by row."""
    windows = text[at[..., None] + torch.arange(SEEN + 1)]
    hidden = F.gelu(theta["letters"][windows[..., :-1]].flatten(-2) @ theta["in"])
    return -(hidden @ theta["out"]).log_softmax(-1).gather(-1, windows[..., -1:])[..., 0]


def problem_of(data: Corpus, seed: int) -> hg.Bilevel:
    """Training by the outer parameters, judged on the pages that choose."""
    every, sizes = torch.cat(data.train), [len(text) for text in data.train]
    starts = [0, *accumulate(sizes[:-1])]

    def inner(theta: Any, phi: Tensor, batch: Tensor) -> Tensor:
        shares = torch.cat([phi.new_zeros(1), phi[:4]]).softmax(0)
        return nats(theta, every, batch).mean(1) @ shares

    def batches(step: int, generator: torch.Generator) -> Tensor:
        return torch.stack([
            start + torch.randint(size - SEEN, (BATCH,), generator=generator)
            for start, size in zip(starts, sizes, strict=True)
        ])  # fmt: skip

    def rate(step: int, phi: Tensor) -> Tensor:
        place = 2 * step / (STEPS - 1)
        first = min(int(place), 1)
        return torch.lerp(phi[4 + first], phi[5 + first], place - first).exp()

    return hg.Bilevel(
        inner=inner, outer=lambda theta, phi: judged(theta, data.choose), init=start_of(seed),
        optimizer=hg.AdamW(lr=rate), steps=STEPS, batches=batches,
    )  # fmt: skip


def judged(theta: Any, text: Tensor) -> Tensor:
    """Mean loss over a text (nat a character)."""
    return nats(theta, text, torch.arange(len(text) - SEEN)).mean()


def climbed(data: Corpus, seed: int, method: Any, lr: float) -> dict[str, Any]:
    """Adam on the outer parameters until the time is up; the point of the lowest loss on the pages that choose."""
    problem, phi, path, ended = problem_of(data, seed), START.clone(), [], None
    adam, best, begin = torch.optim.Adam([phi], lr=lr), (math.inf, START), time.process_time()
    while True:
        try:
            found = hg.hypergradient(problem, phi, method, seed=number(seed, "outer", len(path)))
        except (UserError, RunError) as error:
            ended = str(error)
            break
        if time.process_time() - begin > SECONDS:
            break
        path.append(float(found.value))
        best = min(best, (path[-1], phi.clone()), key=lambda pair: pair[0])
        phi.grad = found.grad
        adam.step()
    return {"lr": lr, "tries": len(path), "chosen": best[0], "phi": best[1].tolist(), "path": path, "ended": ended}


def searched(data: Corpus, seed: int, name: str) -> dict[str, Any]:
    """Plain runs at proposed points until the time is up; the lowest on the pages that choose."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    problem, tried, begin = problem_of(data, seed), [], time.process_time()
    sampler = optuna.samplers.TPESampler if name == "TPE" else optuna.samplers.RandomSampler
    study = optuna.create_study(sampler=sampler(seed=seed))
    study.enqueue_trial({str(at): float(value) for at, value in enumerate(START)})
    while True:
        if name in RULES:
            phi = torch.tensor(RULES[name](GRID[len(tried)]))
        else:
            trial = study.ask()
            drawn = [trial.suggest_float(str(at), LOW[at >= 4], HIGH[at >= 4]) for at in range(len(START))]
            phi = torch.tensor(drawn)
        try:
            theta = hg.solve(problem, phi, seed=number(seed, "outer", len(tried)))
            value = float(judged(theta, data.choose))
        except RunError:
            value = math.inf
        if time.process_time() - begin > SECONDS:
            break
        tried.append((value, phi))
        if name in RULES and len(tried) == len(GRID):
            break
        if name in SEARCHES:
            study.tell(trial, value)
    value, phi = min(tried, key=lambda pair: pair[0])
    return {"lr": None, "tries": len(tried), "chosen": value, "phi": phi.tolist()}


def judge(data: Corpus, seed: int, found: dict[str, Any]) -> dict[str, Any]:
    """Train anew at the chosen point, in orders that were never seen, and read the test pages."""
    phi = torch.tensor(found["phi"])
    fresh = [hg.solve(problem_of(data, seed), phi, seed=number(seed, "fresh", at)) for at in range(FRESH)]
    return found | {"test": fmean(float(judged(theta, data.test)) for theta in fresh)}


class Rows(store.Store):
    """The result file: rows by key; several processes may fill one file."""

    def __init__(self, path: Path) -> None:
        self.path, self.command = path, "python -m benchmarks.hypergrad_schedules"
        self.rows = self._read()


def main() -> None:
    """Tune, then run every arm at every seed, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)))
    given = parser.parse_args()
    table = Rows(given.out)
    torch.set_num_threads(1)
    data = corpus()
    tuned = {name: tune(table, data, name) for name in GRADIENTS}
    for seed in given.seeds:
        for name, (variant, lr) in tuned.items():
            run = lambda: judge(data, seed, climbed(data, seed, GRADIENTS[name][variant], lr))  # noqa: B023, E731
            table.once(f"{name}{variant} | {seed}", run)
        for name in (*SEARCHES, *RULES):
            table.once(f"{name} | {seed}", lambda: judge(data, seed, searched(data, seed, name)))  # noqa: B023
        table.once(f"start | {seed}", lambda: judge(data, seed, {"phi": START.tolist()}))  # noqa: B023


def tune(table: Rows, data: Corpus, name: str) -> tuple[str, float]:
    """The variant and rate of an arm that end lowest on a seed of their own."""

    def end(variant: str, lr: float) -> float:
        method = GRADIENTS[name][variant]
        key = f"tuning | {name}{variant} | {lr:g}"
        return float(table.once(key, lambda: climbed(data, TUNING, method, lr))["chosen"])

    found = {}
    for variant in GRADIENTS[name]:
        rates = list(RATES)
        while (best := min(rates, key=lambda lr: end(variant, lr))) in (min(rates), max(rates)):
            rates.append(float(f"{best / 3 if best == min(rates) else best * 3:.1g}"))
        found[variant, best] = end(variant, best)
    return min(found, key=lambda pair: found[pair])


if __name__ == "__main__":
    main()
