"""What do two-of-four and block-sparse training steps gain on a GPU, and do layers keep their size up to width 4,096?

Run ``python -m benchmarks.gpu.scaling`` on a machine with a CUDA device until it says that nothing is left; a call
ends within eight minutes and the next goes on. Every cell has a process of its own and four minutes; one that fails or
runs past them is a row that says why, and the next goes on. Three kinds of cells:

    linear    forward, backward and AdamW step of one layer at the shapes of a Llama of 1B, against dense bfloat16
    blocks    the same for two whole blocks of that Llama, readout and embedding small
    width     a coordinate check of a Llama, densities 1, 1/4 and 1/16, at one width of 512 to 4,096, one rule, one seed

Once a rule has every width under three seeds, table "widths" has its verdict: slopes of all widths together, with
scatter over seeds. Rows of steps: seconds and the spread over repeats, bytes that the allocator held, and the largest
difference of the output from masked dense over its largest entry.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import cells as shared
from benchmarks.gpu.cells import child, resumed, say
from sparing.report import Record, environment
from sparing.scaling import SP, Blocks, NofM, SuPar, apply_, coordinate_check, plan
from sparing.scaling.check.coordinate import LOOSENESS, Check
from sparing.scaling.check.slopes import slopes
from sparing.scaling.masks.laws import Law
from sparing.scaling.sparse.cuda import convert_cuda_
from sparing.seeds import stream

RESULT = Path(__file__).parents[1] / "results" / "gpu_scaling.jsonl"
MINUTES, CELL_MINUTES = 8.0, 4.0  # of a call, and of a cell
WARM, TIMED, REPEATS = 5, 20, 5  # steps of a repeat (count), and repeats
SIDE = 64  # of a block (count)
LIMIT = 0.05  # the coordinate check's own
RULES = {"SuPar": SuPar, "SP": SP}
SEEDS, WIDTHS, DENSITIES = (0, 1, 2), (512, 1024, 2048, 4096), (1.0, 1 / 4, 1 / 16)
TRY_WIDTHS, TRY_DENSITIES = (64, 128), (1.0, 0.25)

# out and in of the matrices of Llama-3.2-1B
SHAPES = {"q, o": (2048, 2048), "k, v": (512, 2048), "gate, up": (8192, 2048), "down": (2048, 8192)}
TRY = {"q, o": (128, 128)}  # for a try on the CPU
TOKENS = (4096, 16384)


@dataclass(frozen=True)
class Arm:
    """How a layer is masked and run."""

    density: float = 1.0
    law: Law | None = None
    backend: str | None = None  # None runs masked dense, or dense


ARMS = {
    "dense": Arm(),
    "masked dense, 2:4": Arm(0.5, NofM(n=2, m=4)),
    "2:4": Arm(0.5, NofM(n=2, m=4), "2:4"),
    **{f"masked dense, blocks, {d:g}": Arm(d, Blocks(size=SIDE)) for d in (0.5, 0.25, 0.125)},
    **{f"blocks, {d:g}": Arm(d, Blocks(size=SIDE), "block") for d in (0.5, 0.25, 0.125)},
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row."""

    kind: str
    arm: str  # of ARMS, or a rule where the kind is width
    shape: str = ""  # of SHAPES
    tokens: int = 0  # rows of a step (count)
    width: int = 0
    seed: int = 0


def cells(*, small: bool) -> Iterator[Cell]:
    """Every cell, short ones first."""
    for tokens in (64,) if small else TOKENS:
        for shape in TRY if small else SHAPES:
            for arm in ARMS:
                yield Cell(kind="linear", arm=arm, shape=shape, tokens=tokens)
        for arm in ARMS:
            yield Cell(kind="blocks", arm=arm, tokens=tokens)
    for width, seed, rule in itertools.product(TRY_WIDTHS if small else WIDTHS, SEEDS, RULES):
        yield Cell(kind="width", arm=rule, width=width, seed=seed)


def run(cell: Cell, *, small: bool) -> dict[str, Any]:
    """Measure one cell, in a process of its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return width(cell, device, small=small) if cell.kind == "width" else step(cell, device, small=small)


def step(cell: Cell, device: torch.device, *, small: bool) -> dict[str, Any]:
    """Time training steps of one layer, or of two blocks, under an arm."""
    arm = ARMS[cell.arm]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    if cell.kind == "linear":
        out, into = (TRY if small else SHAPES)[cell.shape]
        model: nn.Module = nn.Sequential(nn.Linear(into, out, bias=False)).to(device, dtype)
        x = torch.randn(cell.tokens, into, generator=stream(0, "gpu scaling")).to(device, dtype)
        chosen = plan(
            model, density=arm.density, sparse=["0.weight"], roles={"0.weight": "hidden"}, init={"*": "given"}
        )
        output: Callable[[], torch.Tensor] = lambda: model(x)  # noqa: E731
    else:
        model = llama(128 if small else 2048, layers=2, heads=2 if small else 32).to(device, dtype)
        ids = torch.randint(256, (max(1, cell.tokens // 1024), min(1024, cell.tokens)), generator=stream(0, "gpu ids"))
        ids = ids.to(device)
        chosen = plan(model, density=arm.density, init={"*": "given"})
        output = lambda: model(ids).logits  # noqa: E731
    masks = apply_(model, chosen, masks=arm.law)
    with torch.no_grad():
        expected = output().float()
    if arm.backend is not None:
        convert_cuda_(model, masks, backend=arm.backend, size=SIDE)  # type: ignore[arg-type]
    with torch.no_grad():
        error = float((output().float() - expected).abs().max() / expected.abs().max())
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-4), fused=device.type == "cuda")

    def once() -> None:
        optimizer.zero_grad()
        output().float().square().mean().backward()
        optimizer.step()

    seconds = timed(once, device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds), "allocated": peak,
        "error": error,
    }  # fmt: skip


def timed(once: Callable[[], None], device: torch.device) -> list[float]:
    """Seconds of a step, of each repeat."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(WARM):
        once()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(TIMED):
            once()
        wait()
        found.append((time.perf_counter() - begin) / TIMED)
    return found


def llama(hidden: int, *, layers: int, heads: int, inner: int | None = None) -> nn.Module:
    """A Llama with a small vocabulary, its numbers drawn at random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner or 4 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), vocab_size=256, max_position_embeddings=1024, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def width(cell: Cell, device: torch.device, *, small: bool) -> dict[str, Any]:
    """Sizes of every layer after the last step, at one width and of one seed."""
    ids = torch.randint(256, (2, 32), generator=stream(cell.seed, "gpu width")).to(device)
    steps = 3 if small else 10
    check = coordinate_check(
        lambda d: llama(d, layers=1 if small else 2, heads=d // 64, inner=2 * d).to(device), (cell.width,),
        TRY_DENSITIES if small else DENSITIES, rule=RULES[cell.arm](), seeds=(cell.seed,),
        base_width=min(TRY_WIDTHS if small else WIDTHS), batch={"input_ids": ids, "labels": ids}, steps=steps,
    )  # fmt: skip
    return {"layers": [dict(row) for row in check.rows if row["step"] == steps - 1]}


def verdicts(rows: list[dict[str, Any]], widths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Whether layers keep their size under each rule that has every width under every seed."""
    for rule in RULES:
        ours = [row for row in rows if row["rule"] == rule]
        if {(row["width"], row["seed"]) for row in ours} >= set(itertools.product(widths, SEEDS)):
            found = Check(rule=rule, rows=tuple(ours), slopes=slopes(ours, limit=LIMIT, loose=LOOSENESS * LIMIT))
            judged = sum(one.limit is not None for one in found.slopes)
            told = {"judged": judged, "beyond": len(found.failures), "worst": str(found.worst)}
            yield {"rule": rule, "seeds": len(SEEDS), "passed": found.passed, **told}


def fill(record: Record, out: Path, *, small: bool, minutes: float, cell_minutes: float) -> int:
    """Measure what is left; verdicts on widths are made anew after every cell. Returns how many cells are left."""

    def measure(cell: Cell, seconds: float) -> dict[str, Any]:
        found = child("scaling", cell, seconds=seconds, options=["--try"] * small)
        for layer in found.pop("layers", []):
            record.add("layers", rule=cell.arm, **layer)
        return found

    def judge() -> None:
        record.rows = [row for row in record.rows if row["table"] != "widths"]
        for verdict in verdicts(record.table("layers"), TRY_WIDTHS if small else WIDTHS):
            record.add("widths", **verdict)

    return shared.fill(
        record, out, "scaling", list(cells(small=small)), measure, minutes=minutes, limit=lambda _: 60 * cell_minutes,
        after=judge,
    )  # fmt: skip


def main() -> None:
    """Run what is left for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--cell-minutes", type=float, default=CELL_MINUTES)
    parser.add_argument("--try", action="store_true", dest="small", help="tiny shapes, on the CPU too")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cell")
    options = parser.parse_args()
    if options.cell:
        sys.stdout.write(json.dumps(run(Cell(**json.loads(options.cell)), small=options.small)) + "\n")
        return
    if not (options.small or torch.cuda.is_available()):
        parser.exit(2, "no CUDA device is here: pass --try for tiny shapes on the CPU\n")
    units = dict.fromkeys(["seconds", "least", "most"], "s") | {"allocated": "B"}
    record = Record(
        question="What do sparse steps gain on a GPU, and do layers keep their size up to width 4,096?",
        settings={"warm": WARM, "timed": TIMED, "repeats": REPEATS}, seed=0, environment=environment(), units=units,
    )  # fmt: skip
    record, limits = resumed(record, options.out), {"minutes": options.minutes, "cell_minutes": options.cell_minutes}
    say(fill(record, options.out, small=options.small, **limits))


if __name__ == "__main__":
    main()
