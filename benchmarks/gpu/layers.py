"""What does a step of `finetune` hold and take on a GPU: full, LISA, QLISA, LoRA, QLoRA, checkpointed or not?

Run ``python -m benchmarks.gpu.layers`` on a machine with a CUDA device until it says that nothing is left; a call ends
after eight minutes and the next goes on. Models have the sizes of LLaMA-2-7B and Llama-3.1-8B and random weights, which
memory and speed do not depend on. Every cell has a process of its own, so that none finds another's memory, and one
that runs out of memory is a row that says so. Rows: bytes predicted by `plan` for the blocks that these steps drew and,
as "dearest", for any; bytes that the allocator held (``max_memory_allocated``) and took from the device
(``max_memory_reserved``); tokens a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cells import child, fill, resumed, say, take_device
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import start, take_step_
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.meta import Source, loss_tokens
from sparing.jobs.lm.names import Weights
from sparing.jobs.lm.packing import Packed
from sparing.jobs.lm.prices import price
from sparing.jobs.lm.step import FitStep, Method
from sparing.layersample import Fixed, LayerSampling
from sparing.layersample.price.predict import Full
from sparing.report import Record, environment
from sparing.seeds import stream

RESULT = Path(__file__).parents[1] / "results" / "gpu_layers.jsonl"
MINUTES, LIMIT = 8.0, 240.0  # of a call, and seconds of a cell
WARM, TIMED = 3, 10  # steps of a cell (count)
BESIDE = 3  # cells at the same time, of which one works

MODELS: dict[str, dict[str, Any]] = {
    "LLaMA-2-7B": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 8192},
    "Llama-3.1-8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
    # for a try on the CPU
    "tiny": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 8192},
}  # fmt: skip

METHODS: dict[str, tuple[Method, Weights | None]] = {
    "full": (Full(), None),
    "LISA, 2 blocks": (LayerSampling(active=2, period=5), None),
    "LISA, 2 blocks, embedding frozen": (LayerSampling(active=2, period=5, embed=False), None),
    "QLISA, nf4, 1 block, embedding frozen": (LayerSampling(active=1, period=5, embed=False), "nf4"),
    "LoRA, rank 16": (Lora(rank=16), None),
    "QLoRA, nf4, rank 16": (Lora(rank=16), "nf4"),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row."""

    model: str
    method: str
    checkpointing: bool
    length: int

    @property
    def step(self) -> FitStep:
        """The step that is run."""
        method, weights = METHODS[self.method]
        return FitStep(
            method=method, weights=weights, dtype="bfloat16", batch=1, length=self.length, accumulate=1, packing=False,
            attention="sdpa", checkpointing=self.checkpointing,
        )  # fmt: skip


def cells(models: list[str], lengths: list[int]) -> Iterator[Cell]:
    """Every cell, short rows first."""
    for length in lengths:
        for model in models:
            for method in METHODS:
                for again in (False, True):
                    yield Cell(model=model, method=method, checkpointing=again, length=length)


def run(cell: Cell) -> dict[str, Any]:
    """Inside a process of its own: build, take steps, and say what they held and took."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = AutoConfig.for_model("llama", **MODELS[cell.model])
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)  # imports what the next cell can import while this one works
    take_device()
    step = cell.step
    # on the device, where random numbers come fast; `finetune` itself reads and quantises in main memory
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=step.attention)
    ids = torch.randint(config.vocab_size, (1, cell.length), generator=stream(0, "gpu layers"))
    data = Packed(ids, ids.clone())
    training = Training(
        method=step.method, weights=step.weights, batch=1, accumulate=1, steps=10**6, lr=1e-5,
        checkpointing=step.checkpointing,
    )  # fmt: skip
    with start(model, training, rows=1) as state:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # of what building and quantising held
        state.at_once = loss_tokens(state.model, step.loss_tokens, cell.length)
        for _ in range(WARM):
            take_step_(state, data)
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        wait()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spent = []
        for _ in range(TIMED):
            begin = time.perf_counter()
            take_step_(state, data)
            wait()
            spent.append(time.perf_counter() - begin)
        held = {"allocated": None, "reserved": None}
        # before the run ends: then layers at rest have their whole weights back
        if device.type == "cuda":
            held = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    seconds = statistics.median(spent)
    least, most = min(spent), max(spent)
    return {**held, "seconds": seconds, "least": least, "most": most, "tokens_per_second": cell.length / seconds}


def price_(record: Record, device: Any) -> None:
    """Add to every row without it what `plan` predicts for its step, on fake tensors."""
    from transformers import AutoConfig

    names = [one.name for one in fields(Cell)]
    for row in record.rows:
        if row["table"] == "layers" and "predicted" not in row:
            cell = Cell(**{name: row[name] for name in names})
            source = Source(AutoConfig.for_model("llama", **MODELS[cell.model]), cell.step.attention)
            row["dearest"] = price(source, cell.step, device=device).bytes.total
            found = (price(source, step, device=device).bytes.total for step in drawn(cell.step, len(source.blocks)))
            row["predicted"] = max(found, default=row["dearest"])


def drawn(step: FitStep, blocks: int) -> list[FitStep]:
    """The step with each set of blocks that trained while it was timed; none where nothing is drawn."""
    method = step.method
    if not isinstance(method, LayerSampling):
        return []
    intervals = {at // method.period for at in range(WARM, WARM + TIMED)}
    sets = {method.sampler.draw(blocks, method.active, seed=0, interval=at) for at in intervals}
    return [replace(step, method=replace(method, sampler=Fixed(blocks=one))) for one in sorted(sets)]


def main() -> None:
    """Run what is left for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--models", nargs="+", default=["LLaMA-2-7B", "Llama-3.1-8B"], choices=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--try", action="store_true", dest="small", help="a tiny model and short rows, on the CPU too")
    parser.add_argument("--prices", action="store_true", help="measure nothing, add the predictions that rows lack")
    parser.add_argument("--cell")
    options = parser.parse_args()
    if options.small:
        options.models, options.lengths = ["tiny"], [64]
    if options.cell:
        found = run(Cell(**json.loads(options.cell)))
        sys.stdout.write(json.dumps(found) + "\n")
        return
    if not (options.small or options.prices or torch.cuda.is_available()):
        parser.exit(2, "no CUDA device is here: pass --try for a tiny model on the CPU\n")
    units = {
        **dict.fromkeys(["predicted", "dearest", "allocated", "reserved"], "B"),
        **dict.fromkeys(["seconds", "least", "most"], "s"),
        "tokens_per_second": "tokens/s",
    }
    question = "What does a step hold and take on a GPU?"
    record = Record(
        question=question, settings={"warm": WARM, "timed": TIMED}, seed=0, environment=environment(), units=units
    )
    record, device = resumed(record, options.out), "cuda" if torch.cuda.is_available() else "cpu"
    left = 0
    if not options.prices:
        left = fill(
            record, options.out, "layers", list(cells(options.models, options.lengths)),
            lambda cell, seconds: child("layers", cell, seconds=seconds), minutes=options.minutes,
            limit=lambda _: LIMIT, beside=lambda _: BESIDE, sort=lambda cell: (cell.method, cell.checkpointing),
        )  # fmt: skip
    price_(record, "cuda" if options.prices else device)
    record.write(options.out)
    say(left)


if __name__ == "__main__":
    main()
