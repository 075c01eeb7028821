"""How many client updates a second does one GPU make, with clients stacked, one after another, and in pfl-research?

Run ``python -m benchmarks.gpu.federated`` on a machine with a CUDA device until it says that nothing is left; a call
ends within eight minutes and the next goes on. Every cell has a process of its own and four minutes; one that fails or
runs past them is a row that says why, and the next goes on. A cell is an arm, a net and a number of clients a round:

    stacked      all clients of a round side by side, as ``engine="batched"``
    loop         one client after another
    vmap         ``torch.func.vmap`` of the same model; it knows no batch norm
    pfl          pfl-research 0.6.0, with the interpreter that SPARING_PFL names
    host rows    as "stacked", with the rows in host memory: each batch moves when it is used
    simulate     whole runs by ``simulate`` of two rounds in float64, rows in host memory, of every kind of method,
                 server step and engine, two processes on the visible devices among them; "error" is the largest
                 difference from the same run on the CPU, over the largest weight, and "worst" names whose

The nets: ResNet-20 with batch norm, the same with group norm, and a convolutional net of two layers. Images are drawn,
3 × 32 × 32 as in CIFAR-10, and lie on the device in the first four; clients hold 64 to 160 rows, so batches are ragged.
pfl-research leaves batch norm's statistics out of its mean, so it trains the nets without. Rounds are whole, from the
end of one to the end of the next: drawing, training, mean; the first two are not counted. Rows: client updates a second
of each counted round (median, least, most), bytes that the allocator held, and, for stacked clients, the largest
difference of the model from the loop's after one round in float32 over its largest entry.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.federated import rivals
from benchmarks.gpu import cells as shared
from benchmarks.gpu.cells import child, resumed, say
from sparing.federated import MOON, SCAFFOLD, Client, FedAvg, FedDyn, FedSign, Private, Schedule, simulate
from sparing.federated.client.train import buffers_of, client_setup
from sparing.federated.engines import batched
from sparing.federated.engines.interface import Loop
from sparing.federated.methods.ditto import Ditto
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.interface import Sent, Vector
from sparing.federated.methods.secure import SecureSum
from sparing.federated.metrics import Accuracy
from sparing.federated.packing import detached_copy
from sparing.federated.server.defences import Bulyan, GeometricMedian
from sparing.federated.server.optimizers import FedAdam
from sparing.federated.server.robust import Median
from sparing.federated.settings import sample_clients
from sparing.report import Record, environment
from sparing.seeds import stream

RESULT = Path(__file__).parents[1] / "results" / "gpu_federated.jsonl"
MINUTES, CELL_MINUTES = 8.0, 4.0  # of a call, and of a cell
ROUNDS, WARM = 8, 2  # of a cell, and how many of them are not counted
CLIENTS, EPOCHS, BATCH, RATE = 200, 1, 32, 0.05
FEWEST, MOST = 64, 160  # rows of a client
PFL = "SPARING_PFL"

ARMS = ("simulate", "stacked", "host rows", "loop", "vmap", "pfl")
CHECKED = "CNN, 32 × 32"  # the net of "simulate"
NETS, TRY = ("ResNet-20", "ResNet-20, GN", "CNN, 32 × 32"), ("ResNet, narrow", "CNN, 32 × 32")
NORMED = ("ResNet-20", "ResNet, narrow")  # which have batch norm
COHORTS, TRY_COHORTS = (10, 50, 100), (3,)
METHODS = {
    "FedAvg": FedAvg(), "MOON": MOON(), "SCAFFOLD": SCAFFOLD(), "FedDyn": FedDyn(), "FedSign": FedSign(),
    "FedNova": FedNova(), "Ditto": Ditto(), "median": FedAvg(combine=Median()), "Bulyan": FedAvg(combine=Bulyan(0)),
    "geometric median": FedAvg(combine=GeometricMedian()), "FedAdam": FedAvg(server=FedAdam()),
    "noise": Private(FedAvg(), noise=0.5, clip=1.0, per_round=6), "masked sum": SecureSum(FedAvg()),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row."""

    arm: str  # of ARMS
    net: str  # of NETS
    cohort: int  # clients of a round (count)


def cells(*, small: bool) -> Iterator[Cell]:
    """Every cell, small rounds first; arms of one net and one round stand together."""
    for cohort, net, arm in itertools.product(TRY_COHORTS if small else COHORTS, TRY if small else NETS, ARMS):
        once = arm == "simulate" and (net != CHECKED or cohort != (TRY_COHORTS if small else COHORTS)[0])
        if not (once or (arm in ("vmap", "pfl") and net in NORMED)):
            yield Cell(arm=arm, net=net, cohort=cohort)


def clients_on(device: torch.device, *, small: bool) -> list[Client]:
    """Drawn images and classes, of unequal number."""
    source = stream(0, "gpu federated")
    found = []
    for rows in torch.randint(FEWEST, MOST + 1, (6 if small else CLIENTS,), generator=source).tolist():
        count = rows // 16 if small else rows
        images, classes = torch.randn(count, 3, 32, 32, generator=source), torch.randint(10, (count,), generator=source)
        found.append(Client(images.to(device), classes.to(device)))
    return found


def run(cell: Cell, *, small: bool) -> dict[str, Any]:
    """Measure one cell, in a process of its own."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if cell.arm == "simulate":
        return agreement(cell.net, device, small=small)
    clients = clients_on(torch.device("cpu") if cell.arm == "host rows" else device, small=small)
    if cell.arm == "pfl":
        return pfl(cell, clients, device)
    if cell.arm == "vmap":
        batched.why_not_layered = lambda *_: "vmap was asked for"
    made = train(cell, clients, device, ROUNDS)[1]
    found: dict[str, Any] = rates([after - before for before, after in pairwise(made[WARM - 1 :])], cell.cohort)
    found["allocated"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    if cell.arm in ("stacked", "host rows"):
        one, other = (train(replace(cell, arm=arm), clients, device, 1)[0] for arm in ("loop", cell.arm))
        gap = max(float((other[name] - value).abs().max()) for name, value in one.items())
        found["error"] = gap / max(float(value.abs().max()) for value in one.values())
    return found


def train(cell: Cell, clients: list[Client], device: torch.device, rounds: int) -> tuple[Vector, list[float]]:
    """The mean model after some rounds, and when each of them ended.

    The engine trains a round's clients; drawing them and the mean are done here, on the device.
    """
    wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    schedule = Schedule(
        rounds=rounds, participation=cell.cohort / len(clients), local_epochs=EPOCHS, batch_size=BATCH, lr=RATE,
        weight_decay=1e-4,
    )  # fmt: skip
    setup = client_setup(rivals.net(cell.net).to(device), FedAvg(), schedule)
    engine = (Loop if cell.arm == "loop" else batched.Batched)(setup, clients)
    sent = Sent(detached_copy(setup.params), {}, detached_copy(buffers_of(setup.model)))
    stamps = []
    for number in range(rounds):
        ids = sample_clients(schedule, len(clients), number, 0)
        results, faults = engine.train_clients(number, ids, sent, {client: {} for client in ids}, {})
        if faults:
            raise RuntimeError(f"clients were left out: {faults[0]}")
        params, buffers = (
            {name: torch.stack([getattr(one.update, part)[name] for one in results]) for name in getattr(sent, part)}
            for part in ("params", "buffers")
        )
        means = {name: value.mean(0) for name, value in params.items()}
        # of counters the largest
        kept = {name: value.mean(0) if value.is_floating_point() else value.amax(0) for name, value in buffers.items()}
        sent = Sent(means, {}, kept)
        wait()
        stamps.append(time.perf_counter())
    return sent.params, stamps


def agreement(net: str, device: torch.device, *, small: bool) -> dict[str, Any]:
    """The largest difference of whole runs on a device from those on the CPU, and whose it is."""
    clients = [Client(one.inputs.double(), one.targets) for one in clients_on(torch.device("cpu"), small=True)]
    # of the processes, by where the model is
    devices = {"cpu": ["cpu"], "cuda": [f"cuda:{at}" for at in range(torch.cuda.device_count())]}
    plan = Schedule(rounds=2, participation=1.0, local_epochs=1, batch_size=BATCH, lr=RATE, momentum=0.0)
    runs = {name: (method, "loop") for name, method in METHODS.items()}
    runs |= {"stacked": (FedAvg(), "batched"), "processes": (SCAFFOLD(), "workers")}
    errors = {}
    for name, (method, engine) in runs.items():
        shared = {"engine": engine, "evaluate": Accuracy(clients[0].inputs, clients[0].targets)}
        host, there = (
            simulate(partial(double_net, net, where), clients, method, plan, **shared,
                     **({"workers": 2, "devices": devices[where]} if engine == "workers" else {}))
            for where in ("cpu", device.type)
        )  # fmt: skip
        gap = max(float((there.params[key].cpu() - value).abs().max()) for key, value in host.params.items())
        errors[name] = gap / max(float(value.abs().max()) for value in host.params.values())
    return {"error": max(errors.values()), "worst": max(errors, key=errors.__getitem__), "runs": len(errors)}


def double_net(name: str, device: str) -> nn.Module:
    """A net in float64, of the same first weights on every device."""
    return rivals.net(name).double().to(device)


def rates(seconds: list[float], cohort: int) -> dict[str, float]:
    """Client updates a second of the rounds that count."""
    found = [cohort / one for one in seconds]
    return {"per_second": statistics.median(found), "least": min(found), "most": max(found)}


def pfl(cell: Cell, clients: list[Client], device: torch.device) -> dict[str, Any]:
    """The same rounds in pfl-research, by its own interpreter."""
    if not (python := os.environ.get(PFL)):
        return {"why": f"{PFL} names no interpreter"}
    asked = asdict(cell) | {"device": device.type, "clients": len(clients), "rounds": ROUNDS, "warm": WARM,
                            "epochs": EPOCHS, "batch": BATCH, "rate": RATE}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        rivals.write_rows(Path(name), cell.net, [(one.inputs.cpu(), one.targets.cpu()) for one in clients])
        command = [python, "-m", "benchmarks.gpu.federated_pfl", json.dumps(asked)]
        environment = os.environ | {rivals.FOLDER: name}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {"why": (done.stderr.strip().splitlines() or ["no word"])[-1][:200]}
    return rates(json.loads(done.stdout.splitlines()[-1]), cell.cohort)


def fill(record: Record, out: Path, *, small: bool, minutes: float, cell_minutes: float) -> int:
    """Measure what is left; gains are made anew after every cell. Returns how many cells are left."""

    def measure(cell: Cell, seconds: float) -> dict[str, Any]:
        return child("federated", cell, seconds=seconds, options=["--try"] * small)

    def compare() -> None:
        record.rows = [row for row in record.rows if row["table"] != "gains"]
        for gain in gains(record.table("federated")):
            record.add("gains", **gain)

    return shared.fill(
        record, out, "federated", list(cells(small=small)), measure, minutes=minutes, limit=lambda _: 60 * cell_minutes,
        after=compare, sort=lambda cell: cell.arm,
    )  # fmt: skip


def gains(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Updates a second of stacked clients over those of every other arm, by net and round."""
    stacked = {
        (row["net"], row["cohort"]): row["per_second"] for row in rows if row["arm"] == "stacked" and "why" not in row
    }
    for row in rows:
        ours = stacked.get((row["net"], row["cohort"]))
        if ours is not None and row["arm"] != "stacked" and "per_second" in row:
            yield {"net": row["net"], "cohort": row["cohort"], "against": row["arm"], "times": ours / row["per_second"]}


def main() -> None:
    """Run what is left for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--cell-minutes", type=float, default=CELL_MINUTES)
    parser.add_argument("--try", action="store_true", dest="small", help="tiny nets and few rows, on the CPU too")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cell")
    options = parser.parse_args()
    if options.cell:
        sys.stdout.write(json.dumps(run(Cell(**json.loads(options.cell)), small=options.small)) + "\n")
        return
    if not (options.small or torch.cuda.is_available()):
        parser.exit(2, "no CUDA device is here: pass --try for tiny shapes on the CPU\n")
    record = Record(
        question="How many client updates a second does a GPU make, with clients stacked and one after another?",
        settings={"rounds": ROUNDS, "warm": WARM, "clients": CLIENTS, "epochs": EPOCHS, "batch": BATCH}, seed=0,
        environment=environment(), units={"per_second": "1/s", "least": "1/s", "most": "1/s", "allocated": "B"},
    )  # fmt: skip
    record, limits = resumed(record, options.out), {"minutes": options.minutes, "cell_minutes": options.cell_minutes}
    say(fill(record, options.out, small=options.small, **limits))


if __name__ == "__main__":
    main()
