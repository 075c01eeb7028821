"""What as many real images teach at best: longer training and other shifts; ``python -m benchmarks.condense_real``.

Beside condensed images stand real ones that train a net for 300 steps, as the condensed ones do, at the best rate of a
sweep. A rival would train longer, and shift more. Here steps, shifts and rate are chosen together, by the mean over
three draws on held-out training images, and nets of five other draws are judged on the test images. Rows are written
one by one; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.condense_recipe import BASE
from benchmarks.writers import this_run, writers
from sparing.jobs.condense.inputs import Inputs, gather
from sparing.jobs.condense.loop import accuracy_or_zero, real_draw
from sparing.jobs.condense.settings import Condense
from sparing.jobs.condense.state import start
from sparing.jobs.sweeps import inside
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "condense_real.json"
DRAWS = 3
"""Draws that choose, none of which is judged (count)."""
RATES = (0.006, 0.02, 0.06)
"""Learning rates at first; a sweep goes on until the best is inside."""


def accuracy(settings: Condense, inputs: Inputs, number: int, *, held_out: bool) -> float:
    """Accuracy (%) of one net of a number, trained on a draw of that number; 0 where it diverges."""
    state = start(settings, inputs)
    return accuracy_or_zero(state, real_draw(state), number, held_out=held_out)


def trained_for(settings: Condense, steps: int, shift: int, lr: float) -> Condense:
    """Settings whose nets train for these steps, by these shifts and this rate."""
    judge = dataclasses.replace(settings.evaluation, steps=steps, lr=lr)
    return dataclasses.replace(settings, shift=shift, evaluation=judge)


def at_best(settings: Condense, inputs: Inputs, lengths: list[int], shifts: list[int]) -> dict[str, Any]:
    """Each way to train at its best rate, and what the best of them teaches on the test images."""
    nets = settings.evaluation.nets
    tried: list[dict[str, Any]] = []
    for steps in lengths:
        for shift in shifts:

            def missed(lr: float, steps: int = steps, shift: int = shift) -> float:
                made = trained_for(settings, steps, shift, lr)
                scores = [accuracy(made, inputs, number, held_out=True) for number in range(nets, nets + DRAWS)]
                return 100.0 - statistics.fmean(scores)

            lr, misses = inside(RATES, missed)
            tried.append({
                "steps": steps, "shift": shift, "lr": lr, "held_out": 100.0 - min(misses.values()), "missed": misses,
            })  # fmt: skip
            print(f"{time.strftime('%H:%M:%S')} {json.dumps(tried[-1])}", flush=True)
    best = max(tried, key=lambda way: way["held_out"])
    made = trained_for(settings, best["steps"], best["shift"], best["lr"])
    scores = [accuracy(made, inputs, number, held_out=False) for number in range(nets)]
    return {"accuracy": statistics.fmean(scores), "accuracies": scores, "best": best, "tried": tried}


def main() -> None:
    """Fill the result file row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("mnist", "fashion-mnist", "cifar10"), default="mnist")
    parser.add_argument("--depth", type=int, nargs="+", default=[3, 2], help="blocks of the net")
    parser.add_argument("--width", type=int, default=16, help="channels of a block")
    parser.add_argument("--per-class", type=int, default=1, help="real images a class")
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 1000, 3000], help="steps of training")
    parser.add_argument("--shifts", type=int, nargs="+", default=[0, 1, 2], help="pixels")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    rows: dict[str, Any] = json.loads(given.out.read_text())["rows"] if given.out.exists() else {}
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    inputs = gather(given.data, held_out=BASE.held_out_images)
    for depth in given.depth:
        base = dataclasses.replace(BASE, data=given.data, depth=depth, width=given.width, per_class=given.per_class)
        key = f"{given.data}, {depth} blocks of width {given.width}, {given.per_class} a class"
        if key in rows:
            continue
        begin = time.process_time()
        found = at_best(base, inputs, given.steps, given.shifts)
        rows[key] = found | {"cpu_seconds_in_all": round(time.process_time() - begin, 1)}
        about = this_run()
        head = {
            "environment": dict(about), "writers": writers(given.out, about), "units": {"accuracy": "%"},
            "draws_that_choose": DRAWS,
        }  # fmt: skip
        write_whole(given.out, json.dumps(head | {"rows": rows}, indent=1, ensure_ascii=False) + "\n")
        print(f"{time.strftime('%H:%M:%S')} {key}: {rows[key]['accuracy']:.2f}", flush=True)


if __name__ == "__main__":
    main()
