"""One method from its first round to its last, on either engine, and what its rounds left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparing.blocks import named_parameters
from sparing.federated import Client, simulate
from sparing.federated.client.train import Loss
from sparing.federated.methods.controls import tensor_norms
from sparing.federated.methods.interface import Method, Vector
from sparing.federated.metrics import Accuracy
from sparing.federated.placement import HOST, placed
from sparing.federated.server.faults import FAULT, report_faults
from sparing.federated.settings import Schedule
from sparing.jobs.federate.methods import delays_of, sabotage_of
from sparing.jobs.federate.settings import Settings
from sparing.report.progress import duration
from sparing.vectors import norm

if TYPE_CHECKING:
    from sparing.federated.flower.rounds import FlowerRound
    from sparing.jobs.federate.texts import NextTokens

OF_WEIGHTS: Final = ("ssr_", "flips_", "norm", "update_cosine")  # how columns begin that single parameters decide

NORM: Final = "norm of "  # before the name of a tensor, in the rows of the reference run that norm-matched needs


@dataclass(frozen=True, slots=True)
class Setup:
    """What all methods of a run share."""

    settings: Settings
    make_model: Callable[[], nn.Module]
    clients: list[Client]
    test: Accuracy | NextTokens
    proxy: Tensor | None
    root: Client | None = None  # the server's own rows, for FLTrust
    loss: Loss = cross_entropy
    device: torch.device = HOST  # of the model; rows stay in host memory

    @property
    def schedule(self) -> Schedule:
        """Rounds, participation, local training."""
        return self.settings.training()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a method's run."""

    rounds: list[dict[str, Any]]  # a row a round
    params: Vector  # the last global model, in host memory
    buffers: Vector
    engine: str


@dataclass(slots=True)
class _TimedEvaluation:
    """Measures models on test rows, and prints once how long a round takes."""

    test: Accuracy | NextTokens
    rounds: int
    every: int
    began: float = field(default_factory=time.perf_counter)
    reported: bool = False

    def __call__(self, model: nn.Module) -> dict[str, float]:
        # The first call comes after ``every`` rounds of training, so nothing but them is in this time.
        if not self.reported:
            self.reported, each = True, (time.perf_counter() - self.began) / self.every
            whole = duration(round(each * self.rounds))
            sys.stderr.write(f"  training: {duration(each)} a round, so about {whole} in all, evaluation apart\n")
        return self.test(model)


def run_embedded(label: str, method: Method, setup: Setup, checkpoint: Path) -> Outcome:
    """Run a method on the embedded engine; an interrupted run resumes from its checkpoint, to the same bits."""
    settings = setup.settings
    every = settings.evaluate_every or settings.rounds
    run = simulate(
        setup.make_model, setup.clients, method, setup.schedule,
        # A resumed run knows nothing of the rounds before, so it predicts no time.
        evaluate=_TimedEvaluation(setup.test, settings.rounds, every, reported=checkpoint.exists()),
        seed=settings.seed, checkpoint=checkpoint,
        checkpoint_every=settings.save_every or settings.rounds, resume=settings.resume, label=label, every=every,
        members=settings.members, proxy=setup.proxy, tamper=sabotage_of(settings), root=setup.root,
        delays=delays_of(settings), patience=settings.late.patience, loss=setup.loss, **engine_of(setup),
    )  # fmt: skip
    return Outcome(_told(run.record, settings), placed(run.params, HOST), placed(run.buffers, HOST), run.engine)


def engine_of(setup: Setup) -> dict[str, Any]:
    """How clients train, as ``simulate`` takes it."""
    workers = setup.settings.workers
    # A language model fills the cores by itself, one client at a time.
    if setup.settings.model is not None:
        return {"engine": "loop"}
    visible = [f"{setup.device.type}:{at}" for at in range(torch.accelerator.device_count())]
    return {"engine": "auto", "workers": workers, "devices": None if setup.device == HOST else visible}


def _told(rows: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """Rows of a record, of LoRA without signs, norms and angles of its factors, which mean nothing."""
    if settings.model is None or settings.trained == "full":
        return rows
    return [{name: row[name] for name in row if not name.startswith(OF_WEIGHTS)} for row in rows]


def norms_of(method: Method, setup: Setup, checkpoint: Path) -> list[dict[str, float]]:
    """Norms of all tensors after each round of a reference method, by name, to hold another method to them."""
    settings = setup.settings

    def named_norms(model: nn.Module) -> dict[str, float]:
        # As metrics of an evaluation: the one way to add numbers to the record of each round.
        return {f"{NORM}{name}": value for name, value in tensor_norms(named_parameters(model)).items()}

    run = simulate(
        setup.make_model, setup.clients, method, setup.schedule, evaluate=named_norms, seed=settings.seed,
        checkpoint=checkpoint, resume=settings.resume,
        checkpoint_every=settings.save_every or settings.rounds,
        label="norms of FedAvg", members=False, proxy=setup.proxy, tamper=sabotage_of(settings),
        root=setup.root, delays=delays_of(settings), patience=settings.late.patience, loss=setup.loss,
        **engine_of(setup),
    )  # fmt: skip
    return [{name.removeprefix(NORM): row[name] for name in row if name.startswith(NORM)} for row in run.record]


def faults_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Excluded clients by kind: updates, rounds and clients (counts).

    Example:
        >>> faults_of([{"left_out": "client 3: huge (4e+05 times the median update)"}, {"left_out": ""}])
        [{'kind': 'huge', 'updates': 1, 'rounds': 1, 'clients': 1}]
    """
    seen: dict[str, list[tuple[int, str]]] = {}
    for number, row in enumerate(rows):
        for client, kind in FAULT.findall(str(row["left_out"])):
            seen.setdefault(kind, []).append((number, client))
    return [
        {"kind": kind, "updates": len(found), "rounds": len({number for number, _ in found}),
         "clients": len({client for _, client in found})}
        for kind, found in seen.items()
    ]  # fmt: skip


def on_flower(label: str, method: Method, setup: Setup) -> Outcome:
    """Run a method on Flower's messages, ClientApp and strategy in this process: the bits of the plain loop."""
    from sparing.federated import flower
    from sparing.report import Progress

    settings, stamps = setup.settings, [time.perf_counter()]
    every = settings.evaluate_every or settings.rounds
    with Progress(label, total=settings.rounds, unit="round") as bar:

        def evaluate(model: nn.Module) -> dict[str, float]:
            done = len(stamps)
            found: dict[str, float] = setup.test(model) if done % every == 0 or done == settings.rounds else {}
            # Norm and seconds are columns of the embedded engine that Flower does not report.
            length = float(norm({name: value.detach() for name, value in model.named_parameters()}))
            bar.advance(1, **found)
            stamps.append(time.perf_counter())
            return {**found, "norm": length, "seconds": stamps[done] - stamps[done - 1]}

        run = flower.run_in_process(
            setup.make_model, setup.clients, method, setup.schedule,
            evaluate=evaluate, seed=settings.seed, proxy=setup.proxy, mods=[flower.sign_telemetry],
            root=setup.root, loss=setup.loss,
        )  # fmt: skip
    rows = [_flower_row(one, run.metrics[one.number], settings) for one in run.rounds]
    reported: set[tuple[str, str]] = set()
    for row in rows:
        report_faults(row, reported, label)
    params, buffers = placed(run.params, HOST), placed(run.buffers, HOST)
    return Outcome(_told(rows, settings), params, buffers, "Flower, in process")


def _flower_row(one: FlowerRound, metrics: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """A round as Flower reports it, in the columns of the embedded engine."""
    count, measured = len(one.received), ("accuracy", "loss", "norm", "seconds")
    return {
        "round": one.number, "answered": count, "left_out": "; ".join(map(str, one.faults)),
        "train_loss": metrics.get("train-loss"), "ssr_global": metrics.get("ssr"),
        **{name: metrics[name] for name in measured if name in metrics},
        "bytes_up": one.bytes_up, "bytes_down": one.bytes_down,
        # Flower averages what clients report; with equal weights the mean gives back the sum.
        "steps": round(metrics["steps"] * count) if settings.weighting == "uniform" and "steps" in metrics else None,
    }  # fmt: skip
