"""Client updates per second: this library's engines, Flower in one process and with Ray, and pfl-research.

All train the same nets on the same rows for the same local steps, in turns: an arm makes a few rounds while the others
wait. A round is timed from the end of one to the end of the next on all sides, with all that an arm does in it:
drawing, training, averaging, and what it measures and records: ours measures the weights in every fourth round, as the
study does, and in every round in an arm of its own. Interpreters with flwr[simulation] 1.41.0 and with pfl
0.6.0 and torch are named by SPARING_FLOWER and SPARING_PFL; where one is not named or does not start, its row says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.federated import rivals
from benchmarks.federated.cases import rows_of
from benchmarks.federated.store import Store
from sparing.federated import dirichlet
from sparing.seeds import stream

TURNS = 7
DATA = {"MLP": ("mnist-1d", None), "CNN": ("fashion-mnist", 6000), "ResNet": ("drawn", 6000)}
"""Net -> data set, and rows of all clients together; those drawn are normal, of the shape of CIFAR-10."""
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Arm:
    """A process that is asked for rounds."""

    module: str
    asked: tuple[str, ...] = ()
    interpreter: str | None = None
    """Environment variable that names it; None is this one."""
    nets: tuple[str, ...] = ("MLP", "CNN", "ResNet")


ARMS = {
    "batched": Arm("rival_ours", ("batched",)),
    "batched, measured in every round": Arm("rival_ours", ("batched", "1")),
    "vmap": Arm("rival_ours", ("vmap",), nets=("MLP", "CNN")),
    "loop": Arm("rival_ours", ("loop",)),
    "workers": Arm("rival_ours", ("workers",)),
    "Flower, one process": Arm("rival_flower", ("grid",), "SPARING_FLOWER"),
    "Flower, Ray": Arm("rival_flower", ("ray",), "SPARING_FLOWER"),
    "pfl-research": Arm("rival_pfl", (), "SPARING_PFL", nets=("MLP", "CNN")),
}
"""vmap knows no batch norm, and pfl-research keeps its statistics apart, so neither trains the residual net."""


class Process:
    """One arm's process, which waits."""

    def __init__(self, arm: Arm, folder: Path) -> None:
        """Start it.

        Raises:
            OSError: If there is no such interpreter.
        """
        python = sys.executable if arm.interpreter is None else os.environ.get(arm.interpreter, "")
        if not python:
            raise OSError(f"{arm.interpreter} names no interpreter")
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment = os.environ | {rivals.FOLDER: str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._log = (folder / f"{arm.module}.log").open("a")
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.federated.{arm.module}", *arm.asked], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment, cwd=folder,
        )  # fmt: skip
        self.about = self._read()

    def ask(self, net: str) -> list[float]:
        """Seconds by round."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{net}\n")
        self._process.stdin.flush()
        found: list[float] = self._read()
        return found

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = Path(self._log.name).read_text().strip().splitlines() or ["no word"]
            raise OSError(f"it ended: {last[-1][:120]}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._log.close()


def run(share: int, of: int) -> None:
    """One row for each net, with every turn; there is nothing to divide."""
    if share:
        return
    store = Store("speed")
    for net in DATA:
        store.once(net, lambda: measured(net))  # noqa: B023


def measured(net: str) -> dict[str, Any]:
    """All arms in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs, targets = _rows(*DATA[net])
        split = dirichlet(targets, rivals.CLIENTS, 0.5, rule="clients", seed=0, least=8)
        rivals.write_rows(folder, net, [(inputs[list(c)], targets[list(c)]) for c in split.clients])
        arms, missing = _started(net, folder)
        rates: dict[str, list[float]] = {arm: [] for arm in arms}
        try:
            for _ in range(TURNS):
                for arm, process in arms.items():
                    rates[arm].append(rivals.COHORT / fmean(process.ask(net)))
                    print(net, arm, rates[arm][-1], flush=True)
        finally:
            for process in arms.values():
                process.close()
        about = {arm: process.about for arm, process in arms.items()}
    return {"per_second": rates, "missing": missing, "about": about, "load": os.getloadavg()[0], "turns": TURNS}


def _rows(data: str, count: int | None) -> tuple[Tensor, Tensor]:
    if data == "drawn":
        assert count is not None
        source = stream(0, "federated", "speed")
        return torch.randn(count, 3, 32, 32, generator=source), torch.randint(10, (count,), generator=source)
    rows = rows_of(data, count, 100)
    return rows.inputs, rows.targets


def _started(net: str, folder: Path) -> tuple[dict[str, Process], dict[str, str]]:
    """The arms that answer a first time, which is not counted, and why the others do not."""
    arms: dict[str, Process] = {}
    missing: dict[str, str] = {}
    for name, arm in ARMS.items():
        if net not in arm.nets:
            continue
        try:
            arms[name] = Process(arm, folder)
            arms[name].ask(net)
        except OSError as error:
            missing[name] = str(error)
            arms.pop(name, None)
    return arms, missing
