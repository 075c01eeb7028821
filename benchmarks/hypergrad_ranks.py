"""Directions of one estimate over one and two processes: wall time, bytes sent, and whether the result is the same.

Run ``python -m benchmarks.hypergrad_ranks`` on a quiet machine (about two minutes). Problem: 1,024 example
weights, as in ``hypergrad_cost``, T = 40, b = 16. The processes meet at a store and send weights only.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from benchmarks.hypergrad_toys import reweighting
from sparing import hypergrad as hg
from sparing.report import Record, environment, print_table

RESULT = Path(__file__).parent / "results" / "hypergrad_ranks.jsonl"
ROUNDS, DIRECTIONS, STEPS, PORT = 7, 16, 40, 29731


def rank(number: int, size: int, port: int, answers: Any) -> None:
    """One process: the same estimate again and again, each time under a fresh key."""
    torch.set_num_threads(1)
    toy = reweighting(steps=STEPS).toy()
    store = TCPStore("127.0.0.1", port, size, is_master=number == 0)
    taken, grad = [], torch.zeros(())
    for turn in range(ROUNDS + 1):
        spread = hg.Spread(store=store, rank=number, size=size, key=str(turn))
        begin = time.perf_counter()
        method = hg.ForwardGradient(directions=DIRECTIONS, spread=spread)
        grad = hg.hypergradient(toy.problem, toy.phi, method, seed=0).grad["weights"]
        taken.append(time.perf_counter() - begin)
    if number == 0:
        answers.put((taken[1:], grad.tolist()))
    store.wait([f"done {other}" for other in range(1, size)]) if number == 0 and size > 1 else None
    store.set(f"done {number}", "")


def over(size: int) -> tuple[list[float], torch.Tensor]:
    """Seconds of each round, and the gradient, with so many processes."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=rank, args=(n, size, PORT + size, answers)) for n in range(size)]
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
        units={"seconds": "s", "against_one": "×", "sent": "B"},
    )  # fmt: skip
    alone, grad = over(1)
    for size, (seconds, found) in ((1, (alone, grad)), (2, over(2))):
        middle = statistics.median(seconds)
        record.add(
            "ranks", processes=size, n=len(seconds), seconds=middle, seconds_low=min(seconds),
            seconds_high=max(seconds),
            against_one=statistics.median(alone) / middle,
            difference=float((found - grad).norm() / grad.norm()), numbers_sent=DIRECTIONS if size > 1 else 0,
        )  # fmt: skip
    print_table(record.table("ranks"), units=record.units)
    record.write(RESULT)


if __name__ == "__main__":
    main()
