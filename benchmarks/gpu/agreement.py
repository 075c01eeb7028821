"""Do commands and calls end on a GPU where they end on the CPU?

Run ``python -m benchmarks.gpu.agreement`` on a machine with a CUDA device until it says that nothing is left. A cell is
a command of the command line that has ``--device``, or a call of the library on tensors of a device; it runs on both,
on the same data and seeds, and its row says how far the results are apart: the largest difference over one plus the
CPU's magnitude. What is computed in float64 must agree by rounding, float32 by rounding grown over the steps, and low
bits by a few of their steps; ``limit`` says which, and ``agrees`` whether it is kept. Where a package is lacking, or
something does not run on a device, the row says why.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.cells import child, fill, resumed, say
from benchmarks.trust.cases import SMALL, prepare
from sparing import hypergrad as hg
from sparing import layersample as ls
from sparing import memory
from sparing import scaling as sc
from sparing import valley as va
from sparing.report import Record, environment
from sparing.seeds import stream

RESULT = Path(__file__).parents[1] / "results" / "gpu_agreement.jsonl"
MINUTES, LIMIT, BESIDE = 8.0, 120.0, 16  # of a call, seconds of a cell, and cells at the same time
EXACT, SINGLE, HALF, LOW = 1e-9, 2e-4, 3e-2, 6e-2  # float64; float32 after steps; 16 bits; 4 and 8 bits

FINETUNE = ["finetune", "model", "data.jsonl", "--batch=2", "--length=32", "--steps=6", "--accumulate=2",
            "--held-out=0.3", "--max-new-tokens=2", "--lr=1e-3", "--evaluate-every=2", "--save-every=3",
            "--lisa.active=1", "--lisa.period=2", "--lora.rank=2"]  # fmt: skip
PRETRAIN = ["pretrain", *(f"--{name}={value}" for name, value in SMALL["pretrain"].items() if name != "device")]
QUANTISED = ("nf4", "int8")
OPTIMIZERS = ("adamw-8bit", "paged-adamw-8bit", "adamw-4bit", "adafactor", "apollo", "apollo-mini", "galore",
              "offloaded-adamw")  # fmt: skip
# theirs are wider than the small model's matrices
RANKS = {"apollo": ["--apollo.rank=4"], "galore": ["--galore.rank=4"]}

COMMANDS: dict[str, tuple[list[str], float]] = {
    "finetune": ([*FINETUNE, "--method=full"], SINGLE),
    "finetune, float64": ([*FINETUNE, "--method=full", "--dtype=float64"], EXACT),
    "finetune, bfloat16": ([*FINETUNE, "--method=full", "--dtype=bfloat16", "--masters"], HALF),
    "finetune, bfloat16, documents": (
        [*FINETUNE, "--method=full", "--dtype=bfloat16", "--masters", "--attention=documents"], HALF),
    "finetune, documents": ([*FINETUNE, "--method=full", "--attention=documents"], SINGLE),
    "finetune, checkpointed": ([*FINETUNE, "--method=full", "--checkpointing"], SINGLE),
    "finetune, LISA": ([*FINETUNE, "--method=lisa"], SINGLE),
    "finetune, LISA, state offloaded": ([*FINETUNE, "--method=lisa", "--lisa.state=offload"], SINGLE),
    "finetune, LISA, by gradient": ([*FINETUNE, "--method=lisa", "--lisa.sampler=adaptive"], SINGLE),
    "finetune, LoRA": ([*FINETUNE, "--method=lora"], SINGLE),
    **{f"finetune, LISA, {one}": ([*FINETUNE, "--method=lisa", f"--weights={one}"], LOW) for one in QUANTISED},
    **{f"finetune, LoRA, {one}": ([*FINETUNE, "--method=lora", f"--weights={one}"], LOW) for one in QUANTISED},
    **{f"finetune, {one}": ([*FINETUNE, "--method=full", f"--optimizer={one}", *RANKS.get(one, [])],
                            LOW if "bit" in one or "apollo" in one or "galore" in one else SINGLE)
       for one in OPTIMIZERS},
    "finetune, one rank of III": ([*FINETUNE, "--method=full", "--plan=III"], SINGLE),
    "pretrain": (PRETRAIN, SINGLE),
    "pretrain, SμPar at 1/4": ([*PRETRAIN, "--rule=supar", "--density=1/4"], SINGLE),
    "pretrain, RigL": ([*PRETRAIN, "--dynamic=rigl"], SINGLE),
    "pretrain, Muon": ([*PRETRAIN, "--optimizer=muon"], SINGLE),
    "probe": (["probe", "--seconds=1"], 0.0),  # that there are speeds, not which
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row."""

    what: str  # of COMMANDS or CALLS


# ---- calls of the library: results of one device, as named numbers in float64


def hypergradient(method: Any, device: torch.device) -> dict[str, Tensor]:
    """Of row weights, through twenty steps of momentum on a small net, in float64."""
    draw = stream(0, "agreement")
    x, y = (torch.randn(24, width, generator=draw, dtype=torch.float64).to(device) for width in (5, 1))
    init = {name: (0.5 * torch.randn(shape, generator=draw, dtype=torch.float64)).to(device)
            for name, shape in {"a": (5, 4), "b": (4, 1)}.items()}  # fmt: skip
    phi = {"weights": torch.rand(24, generator=draw, dtype=torch.float64).to(device)}
    forward = lambda theta, rows: torch.tanh(rows @ theta["a"]) @ theta["b"]  # noqa: E731
    problem = hg.Bilevel(
        inner=lambda theta, phi, _: (phi["weights"][:, None] * (forward(theta, x) - y) ** 2).mean(),
        outer=lambda theta, phi: ((forward(theta, x[:8]) - y[:8]) ** 2).mean(),
        init=init, optimizer=hg.SGD(lr=0.05, momentum=0.9), steps=20,
    )  # fmt: skip
    found = hg.hypergradient(problem, phi, method, seed=0)
    return {"grad": found.grad["weights"], "value": found.value, "theta": found.theta["a"]}


def dropout(device: torch.device) -> dict[str, Tensor]:
    """Checkpointed against stored states where the inner loss draws units: both must see the same draws."""
    theta0 = {"w": torch.randn(40, generator=stream(0, "dropout"), dtype=torch.float64).to(device)}
    phi = {"c": torch.ones(40, dtype=torch.float64, device=device)}
    problem = hg.Bilevel(
        inner=lambda theta, phi, _: (F.dropout(theta["w"] * phi["c"], 0.5) - 1).square().sum(),
        outer=lambda theta, phi: theta["w"].square().sum(), init=theta0, optimizer=hg.SGD(lr=0.01), steps=9,
    )  # fmt: skip
    grads = []
    for method in (hg.Reverse(), hg.Checkpointed(states=3)):
        torch.manual_seed(0)
        grads.append(hg.hypergradient(problem, phi, method).grad["c"])
    # devices draw different units: only that both methods saw the same is compared
    return {"apart": (grads[0] - grads[1]).abs().max()}


class Net(nn.Module):
    """Convolution, batch norm, head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (rows, 3), of images of shape (rows, 1, 8, 8)."""
        out: Tensor = self.head(F.avg_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1))
        return out


def images(device: torch.device) -> tuple[Tensor, Tensor]:
    """Drawn, float64."""
    draw = stream(0, "agreement images")
    x = torch.randn(48, 1, 8, 8, generator=draw, dtype=torch.float64)
    return x.to(device), torch.randint(3, (48,), generator=draw).to(device)


def trained(seed: int, device: torch.device) -> nn.Module:
    """A few steps of plain training, float64."""
    model, (x, y) = Net(seed).double().to(device), images(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def evaluate(device: torch.device) -> Callable[[nn.Module], dict[str, float]]:
    """Loss of the drawn rows."""
    x, y = images(device)

    @torch.no_grad()
    def found(model: nn.Module) -> dict[str, float]:
        return {"loss": F.cross_entropy(model(x), y).item()}

    return found


def scan(device: torch.device) -> dict[str, Any]:
    """A curve along noise, batch norm refreshed."""
    x, _ = images(device)
    found = va.scan(
        trained(0, device), evaluate(device), va.Noise("gaussian"), calibrate=[x], points=5, draws=2, seed=0
    )
    return {"losses": found.values["loss"], "asymmetry": found.asymmetry["loss"].value}


def merged(device: torch.device) -> dict[str, Any]:
    """Alignment of strangers, a forecast from rows, and a soup."""
    a, b = trained(0, device), trained(1, device)
    x, _ = images(device)
    aligned = va.align(a, b, [x])
    forecast = va.predict_merge(a, b, rows=[x], calibrate=[x], model=a)
    mixed = va.soup([a, b], evaluate=evaluate(device), calibrate=[x], model=a)
    weights = torch.cat([value.flatten().double() for value in mixed.state.values()])
    moved = torch.cat([value.flatten().double() for value in aligned.state.values()])
    return {"forecast": forecast.gap["loss"], "soup": weights.norm(), "aligned": moved.norm()}


def curvature(device: torch.device) -> dict[str, Any]:
    """Sharpness and the trace of the Hessian."""
    model, (x, y) = trained(0, device), images(device)
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    found = va.sharpness(model, loss, [(x, y)], radius=0.05, steps=5)
    return {"sharpness": found.value}


def sampled(device: torch.device) -> dict[str, Any]:
    """Layer sampling in a plain loop, its state offloaded, under AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(16, 6, generator=stream(0, "sampled"), dtype=torch.float64).to(device)
    settings = ls.LayerSampling(active=1, period=2, state="offload")
    losses = []
    with ls.Sampler(model, optimizer, settings, seed=0) as sampler:
        for step in range(12):
            sampler.begin_step(step)
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses}


def scaled(device: torch.device) -> dict[str, Any]:
    """A plan with masks, its groups, and steps of a sparse net."""
    torch.manual_seed(0)
    make = lambda width: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),  # noqa: E731
                                       nn.Linear(width, 2)).double()  # fmt: skip
    model = make(32).to(device)
    chosen = sc.plan(model, base=make(16), density=0.25)
    masks = sc.apply_(model, chosen, seed=0)
    optimizer = torch.optim.AdamW(chosen.groups(model, lr=1e-2))
    x = torch.randn(16, 8, generator=stream(0, "scaled"), dtype=torch.float64).to(device)
    losses = []
    for _ in range(8):
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "live": [int(mask.sum()) for mask in masks.values()]}


def trainer(device: torch.device) -> dict[str, Any]:
    """Layer sampling as a callback of transformers' Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    ids = torch.randint(64, (32, 16), generator=stream(0, "trainer"))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=6, per_device_train_batch_size=4, use_cpu=device.type == "cpu", report_to=[],
            logging_steps=1, save_strategy="no", seed=0, data_seed=0, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        settings = ls.LayerSampling(active=1, period=2)
        made = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[ls.LayerSamplingCallback(settings)])
        made.train()
        return {"losses": [row["loss"] for row in made.state.log_history if "loss" in row]}


def measured(device: torch.device) -> dict[str, Any]:
    """Whether bytes of a step by ledger or allocator are what is predicted for the device: 0, or times too many."""
    make = lambda: nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))  # noqa: E731
    loss = lambda model, batch: model(batch["x"]).square().sum()  # noqa: E731
    batch = {"x": torch.ones(64, 512)}
    optimizer = lambda parameters: torch.optim.AdamW(parameters, fused=True)  # noqa: E731
    kind: Any = device.type
    predicted = memory.predict(make, {"x": ((64, 512), torch.float32)}, optimizer, loss=loss, device=kind)
    held = memory.measure(make, batch, optimizer, loss=loss, device=kind)
    # besides tensors there are two workspaces of the matrix libraries, 32 MiB each on an H100
    return {"beyond": max(0, held.total - predicted.total) // (66 * 2**20)}


METHODS: dict[str, Any] = {
    "reverse": hg.Reverse(), "checkpointed": hg.Checkpointed(states=4), "truncated": hg.Truncated(steps=5),
    "forward": hg.Forward(), "forward gradient": hg.ForwardGradient(directions=4),
    "zeroth order": hg.ZerothOrder(directions=4, step=1e-3), "Hessian-free": hg.HessianFree(),
    "Neumann": hg.Neumann(step=0.05, terms=10), "conjugate gradient": hg.ConjugateGradient(terms=10, damping=1e-2),
    "finite difference": hg.FiniteDifference(),
}  # fmt: skip
CALLS: dict[str, tuple[Callable[[torch.device], Mapping[str, Any]], float]] = {
    # differences of losses lose the digits that their step divides by
    **{f"hypergradient, {name}": (lambda device, method=method: hypergradient(method, device),  # type: ignore[misc]
                                  1e-5 if name in ("zeroth order", "finite difference") else EXACT)
       for name, method in METHODS.items()},
    "hypergradient, dropout drawn again": (dropout, EXACT),
    "valley.scan": (scan, EXACT), "valley.align, predict_merge, soup": (merged, EXACT),
    "valley.sharpness": (curvature, 1e-6),
    "layersample.Sampler, state offloaded": (sampled, EXACT), "layersample in Trainer": (trainer, SINGLE),
    "scaling.apply_": (scaled, EXACT), "memory.measure": (measured, 0.0),
}  # fmt: skip


# ---- a cell


def cells(*, small: bool) -> Iterator[Cell]:
    """Every cell; of a try those that a CPU runs soon."""
    names = [*CALLS, *COMMANDS]
    for name in [*names[:2], "scaling.apply_", "finetune, LISA"] if small else names:
        yield Cell(what=name)


def run(cell: Cell) -> dict[str, Any]:
    """Do it on both devices, and compare."""
    there = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on: Callable[[torch.device], Mapping[str, Any]]
    if cell.what in CALLS:
        on, limit = CALLS[cell.what]
    else:
        words, limit = COMMANDS[cell.what]
        on = lambda device: command(words, device)  # noqa: E731
    expected, found = on(torch.device("cpu")), on(there)
    apart = distance(expected, found)
    if not math.isfinite(apart):
        return {"why": "the device's result is no number"}
    return {"apart": apart, "limit": limit, "agrees": apart <= limit}


def distance(expected: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """The largest difference over one plus the magnitude of what was expected."""
    if expected.keys() != found.keys():
        raise ValueError(f"one device told {sorted(expected)}, the other {sorted(found)}")
    worst = 0.0
    for name, value in expected.items():
        # a list of numbers would become float32
        one, other = (
            (each.detach().cpu() if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float64)).double()
            for each in (value, found[name])
        )
        if one.shape != other.shape or not one.numel():
            raise ValueError(f"{name} has shapes {tuple(one.shape)} and {tuple(other.shape)}")
        worst = max(worst, ((one - other).abs() / (1 + one.abs())).max().item())
        # a maximum passes over what is no number
        worst = worst if bool(other.isfinite().all()) else float("inf")
    return worst


def command(words: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Losses of a command in a folder of its own."""
    from sparing.cli import main as sparing

    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as name, contextlib.chdir(name),
        contextlib.redirect_stdout(said), contextlib.redirect_stderr(said),
    ):  # fmt: skip
        prepare(Path(name))
        config = Path(name) / "model" / "config.json"
        # devices draw different units
        dry = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config.write_text(json.dumps(json.loads(config.read_text()) | dry))
        code = sparing([*words, f"--device={device.type}", "--out=out"])
        if code:
            raise RuntimeError(f"on {device.type}: {said.getvalue().strip().splitlines()[-1]}")
        record = Record.read(Path(name) / "out" / "record.jsonl")
    if words[0] == "probe":
        speeds = [row.get("speed") or row.get("moves") for row in record.table("arithmetic")]
        return {"speeds": [1.0 if speed and speed > 0 else 0.0 for speed in speeds]}
    tables = {table: [row[key] for row in record.table(table)] for table in ("train", "held_out") for key in ("loss",)}
    return {table: values for table, values in tables.items() if values}


def main() -> None:
    """Run what is left for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--try", action="store_true", dest="small", help="a few cells, on the CPU too")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cell")
    options = parser.parse_args()
    if options.cell:
        sys.stdout.write(json.dumps(run(Cell(**json.loads(options.cell)))) + "\n")
        return
    if not (options.small or torch.cuda.is_available()):
        parser.exit(2, "no CUDA device is here: pass --try for a few cells on the CPU\n")
    record = Record(
        question="Do commands and calls end on a GPU where they end on the CPU?", settings={}, seed=0,
        environment=environment(), units={},
    )  # fmt: skip
    say(
        fill(
            resumed(record, options.out), options.out, "agreement", list(cells(small=options.small)),
            lambda cell, seconds: child("agreement", cell, seconds=seconds), minutes=options.minutes,
            limit=lambda _: LIMIT, beside=lambda _: BESIDE, sort=lambda cell: cell.what,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
