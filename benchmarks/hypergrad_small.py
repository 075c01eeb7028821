"""What does a forward-mode step of a small problem take? ``python -m benchmarks.hypergrad_small``.

Five unknowns weigh five groups of examples of a perceptron. CPU seconds of a step of ``Forward`` by two backward passes
and by torch.func, and of ``Reverse``, in rounds of alternating order. Each round is written; run it again to go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from sparing import hypergrad as hg
from sparing.hypergrad.forward_mode import tangents
from sparing.hypergrad.forward_mode.updates import by_jvp
from sparing.report import environment
from sparing.report.atomic import write_whole
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "hypergrad_small.json"
UNKNOWNS, STEPS, ROUNDS = 5, 50, 7
ARMS = ("Forward, two backward passes", "Forward, torch.func", "Reverse")
OPTIMIZERS: dict[str, Any] = {"SGD": hg.SGD(lr=0.1, momentum=0.9), "Adam": hg.Adam(lr=0.01)}
SIZES = {"4-16-10, 8 examples": (4, 16, 8), "64-128-10, 256 examples": (64, 128, 256)}  # inputs, hidden, examples


def problem(size: str, optimizer: str, steps: int) -> tuple[hg.Bilevel, torch.Tensor]:
    """The problem and φ₀."""
    into, hidden, examples = SIZES[size]
    generator = stream(0, "small", size)
    x, y = torch.randn(examples, into, generator=generator), torch.randint(10, (examples,), generator=generator)
    groups = torch.arange(examples) % UNKNOWNS
    theta = {
        "in": torch.randn(hidden, into, generator=generator) / into**0.5, "shift": torch.zeros(hidden),
        "out": torch.randn(10, hidden, generator=generator) / hidden**0.5, "bias": torch.zeros(10),
    }  # fmt: skip

    def losses(theta: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = F.linear(F.relu(F.linear(x, theta["in"], theta["shift"])), theta["out"], theta["bias"])
        return F.cross_entropy(logits, y, reduction="none")

    made = hg.Bilevel(
        inner=lambda theta, phi, batch: (torch.sigmoid(phi)[groups] * losses(theta)).mean(),
        outer=lambda theta, phi: losses(theta).mean(), init=theta, optimizer=OPTIMIZERS[optimizer], steps=steps,
    )  # fmt: skip
    return made, torch.zeros(UNKNOWNS)


@contextmanager
def by(arm: str) -> Iterator[None]:
    """Take torch.func's layers where the arm says so, for the gradient and for any update but a linear one."""
    held = tangents.gradient_along, tangents.update_with_tangents

    def update(optimizer: Any, step: int, primals: Any, rows: Any, _: Any) -> Any:
        linear = isinstance(optimizer, hg.SGD) and optimizer.linear
        return (held[1] if linear else by_jvp)(optimizer, step, primals, rows, tangents.batched_jvp)

    if "torch.func" in arm:
        tangents.gradient_along, tangents.update_with_tangents = lambda *_: None, update  # type: ignore[assignment]
    try:
        yield
    finally:
        tangents.gradient_along, tangents.update_with_tangents = held


def seconds(arm: str, size: str, optimizer: str, steps: int) -> float:
    """CPU seconds of a step of one hypergradient."""
    made, phi = problem(size, optimizer, steps)
    method = hg.Reverse() if arm == "Reverse" else hg.Forward()
    with by(arm):
        begin = time.process_time()
        hg.hypergradient(made, phi, method)
    return (time.process_time() - begin) / steps


def fill(out: Path, *, rounds: int, steps: int) -> dict[str, Any]:
    """Measure what is left, and write after every round."""
    rows: dict[str, list[float]] = json.loads(out.read_text())["rounds"] if out.exists() else {}
    for size in SIZES:
        for optimizer in OPTIMIZERS:
            keys = {arm: f"{arm}; {size}; {optimizer}" for arm in ARMS}
            while len(rows.get(keys[ARMS[-1]], [])) < rounds:
                done = len(rows.get(keys[ARMS[-1]], []))
                for arm in ARMS:
                    seconds(arm, size, optimizer, 2)  # loads the kernels and rules
                taken = {arm: seconds(arm, size, optimizer, steps) for arm in (ARMS if done % 2 else ARMS[::-1])}
                for arm, found in taken.items():
                    rows.setdefault(keys[arm], []).append(found)
                write(out, rows, steps)
    return rows


def write(out: Path, rows: dict[str, list[float]], steps: int) -> None:
    """Write the file whole."""
    medians = {key: statistics.median(taken) for key, taken in rows.items()}
    head = {"units": "CPU s a step", "steps": steps, "unknowns": UNKNOWNS, "environment": dict(environment())}
    write_whole(out, json.dumps(head | {"medians": medians, "rounds": rows}, indent=1) + "\n")


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for key, taken in fill(options.out, rounds=options.rounds, steps=options.steps).items():
        print(f"{1e3 * statistics.median(taken):6.2f} ms a step, n = {len(taken)}: {key}")


if __name__ == "__main__":
    main()
