"""How long is one step of `finetune`: full, LISA, LISA with a frozen embedding, LoRA; by phase, warm, interleaved.

Run ``python -m benchmarks.step_time`` (twelve minutes on two quiet cores). Every arm has a process of its own, with the
step that `finetune` runs: its fused AdamW, its loss, its clipping. In every round each process takes a step in turn, so
that a machine that slows down slows all arms alike; the figure of an arm is its median over the rounds. Two heaps are
measured: glibc's own, which gives large buffers back to the system and faults them in again, and one that keeps them
(``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``); faults are counted. A second part shows what a cold start
does to such a comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import TrainState, start
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.packing import Packed
from sparing.jobs.lm.step import Method
from sparing.jobs.step import apply_
from sparing.layersample import Fixed, LayerSampling
from sparing.layersample.price.predict import Full
from sparing.report import Progress, Record, environment
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "step_time.jsonl"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a batch to time."""

    name: str
    """Label of the rows."""
    layers: int
    """Decoder layers (count), N."""
    width: int
    """Hidden width, d."""
    vocab: int
    """Vocabulary (count), V."""
    batch: int
    """Sequences a step (count)."""
    length: int
    """Tokens a sequence (count)."""


CASES = (
    Case(name="Llama 12x384", layers=12, width=384, vocab=2048, batch=2, length=256),
    Case(name="Llama 12x768", layers=12, width=768, vocab=8192, batch=1, length=256),
)


def model_of(case: Case) -> nn.Module:
    """A randomly initialised fp32 Llama of that shape; timing needs no trained weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=case.width, intermediate_size=case.width * 8 // 3, num_hidden_layers=case.layers,
        num_attention_heads=case.width // 64, num_key_value_heads=case.width // 64, vocab_size=case.vocab,
        max_position_embeddings=case.length,
    )  # fmt: skip
    return LlamaForCausalLM(config)


KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
HEAPS = {"glibc's own": dict.fromkeys(KEPT), "buffers kept": KEPT}
"""Heap -> what its environment sets."""


def _fixed(blocks: tuple[int, ...], *, embed: bool) -> LayerSampling:
    return LayerSampling(active=len(blocks), period=10**9, embed=embed, sampler=Fixed(blocks=blocks))


def arms(case: Case) -> dict[str, Method]:
    """The contenders; low and high say where the two active blocks lie."""
    top = case.layers - 1
    return {
        "full": Full(),
        "LISA, 2 blocks": _fixed((case.layers // 4, 2 * case.layers // 3), embed=True),
        "LISA, embedding frozen, low blocks": _fixed((0, 1), embed=False),
        "LISA, embedding frozen, high blocks": _fixed((top - 1, top), embed=False),
        "LoRA r=8 (peft)": Lora(rank=8, alpha=16.0),
    }


@contextmanager
def ready(case: Case, arm: str) -> Iterator[tuple[TrainState, Packed]]:
    """A run of `finetune` at its first step, and rows of random ids."""
    ids = torch.randint(case.vocab, (case.batch, case.length), generator=stream(0, "step_time"))
    training = Training(method=arms(case)[arm], batch=case.batch, accumulate=1, steps=10**6, lr=1e-5)
    with start(model_of(case), training, rows=case.batch) as state:
        yield state, Packed(ids, ids.clone())


def timed_step(state: TrainState, data: Packed) -> dict[str, float]:
    """Seconds of one step by phase, and its page faults."""
    if state.sampler is not None:
        state.sampler.begin_step(state.step)
    faults, begin = _faults(), time.perf_counter()
    loss = loss_sum(state.model, data, torch.arange(data.rows))
    forward = time.perf_counter()
    state.stepper.backward(loss, data.tokens)
    backward, middle = time.perf_counter(), _faults()
    apply_(state.stepper, state.step, loss.detach() / data.tokens, 1e-5)
    state.stepper.clear_()
    end = time.perf_counter()
    state.step += 1
    return {
        "forward": forward - begin, "backward": backward - forward, "optimizer": end - backward, "total": end - begin,
        "faults_passes": middle - faults, "faults_step": _faults() - middle,
    }  # fmt: skip


def _faults() -> int:
    """Page faults of this process so far that read no disk (count)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def child(name: str, arm: str, threads: int) -> None:
    """Inside a process of its own: take a step for every line that comes in, and answer with its figures."""
    torch.set_num_threads(threads)
    case = next(case for case in CASES if case.name == name)
    with ready(case, arm) as (state, data):
        for _ in sys.stdin:
            sys.stdout.write(json.dumps(timed_step(state, data)) + "\n")
            sys.stdout.flush()


def interleaved(case: Case, heap: str, threads: int, rounds: int) -> list[dict[str, object]]:
    """Median, least and most seconds of each phase over ``rounds`` warm rounds, after two that do not count."""
    names = list(arms(case))
    environment = {k: v for k, v in {**os.environ, **HEAPS[heap]}.items() if v is not None}
    times: dict[str, list[dict[str, float]]] = {arm: [] for arm in names}
    with ExitStack() as stack, Progress(f"{case.name}, {heap}", total=rounds + 2, unit="round") as bar:
        processes = {}
        for arm in names:
            command = [sys.executable, "-m", "benchmarks.step_time", "--child", case.name, arm, str(threads)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
            processes[arm] = stack.enter_context(subprocess.Popen(command, **pipes))
        for turn in range(rounds + 2):
            for arm in names[turn % len(names) :] + names[: turn % len(names)]:
                process = processes[arm]
                process.stdin.write("\n")
                process.stdin.flush()
                row = json.loads(process.stdout.readline())
                if turn >= 2:
                    times[arm].append(row)
            bar.advance()
        for process in processes.values():
            process.stdin.close()
    reference = [row["total"] for row in times["full"]]
    where = {"model": case.name, "heap": heap, "threads": threads}
    return [where | summary(arm, rows, reference) for arm, rows in times.items()]


def summary(arm: str, rows: list[dict[str, float]], reference: list[float]) -> dict[str, object]:
    """One row: medians by phase, spread of the total, and how many times faster than full, round by round."""
    ratios = sorted(full / row["total"] for full, row in zip(reference, rows, strict=True))
    totals = sorted(row["total"] for row in rows)
    phases = {phase: statistics.median(row[phase] for row in rows) for phase in rows[0]}
    spread = {"total_min": totals[0], "total_max": totals[-1], "n": len(totals)}
    speed = {"faster": statistics.median(ratios), "faster_min": ratios[0], "faster_max": ratios[-1]}
    return {"arm": arm, **phases, **spread, **speed}


def cold(case: Case, arm: str, steps: int = 10) -> list[dict[str, float]]:
    """The steps of a fresh process, from its very first."""
    command = [sys.executable, "-m", "benchmarks.step_time", "--cold", case.name, arm, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cold_child(name: str, names: str, steps: int) -> None:
    """Inside the fresh process: time ``steps`` steps of each arm in ``names`` (joined by |), print them as JSON."""
    case = next(case for case in CASES if case.name == name)
    rows = []
    for arm in names.split("|"):
        with ready(case, arm) as (state, data):
            rows += [{"arm": arm, "step": step, **timed_step(state, data)} for step in range(steps)]
    sys.stdout.write(json.dumps(rows) + "\n")


def cold_rows(case: Case) -> list[dict[str, object]]:
    """First step and tenth step of each arm in its own process, then one unwarmed process through three arms."""
    rows: list[dict[str, object]] = []
    chosen = ["full", "LoRA r=8 (peft)", "LISA, 2 blocks"]
    for arm in chosen:
        rows += [{"model": case.name, "process": "own", **row} for row in cold(case, arm)]
    rows += [{"model": case.name, "process": "shared", **row} for row in cold(case, "|".join(chosen), steps=1)]
    return rows


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cold", nargs=3)
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.cold:
        cold_child(options.cold[0], options.cold[1], int(options.cold[2]))
        return
    if options.child:
        child(options.child[0], options.child[1], int(options.child[2]))
        return
    units = dict.fromkeys(["forward", "backward", "optimizer", "total", "total_min", "total_max"], "s") | {
        "faster": "×"
    }
    record = Record(
        question="How much faster is a step when only a few layers train?",
        settings={"rounds": options.rounds, "cases": [asdict(case) for case in CASES]},
        seed=0, environment=environment(), units=units,
    )  # fmt: skip
    for case in CASES:
        for heap in HEAPS:
            for threads in (1, torch.get_num_threads()):
                for row in interleaved(case, heap, threads, options.rounds):
                    record.add("warm", **row)
    for row in cold_rows(CASES[0]):
        record.add("cold", **row)
    record.write(RESULT)


if __name__ == "__main__":
    main()
