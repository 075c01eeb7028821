"""Federated training in one place: a server and its clients, simulated on this machine.

run = simulate(make_model, clients, FedSign(gamma=0.01), Schedule(rounds=50), evaluate=Accuracy(x, y), seed=1)
run.record[-1]["accuracy"], run.params

Engines differ in speed, not in what they compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sparing.errors import UserError, require
from sparing.federated.batched import Batched, perceptron, refusal
from sparing.federated.buffers import mix, recalibrate
from sparing.federated.checkpoint import Standing, fingerprint, read, write
from sparing.federated.engines import Answers, Engine, Loop, crash
from sparing.federated.faults import Fault, Guard, beside_of, require_enough, require_finite, sift, tell
from sparing.federated.loop import Client, Loss, Visit, Workbench, buffers_of, load_, seeded_model, workbench
from sparing.federated.methods import Method, Sent, State, Update, Vector
from sparing.federated.metrics import Evaluate, bytes_of, judged, kinds_of, round_row
from sparing.federated.packing import detached
from sparing.federated.settings import Schedule, drawn, rate_at
from sparing.federated.workers import Workers, cores
from sparing.report.progress import Progress

__all__ = ["Client", "Run", "simulate"]

Kind = Literal["auto", "loop", "batched", "workers"]
"""``"batched"`` stacks the clients' parameters, ``"workers"`` starts processes, ``"loop"`` does neither."""

Tamper = Callable[[Update, Vector], Update]
"""Update and the global model it began with -> what the server receives; may raise."""

_STACKED_MOST = 1_000_000  # parameters: above, the loop's matrix products fill a core as well as stacked ones


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a simulation leaves."""

    record: list[dict[str, Any]]
    """One row for each round: ``round`` (rounds done), ``lr``, ``answered`` and ``left_out`` (clients), the columns of
    ``metrics.round_row`` and ``metrics.judged``, ``bytes_up``, ``bytes_down``, ``steps``, ``seconds`` and
    ``clients_per_second`` (of training and averaging, without evaluation)."""

    params: Vector
    buffers: Vector
    state: Standing  # all that a next round would start from
    engine: str  # the one that was used


@dataclass(frozen=True, slots=True)
class _Watch:
    evaluate: Evaluate | None
    every: int
    members: bool
    label: str


@dataclass(frozen=True, slots=True)
class _File:
    path: str | PathLike[str] | None
    every: int
    resume: bool


@dataclass(frozen=True, slots=True)
class _Server:
    guard: Guard
    tamper: Tamper | None
    proxy: Tensor | None
    mixture: bool


def simulate(
    make_model: Callable[[], nn.Module],
    clients: Sequence[Client],
    method: Method,
    schedule: Schedule,
    *,
    evaluate: Evaluate | None = None,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    engine: Kind = "auto",
    workers: int | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    label: str = "",
    every: int = 1,
    members: bool = True,
    proxy: Tensor | None = None,
    mixture: bool = False,
    guard: Guard | None = None,
    tamper: Tamper | None = None,
) -> Run:
    """Train a model over clients.

    All methods see the same initial model, the same clients in the same rounds and the same order of rows, by ``seed``.
    An interrupted run writes where it stands; ``resume=True`` goes on to the same bits.

    Args:
        make_model: Makes the model; called under a seed of its own.
        clients: The rows of each client.
        method: What is federated: ``FedAvg()``, ``FedSign(gamma=0.01)`` …
        schedule: Rounds, participation, local training.
        evaluate: Measures a model on held-out data, such as ``Accuracy(inputs, targets)``.
        loss: Mean loss of a batch.
        seed: Of everything drawn.
        engine: How clients are trained; ``"auto"`` stacks small perceptrons, gives convolutional networks to
            processes where there are several cores, and loops otherwise.
        workers: Processes; by default one for each core.
        checkpoint: File to write where the run stands.
        checkpoint_every: Rounds between two writes.
        resume: Whether to go on from that file, if it is there.
        label: Name of the progress bar, and of lines on stderr that say who is left out; without one there are none.
        every: Rounds between evaluations; the last round has one.
        members: Whether clients' models are evaluated before averaging.
        proxy: The server's own inputs, for ``batch_norm="recalibrate"``.
        mixture: Whether running variances are those of the mixture, E[var] + Var[mean].
        guard: Which updates are left out; ``Guard()`` by default.
        tamper: Changes updates on their way, such as ``Sabotage(kind="flip", share=0.2)``.

    Returns:
        The record and the model.

    Raises:
        UserError: If settings, model, method and engine do not fit together.
        RunError: If a round has too few clients left, or the server's step overflows.
    """
    named = isinstance(method, Method) and not isinstance(method, type)
    require(named, "method", repr(method), "a method is a value", "pass one such as FedAvg() or FedSign(gamma=0.01)")
    _check(clients, every, checkpoint_every, resume, checkpoint)
    bench = workbench(seeded_model(method, make_model, seed), method, schedule, seed=seed, loss=loss)
    _check_norm(bench, proxy)
    method.check(schedule)
    watch = _Watch(evaluate, every, members, label)
    server = _Server(guard or Guard(), tamper, proxy, mixture)
    chosen = _engine(engine, bench, clients, make_model, workers)
    try:
        return _Simulation(bench, clients, watch, server, chosen).run(_File(checkpoint, checkpoint_every, resume))
    finally:
        chosen.close()


class _Simulation:
    """A server, its clients, and where they stand."""

    def __init__(
        self, bench: Workbench, clients: Sequence[Client], watch: _Watch, server: _Server, engine: Engine
    ) -> None:
        self._bench, self._clients, self._watch, self._server, self._engine = bench, clients, watch, server, engine
        self._kinds = kinds_of(bench.model)
        self._initial = detached(bench.params)
        self._buffers = detached(buffers_of(bench.model))
        self._beside = beside_of(bench.method, self._initial, self._buffers)

    def run(self, file: _File) -> Run:
        """Do all rounds that are left."""
        method, schedule, seed = self._bench.method, self._bench.schedule, self._bench.seed
        which = fingerprint(schedule, method, seed, list(map(len, self._clients)), self._initial)
        standing = Standing(params=self._initial, buffers=self._buffers, server=method.server_state(self._initial))
        if file.resume and file.path is not None and Path(file.path).exists():
            standing = read(file.path, which)
        written = standing.rounds
        bar = _Bar(self._watch.label, schedule.rounds, standing.rounds)
        try:
            with bar:
                while standing.rounds < schedule.rounds:
                    standing = self._round(standing)
                    bar.show(standing.rows[-1])
                    if file.path is not None and standing.rounds - written >= file.every:
                        write(standing, file.path, which)
                        written = standing.rounds
        finally:  # also when interrupted: the last whole round is kept
            if file.path is not None and (standing.rounds > written or not Path(file.path).exists()):
                write(standing, file.path, which)
        return Run(standing.rows, standing.params, standing.buffers, standing, self._engine.name)

    def _round(self, at: Standing) -> Standing:
        """Do one round; nothing of ``at`` changes."""
        began = time.perf_counter()
        method, schedule = self._bench.method, self._bench.schedule
        ids = drawn(schedule, len(self._clients), at.rounds, self._bench.seed)
        sent = Sent(at.params, at.extras, at.buffers)
        states = {client: self._state(at, client) for client in ids}
        visits, faults = self._engine.visits(at.rounds, ids, sent, states, at.own)
        visits, more = self._received(visits, sent, at.rounds + 1 if schedule.batch_norm == "local" else 1)
        faults = sorted([*faults, *more], key=lambda fault: fault.client)
        require_enough(len(visits), at.rounds, faults, self._server.guard)
        updates = [visit.update for visit in visits]
        params, server, extras = method.aggregate(at.params, updates, at.server, len(self._clients))
        require_finite(params, at.rounds)
        buffers = self._merged(params, at.buffers, updates)
        seconds = time.perf_counter() - began
        row = {
            "round": at.rounds + 1,
            "lr": rate_at(schedule, at.rounds),
            "answered": len(visits),
            "left_out": "; ".join(map(str, faults)),
            **round_row(at.params, params, [u.params for u in updates], [v.loss for v in visits], self._kinds),
            **self._judged(at, params, buffers, updates),
            "bytes_up": sum(bytes_of(u.params, u.buffers, u.extras) for u in updates),
            "bytes_down": len(ids) * bytes_of(sent.params, sent.buffers, sent.extras),
            "steps": sum(visit.steps for visit in visits),
            "seconds": seconds,
            "clients_per_second": len(ids) / seconds,
        }
        return Standing(
            rounds=at.rounds + 1,
            params=params,
            buffers=buffers,
            server=server,
            extras=extras,
            clients=at.clients | {visit.update.client: visit.state for visit in visits},
            own=at.own | {visit.update.client: visit.own for visit in visits if visit.own},
            rows=[*at.rows, row],
        )

    def _state(self, at: Standing, client: int) -> State:
        return at.clients[client] if client in at.clients else self._bench.method.client_state(self._initial)

    def _received(self, visits: Sequence[Visit], sent: Sent, rounds: int) -> Answers:
        """What reaches the server, and what of it can be averaged."""
        reached: list[Visit] = []
        faults: list[Fault] = []
        for visit in visits:
            client, tamper = visit.update.client, self._server.tamper
            try:
                update = visit.update if tamper is None else tamper(visit.update, sent.params)
                own = isinstance(update, Update) and update.client == client
                require(
                    own, "update", type(update).__name__, "it is not that of the client", "send Update(client, ...)"
                )
                reached.append(replace(visit, update=update))
            except Exception as error:  # noqa: BLE001  # an attack may be anything
                faults.append(crash(client, error))
        weights = {visit.update.client: visit.update.weight for visit in visits}  # as the engine made them
        sound, more = sift(
            reached, sent.params, sent.buffers, self._server.guard, partial=self._bench.schedule.blocks is not None,
            beside=self._beside, weights=weights, momentum=self._bench.schedule.momentum, rounds=rounds,
        )  # fmt: skip
        return sound, [*faults, *more]

    def _merged(self, params: Vector, before: Vector, updates: Sequence[Update]) -> Vector:
        """Buffers of the next global model."""
        buffers = self._bench.method.buffers(before, updates)
        if self._server.mixture:
            buffers = mix(buffers, updates)
        if self._server.proxy is not None and self._bench.schedule.batch_norm == "recalibrate":
            load_(self._bench.model, params, buffers)
            recalibrate(self._bench.model, self._server.proxy)
            buffers = detached(buffers_of(self._bench.model))
        return buffers

    def _judged(self, at: Standing, params: Vector, buffers: Vector, updates: Sequence[Update]) -> Mapping[str, float]:
        """Evaluate the global model, and the clients' before they were averaged."""
        number, evaluate, model = at.rounds + 1, self._watch.evaluate, self._bench.model
        if evaluate is None or (number % self._watch.every and number != self._bench.schedule.rounds):
            return {}
        members = []
        for update in updates if self._watch.members else ():
            load_(model, {**at.params, **update.params}, update.buffers)
            members.append(dict(evaluate(model)))
        load_(model, params, buffers)
        return judged(dict(evaluate(model)), members)


class _Bar:
    """The progress bar, if it has a name."""

    def __init__(self, label: str, rounds: int, done: int) -> None:
        self._bar = Progress(label, total=rounds, unit="round", resume_at=done) if label else None
        self._label = label
        self._told: set[tuple[str, str]] = set()

    def __enter__(self) -> None:
        if self._bar is not None:
            self._bar.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def show(self, row: Mapping[str, Any]) -> None:
        """Count a round, with its accuracy or else its training loss, and say who is left out."""
        if self._bar is not None:
            tell(row, self._told, self._label)
            name = "accuracy" if "accuracy" in row else "train_loss"
            self._bar.advance(1, **{name: row[name]})


def _engine(
    kind: Kind,
    bench: Workbench,
    clients: Sequence[Client],
    make_model: Callable[[], nn.Module],
    workers: int | None,
) -> Engine:
    """Choose and set up an engine."""
    known = ("auto", "loop", "batched", "workers")
    require(kind in known, "engine", repr(kind), "no such engine", f"pass one of {', '.join(known)}")
    count = cores() if workers is None else workers
    if kind == "batched" or (kind == "auto" and _stacks(bench, clients)):
        return Batched(bench, clients)
    if kind == "workers":
        return Workers(bench, clients, make_model, count)
    if kind == "auto" and count > 1 and any(isinstance(module, _ConvNd) for module in bench.model.modules()):
        try:
            return Workers(bench, clients, make_model, count)
        except UserError:  # a model made in a notebook cannot be sent; the loop needs no sending
            return Loop(bench, clients)
    return Loop(bench, clients)


def _stacks(bench: Workbench, clients: Sequence[Client]) -> bool:
    small = sum(p.numel() for p in bench.params.values()) <= _STACKED_MOST
    return small and perceptron(bench.model) and not refusal(bench, clients)


def _check(
    clients: Sequence[Client], every: int, checkpoint_every: int, resume: bool, checkpoint: object | None
) -> None:
    require(len(clients) > 0, "clients", "none", "somebody must train", "pass at least one Client")
    for at, client in enumerate(clients):
        rows = isinstance(client.inputs, Tensor) and isinstance(client.targets, Tensor)
        got = f"{type(client.inputs).__name__} and {type(client.targets).__name__}"
        require(
            rows, f"client {at}", got, "rows are tensors", "pass Client(torch.tensor(inputs), torch.tensor(targets))"
        )
        same = len(client.inputs) == len(client.targets) > 0
        got = f"{len(client.inputs)} inputs and {len(client.targets)} targets"
        require(same, f"client {at}", got, "each row needs both, and a client needs rows", "split the data anew")
    require(every >= 1, "every", every, "it is a number of rounds", "pass every >= 1")
    require(checkpoint_every >= 1, "checkpoint_every", checkpoint_every, "it is a number of rounds", "pass 1 or more")
    lost = resume and checkpoint is None
    require(not lost, "resume", True, "there is no file to go on from", "pass checkpoint=, the file of the run")


def _check_norm(bench: Workbench, proxy: Tensor | None) -> None:
    lacks = bool(bench.norms) and bench.schedule.batch_norm == "recalibrate" and proxy is None
    why = "the server needs rows of its own to estimate the statistics"
    require(not lacks, "batch_norm", '"recalibrate" without proxy', why, 'pass proxy=inputs, or batch_norm="average"')
