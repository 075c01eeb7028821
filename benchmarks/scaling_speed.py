"""What sparsity pays on a CPU: seconds and bytes of a layer and of a model, masked dense against sparse and a peer.

Run ``python -m benchmarks.scaling_speed`` (about half an hour on one quiet core; resumed where it stopped, row by row).
One layer d → d without bias, 512 tokens, forward, backward and AdamW step, by these arms:

    dense          no mask at all
    parametrized   ``F.linear(X, W · M)`` by ``torch.nn.utils.parametrize``, as published code does
    masked         the library's masked dense form: zeros in the weight, a mask on its gradient
    onednn         the same by oneDNN, where MKL, which torch takes, holds back (``benchmarks.onednn``)
    panels         the library's ``SparseLinear``, by the kernel of our own
    csr            the same layer by MKL's products of compressed rows
    sparselab      SparseLab's ``SparseLinear``, where it can be imported (``pip install --no-deps sparselab==0.2.2``)

Every round takes one step of every arm in turn, so that a machine that slows down slows all alike; seconds are those of
the process, ratios are taken round by round; median, least and most. ``held`` counts the bytes of weights, masks,
indices, gradients and optimizer state; ``peak`` is the largest resident set of a fresh process over two steps, less
that before the layer was built, inputs and activations included. ``threads`` has the least wall seconds of the panels'
arm on one thread and on two, in turn. The model is a Llama of width 512 with two blocks, masked dense against
``convert_``'s own choice, and both with their dense products by oneDNN.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks import onednn
from benchmarks.hypergrad_cost import ALLOCATOR, resident, spread
from benchmarks.scaling_goals import crossovers, goals
from sparing.report import Progress, Record, environment, print_table
from sparing.scaling.apply import apply_
from sparing.scaling.masks.gates import Gate
from sparing.scaling.plans.planning import plan
from sparing.scaling.sparse.backends import convert_
from sparing.scaling.sparse.layers import SparseLinear
from sparing.scaling.sparse.timing import even_mask
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "scaling_speed.jsonl"
SPARSITIES = (0.5, 0.75, 0.875, 0.9375, 0.969, 0.984, 0.992)
UNITS = {"seconds": "s", "seconds_two": "s", "held": "B", "peak": "B"} | dict.fromkeys(
    ["faster", "faster_than_parametrized", "faster_than_onednn", "faster_than_sparselab"], "×"
)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """What is measured."""

    widths: tuple[int, ...] = (512, 1024, 2048)
    """Fan-in and fan-out of the layer (count), d."""
    sparsities: tuple[float, ...] = SPARSITIES
    """Shares of weights that are masked."""
    model_width: int = 512
    """Width of the Llama (count)."""
    tokens: int = 512
    """Rows of the input (count), N."""
    rounds: int = 11
    """Rounds that count, after two that do not."""


QUICK = Extent(widths=(128,), sparsities=(0.75, 0.9375), model_width=64, tokens=64, rounds=3)


class Masked(nn.Module):
    """``W · M``, the mask as published code has it."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight."""
        return weight * self.mask


def plain(d: int, mask: Tensor) -> nn.Module:
    """No mask."""
    layer = nn.Linear(d, d, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(d, d, generator=stream(0, "speed", "weight")) / d**0.5)
    return layer


def parametrized(d: int, mask: Tensor) -> nn.Module:
    """The mask multiplied in at every forward pass."""
    layer = plain(d, mask)
    parametrize.register_parametrization(layer, "weight", Masked(mask))
    return layer


def masked(d: int, mask: Tensor) -> nn.Module:
    """Zeros in the weight and a gate on its gradient."""
    layer = plain(d, mask)
    Gate(layer, "weight", mask).zero_()
    return layer


def panels(d: int, mask: Tensor) -> SparseLinear:
    """Live weights only."""
    layer = plain(d, mask)
    return SparseLinear(layer.weight.detach() * mask, mask)


def csr(d: int, mask: Tensor) -> nn.Module:
    """Live weights only, by MKL."""
    layer = panels(d, mask)
    layer.mkl = True
    return layer


def sparselab(d: int, mask: Tensor) -> nn.Module:
    """The peer's own layer at the same sparsity; it draws its own mask and weights."""
    # It keeps transposes by the address of a matrix, and a new layer may lie where a freed one was.
    import_module("sparselab.ops")._clear_transpose_cache()
    return import_module("sparselab").SparseLinear(d, d, sparsity=1 - float(mask.float().mean()), bias=False)


def arms() -> dict[str, Callable[[int, Tensor], nn.Module]]:
    """The contenders that are installed."""
    ours = {"dense": plain, "parametrized": parametrized, "masked": masked, "panels": panels, "csr": csr}
    ours |= {"onednn": masked} if onednn.helps() else {}
    return ours | ({"sparselab": sparselab} if importlib.util.find_spec("sparselab") else {})


def stepper(layer: nn.Module, d: int, tokens: int) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """Return one training step of a layer, and its optimizer; the gradient of the input is asked for."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    draw = stream(0, "speed", "input")
    x = torch.randn(tokens, d, generator=draw).requires_grad_()
    grad = torch.randn(tokens, d, generator=draw) / tokens

    def step() -> None:
        layer(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    return step, optimizer


def by_onednn(step: Callable[[], None]) -> Callable[[], None]:
    """The same step with its dense products by oneDNN."""

    def run() -> None:
        onednn.use()
        step()
        onednn.use(wanted=False)

    return run


def held(layer: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, masks, indices, gradients and optimizer state when a step begins its update."""
    parts = [*layer.parameters(), *layer.buffers()]
    grads = sum(parameter.nbytes for parameter in layer.parameters())
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    patterns = sum(part.pattern.nbytes for part in layer.modules() if isinstance(part, SparseLinear))
    return patterns + grads + sum(tensor.nbytes for tensor in {id(t): t for t in (*parts, *state)}.values())


def timed(
    steps: dict[str, Callable[[], None]], rounds: int, label: str, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of every arm in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with Progress(label, total=rounds + 2, unit="round") as bar:
        for turn in range(rounds + 2):
            for name, step in steps.items():
                start = clock()
                step()
                if turn >= 2:
                    seconds[name].append(clock() - start)
            bar.advance()
    return seconds


def against(seconds: dict[str, list[float]], name: str, other: str) -> list[float]:
    """How many times faster than another arm, round by round."""
    return [theirs / mine for mine, theirs in zip(seconds[name], seconds[other], strict=True)]


def layer_rows(d: int, sparsity: float, extent: Extent) -> Iterable[dict[str, Any]]:
    """One row per arm: seconds, ratios, bytes held."""
    mask = even_mask(d, d, 1 - sparsity)
    built = {name: make(d, mask) for name, make in arms().items()}
    ready = {name: stepper(layer, d, extent.tokens) for name, layer in built.items()}
    steps = {name: by_onednn(step) if name == "onednn" else step for name, (step, _) in ready.items()}
    seconds = timed(steps, extent.rounds, f"layer d = {d}, sparsity {sparsity}")
    for name, layer in built.items():
        yield {
            "d": d, "sparsity": sparsity, "arm": name, "n": extent.rounds, **spread("seconds", seconds[name]),
            **spread("faster", against(seconds, name, "masked")),
            **spread("faster_than_parametrized", against(seconds, name, "parametrized")),
            **(spread("faster_than_onednn", against(seconds, name, "onednn")) if onednn.helps() else {}),
            **(spread("faster_than_sparselab", against(seconds, name, "sparselab")) if "sparselab" in built else {}),
            "held": None if name == "sparselab" else held(layer, ready[name][1]),
        }  # fmt: skip


def thread_rows(d: int, sparsity: float, extent: Extent) -> Iterable[dict[str, Any]]:
    """One row: a step on one thread and on two."""
    step, _ = stepper(panels(d, even_mask(d, d, 1 - sparsity)), d, extent.tokens)

    def on(threads: int) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(threads)
            step()

        return run

    seconds = timed({"one": on(1), "two": on(2)}, 5 * extent.rounds, f"threads, {d}, {sparsity}", time.perf_counter)
    torch.set_num_threads(1)
    # The least of many rounds: by the wall, other work on the machine only ever adds.
    one, two = (min(seconds[name]) for name in ("one", "two"))
    yield {
        "d": d,
        "sparsity": sparsity,
        "n": 5 * extent.rounds,
        "seconds": one,
        "seconds_two": two,
        "faster": one / two,
    }


def memory_child(name: str, d: int, sparsity: float, tokens: int) -> None:
    """Inside a fresh process: what building a layer and two steps add to the resident set; print it."""
    torch.set_num_threads(1)
    stepper(arms()[name](64, even_mask(64, 64, 0.5)), 64, 8)[0]()
    gc.collect()
    floor = resident("VmRSS")
    layer = arms()[name](d, even_mask(d, d, 1 - sparsity))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: drawing a mask is no part of training
    step, _ = stepper(layer, d, tokens)
    step()
    step()
    sys.stdout.write(json.dumps({"peak": resident("VmHWM") - floor}) + "\n")


def memory_rows(d: int, sparsity: float, extent: Extent) -> Iterable[dict[str, Any]]:
    """One row per arm, each from its own process."""
    for name in arms():
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.scaling_speed", "--child"]
        command += [name, str(d), str(sparsity), str(extent.tokens)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ALLOCATOR)
        yield {"d": d, "sparsity": sparsity, "arm": name, **json.loads(done.stdout.splitlines()[-1])}


def llama(width: int) -> nn.Module:
    """A Llama of two blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=2, num_attention_heads=width // 32,
        num_key_value_heads=width // 32, vocab_size=2048, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def model_rows(d: int, sparsity: float, extent: Extent) -> Iterable[dict[str, Any]]:
    """Whole steps, masked dense and as ``convert_`` chooses; the losses show that both train alike."""
    ids = torch.randint(2048, (2, extent.tokens // 2), generator=stream(0, "speed", "ids"))
    steps, losses, extra, built = {}, {}, {}, {}
    for name in ("masked", "auto", *(("masked onednn", "auto onednn") if onednn.helps() else ())):
        model = llama(d)
        chosen = plan(model, density=1 - sparsity)
        masks = apply_(model, chosen, seed=0)
        live = sum(p.numel() for p in model.parameters()) - sum(int((~m.bool()).sum()) for m in masks.values())
        optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-3 * (1 - sparsity)))
        sparse = name.startswith("auto")
        found = convert_(model, masks, optimizer=optimizer, tokens=extent.tokens) if sparse else {}
        losses[name], step = (loss := []), model_step(model, optimizer, ids, loss)
        steps[name] = by_onednn(step) if name.endswith("onednn") else step
        extra[name] = {
            "layers": len(masks),
            "live": live,
            "csr": sum(choice.backend == "csr" for choice in found.values()),
        }
        built[name] = (model, optimizer)
    seconds = timed(steps, extent.rounds, f"model d = {d}, sparsity {sparsity}")
    for name in steps:
        yield {
            "d": d, "sparsity": sparsity, "arm": name, "n": extent.rounds, **spread("seconds", seconds[name]),
            **spread("faster", against(seconds, name, "masked")), **extra[name], "held": held(*built[name]),
            **(spread("faster_than_onednn", against(seconds, name, "masked onednn")) if onednn.helps() else {}),
            "loss": losses[name][-1],
        }  # fmt: skip


def model_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, losses: list[float]
) -> Callable[[], None]:
    """One training step of a language model."""

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    return step


PARTS = {"layer": layer_rows, "threads": thread_rows, "memory": memory_rows, "model": model_rows}


def measure(extent: Extent, out: Path | None, parts: Iterable[str]) -> Record:
    """Measure what is missing in the record, which is written after every case."""
    settings = asdict(extent)
    fresh = Record(
        question="What does sparsity pay in seconds and bytes on a CPU, masked dense against sparse layers?",
        settings=settings, seed=0, environment=environment(), units=UNITS,
    )  # fmt: skip
    before = Record.read(out) if out and out.exists() else None
    record = before if before and before.settings == fresh.settings else fresh
    for part in parts:
        widths = (extent.model_width,) if part == "model" else extent.widths
        done = {(row["d"], row["sparsity"]) for row in record.table(part)}
        for d, sparsity in [(d, s) for d in widths for s in extent.sparsities if (d, s) not in done]:
            for row in PARTS[part](d, sparsity, extent):
                record.add(part, **row)
            if out:
                record.write(out)
    record.rows = [row for row in record.rows if row["table"] not in {"crossovers", "goals"}]
    for table, rows in (("crossovers", crossovers(record.table("layer"))), ("goals", goals(record))):
        for row in rows:
            record.add(table, **row)
    return record


def main() -> None:
    """Measure, write the record, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=Extent().rounds)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try it; written only where --out says")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=4, metavar=("ARM", "D", "SPARSITY", "TOKENS"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        name, d, sparsity, tokens = options.child
        memory_child(name, int(d), float(sparsity), int(tokens))
        return
    extent = QUICK if options.quick else Extent(rounds=options.rounds)
    out = options.out or (None if options.quick else RESULT)
    record = measure(extent, out, PARTS if options.part == "all" else [options.part])
    if out:
        record.write(out)
    for table in record.tables:
        print_table(record.table(table), title=table, units=UNITS)


if __name__ == "__main__":
    main()
