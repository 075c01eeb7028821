"""How well directions point on stories15M's token weights: the cosine of (FG)²U estimates to the exact hypergradient.

Run ``python -m benchmarks.adapt_table`` (ten minutes of CPU time on one core; every row is kept as it is done, so the
same command goes on after an interruption). At one window of documents a seed, directions in φ and in ψ get the same
CPU seconds; the exact hypergradient is that of checkpointed reverse. What weights learnt in either space are worth is
measured by ``benchmarks.token_weights``.

Scaled down from the papers: stories15M (15 M weights, all of them adapted) instead of 82 M, T = 12 documents of at most
64 tokens instead of 24 or 48 of up to 1,024, a token-weight network of 0.25 M parameters over frozen features.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.valley import store
from sparing.hypergrad import hypergradient
from sparing.hypergrad.checkpointed import Checkpointed
from sparing.hypergrad.forward import ForwardGradient
from sparing.jobs.adapt import meta
from sparing.jobs.adapt.meta import arm_of
from sparing.jobs.adapt.problem import Inputs, draw_window, load, prepare, problem
from sparing.jobs.adapt.settings import Adapt
from sparing.vectors import dot, norm

RESULT = Path(__file__).parent / "results" / "adapt_table.json"
SEEDS = range(5)
SETTINGS = Adapt(stream=30, held_out_documents=16)
POINT = 20.0
"""CPU seconds that each space gets for its estimate."""

ASKED = (
    "model", "documents", "stream", "held_out_documents", "length", "question_length", "tune", "tune_lr", "inner_lr",
    "inner_clip", "locality", "width", "outer_lr", "outer_clip",
)  # fmt: skip
"""Settings that a cosine depends on."""

Row = dict[str, Any]


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
    row: Row = {"table": "cosine", "seed": seed}
    row |= {"exact_seconds": time.process_time() - begin, "tokens": len(window.features)}
    row["parameters"] = sum(value.numel() for value in state.phi.values())
    for space, one in posed.items():
        row |= {f"{space}_{key}": value for key, value in pointing(one, state.phi, exact, seed).items()}
    return row


class Rows(store.Store):
    """The result file: rows by key, all of the same settings."""

    def __init__(self, path: Path) -> None:
        self.path, self.command = path, "python -m benchmarks.adapt_table"
        self.rows = self._read()
        asked = {"table": "settings", **{name: getattr(SETTINGS, name) for name in ASKED}, "point": POINT}
        if self.once("settings", lambda: asked) != asked:
            raise SystemExit(f"{path}: its rows are of other settings; pass another --out")


def main() -> None:
    """Do what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=Path("runs/adapt-table/base.safetensors"))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options = parser.parse_args()
    if "MALLOC_MMAP_MAX_" not in os.environ:  # fresh pages for every large tensor double the time of every method
        once = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(5 * 10**8)}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.adapt_table", *sys.argv[1:]], os.environ | once)
    torch.set_num_threads(1)
    rows, inputs = Rows(options.out), prepare(*load(SETTINGS), SETTINGS, options.base)
    for seed in options.seeds:
        rows.once(f"cosine/{seed}", partial(cosine_row, inputs, seed))


if __name__ == "__main__":
    main()
