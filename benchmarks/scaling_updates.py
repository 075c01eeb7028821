"""What masks that change cost in memory: masked dense against sparse layers, peaks over an update.

``python -m benchmarks.scaling_updates`` writes the file; about a minute of processor time. Twelve hidden layers d → d
between 8 inputs and 4 outputs, 16 rows a step, AdamW; RigL or SET moves half of the live weights after the third of
four steps. Bytes are those of live tensors at the fullest instant (``sparing.memory.Ledger``): weights, masks, indices,
gradients, moments, activations and what the update itself allocates. They are counted, so that neither the load of the
machine nor its speed changes them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.memory_tables import table
from sparing.memory.ledger import Ledger
from sparing.report import Progress, Record, environment
from sparing.scaling.apply import apply_
from sparing.scaling.masks.dynamic import SET, RigL
from sparing.scaling.masks.evolve import Evolution
from sparing.scaling.plans.planning import plan
from sparing.scaling.sparse.backends import convert_
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "scaling_updates.jsonl"
METHODS = {"rigl": RigL(every=2, share=0.5), "set": SET(every=2, share=0.5)}
NAMES = {"rigl": "RigL", "set": "SET"}
WIDTHS, DENSITIES, DEPTH, STEPS, ROWS = (256, 512), ("1/4", "1/16", "1/64"), 12, 4, 16
GOAL = 0.2  # of masked dense at a density of 1/16


def net(width: int, depth: int) -> nn.Sequential:
    """A ReLU net of square hidden layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 4)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]


def peak(method: str, backend: str, width: int, density: float, *, depth: int = DEPTH) -> int:
    """Bytes at the fullest instant of four steps, with the update after one of them."""
    model = net(width, depth)
    chosen = plan(model, base=lambda: net(width // 2, depth), density=density, least_fan_in=1)
    masks = apply_(model, chosen, seed=0)
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-3))
    evolution = Evolution(model, masks, optimizer, METHODS[method], steps=3 * STEPS)
    convert_(model, masks, backend=backend, optimizer=optimizer)  # type: ignore[arg-type]
    x = torch.randn(ROWS, 8, generator=stream(0, "updates"))
    with Ledger(model, optimizer) as ledger:
        for step in range(STEPS):
            F.mse_loss(model(x), (x[:, :4] * x[:, 4:]).tanh()).backward()
            optimizer.step()
            evolution.step(step)
            optimizer.zero_grad()
        found = ledger.peak.total
    assert len(evolution.history) == 1, "one update is measured"
    return found


def rows(
    widths: Sequence[int] = WIDTHS, densities: Sequence[str] = DENSITIES, depth: int = DEPTH
) -> Iterator[dict[str, Any]]:
    """One row for each method, width and density."""
    for method, width, density in itertools.product(METHODS, widths, densities):
        dense, csr = (peak(method, b, width, float(Fraction(density)), depth=depth) for b in ("dense", "csr"))
        yield {"method": method, "d": width, "density": density, "dense": dense, "csr": csr, "share": csr / dense}


def shown(record: Record) -> str:
    """The page's table."""
    found = [
        [f"{NAMES[row['method']]}, d = {row['d']}, ρ = {row['density']}", f"{row['dense'] / 2**20:.2f}",
         f"{row['csr'] / 2**20:.2f}", f"{row['share']:.3f}"]
        for row in record.table("updates")
    ]  # fmt: skip
    return table(["12 layers d → d", "masked dense, MiB", "sparse, MiB", "sparse over masked dense"], found)


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    question = "What share of masked dense do sparse layers hold at the peak over an update of their masks?"
    record = Record(
        question=question, settings={"depth": DEPTH, "steps": STEPS, "rows": ROWS}, seed=0, environment=environment(),
        units={"dense": "B", "csr": "B"},
    )  # fmt: skip
    with Progress("updates", total=len(METHODS) * len(WIDTHS) * len(DENSITIES), unit="row") as bar:
        for row in rows():
            record.add("updates", **row)
            bar.advance()
    record.rows += [
        {"table": "goals", "goal": f"peak of {NAMES[row['method']]} at d = {row['d']}, ρ = 1/16, over masked dense",
         "measured": row["share"], "at_most": GOAL, "met": row["share"] <= GOAL}
        for row in record.table("updates") if row["density"] == "1/16"
    ]  # fmt: skip
    record.write(options.out)


if __name__ == "__main__":
    main()
