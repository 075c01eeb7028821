"""Directions, or rows of the inner loss, over one and two processes: wall time, and whether the result is the same.

Run ``python -m benchmarks.hypergrad_ranks`` on a quiet machine (about two minutes). Problem: 1,024 example
weights, as in ``hypergrad_cost``, T = 40. Directions: b = 16, and the processes send weights through a store. Rows:
every process holds its part of the images, training and held-out ones, and gradients are averaged by gloo.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from benchmarks.hypergrad_toys import perceptron, reweighting
from sparing import hypergrad as hg
from sparing.report import Record, environment, print_table

RESULT = Path(__file__).parent / "results" / "hypergrad_ranks.jsonl"
ROUNDS, DIRECTIONS, STEPS, PORT = 7, 16, 40, 29731


def directions(number: int, size: int, store: TCPStore) -> tuple[list[float], torch.Tensor]:
    """The same estimate again and again, each time under a fresh key; seconds, and the gradient."""
    toy, taken, grad = reweighting(steps=STEPS).toy(), [], torch.zeros(())
    for turn in range(ROUNDS + 1):
        spread = hg.Spread(store=store, rank=number, size=size, key=str(turn))
        begin = time.perf_counter()
        method = hg.ForwardGradient(directions=DIRECTIONS, spread=spread)
        grad = hg.hypergradient(toy.problem, toy.phi, method, seed=0).grad["weights"]
        taken.append(time.perf_counter() - begin)
    return taken[1:], grad


def rows(number: int, size: int, store: TCPStore, *, examples: int) -> tuple[list[float], torch.Tensor]:
    """The exact hypergradient again and again, each process with its own images; seconds, and the gradient."""
    whole, own = reweighting(steps=STEPS, examples=examples), slice(number, None, size)
    images, labels = whole.images[own], whole.labels[own]
    held, held_labels = whole.held_images[own], whole.held_labels[own]
    part = replace(whole, images=images, labels=labels, held_images=held, held_labels=held_labels)
    if size > 1:
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    problem = replace(
        whole.toy().problem,
        inner=lambda theta, phi, batch: part.inner_loss(perceptron(theta, images), phi["weights"][own]),
        outer=lambda theta, phi: part.outer_loss(perceptron(theta, held)),
        group=dist.group.WORLD if size > 1 else None,
    )
    taken, grad, phi = [], torch.zeros(()), {"weights": whole.weights()}
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        grad = hg.hypergradient(problem, phi, hg.Checkpointed(), seed=0).grad["weights"]
        taken.append(time.perf_counter() - begin)
    return taken[1:], grad


DIVIDED = {
    "16 directions": directions,
    "1,024 rows": partial(rows, examples=1024),
    "8,192 rows": partial(rows, examples=8192),
}


def rank(what: str, number: int, size: int, port: int, answers: Any) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, size, is_master=number == 0)
    taken, grad = DIVIDED[what](number, size, store)
    if number == 0:
        answers.put((taken, grad.tolist()))
    store.wait([f"done {other}" for other in range(1, size)]) if number == 0 and size > 1 else None
    store.set(f"done {number}", "")


def over(what: str, size: int) -> tuple[list[float], torch.Tensor]:
    """Seconds of each round, and the gradient, with so many processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=rank, args=(what, n, size, PORT + size, answers)) for n in range(size)]
    for process in ranks:
        process.start()
    seconds, grad = answers.get(timeout=600)
    for process in ranks:
        process.join()
    return seconds, torch.tensor(grad)


def main() -> None:
    """Measure and write the record."""
    record = Record(
        question="What do two processes save, and is the result the same?",
        settings={"directions": DIRECTIONS, "steps": STEPS, "rounds": ROUNDS}, seed=0, environment=environment(),
        units={"seconds": "s", "against_one": "×"},
    )  # fmt: skip
    for what in DIVIDED:
        alone, grad = over(what, 1)
        for size, (seconds, found) in ((1, (alone, grad)), (2, over(what, 2))):
            middle = statistics.median(seconds)
            record.add(
                "ranks", divided=what, processes=size, n=len(seconds), seconds=middle, seconds_low=min(seconds),
                seconds_high=max(seconds), against_one=statistics.median(alone) / middle,
                difference=float((found - grad).norm() / grad.norm()),
            )  # fmt: skip
    print_table(record.table("ranks"), units=record.units)
    record.write(RESULT)


if __name__ == "__main__":
    main()
