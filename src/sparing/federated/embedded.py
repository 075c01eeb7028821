"""Federated training in one place: a server and its clients, simulated on this machine.

Engines differ in speed, not in what they compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.errors import require
from sparing.federated.checkpoint import RunState, describe_data, describe_run, read, require_file, write
from sparing.federated.client.population import at_hand, sizes_of
from sparing.federated.client.train import Client, ClientResult, Loss, buffers_of, load_, require_tensors
from sparing.federated.engines.choose import EngineName, engine_of
from sparing.federated.engines.interface import Engine, RoundResults, crash_fault
from sparing.federated.engines.workers import Workers
from sparing.federated.methods.feddyn import with_rows
from sparing.federated.methods.interface import Method, Sent, State, Update, Vector
from sparing.federated.metrics import Evaluate, bytes_of, evaluation_columns, param_kinds, round_row
from sparing.federated.packing import detached_copy
from sparing.federated.placement import HOST, placed
from sparing.federated.server.closing import Delays, arrivals, ranks
from sparing.federated.server.collusion import Collusion
from sparing.federated.server.faults import Fault, Guard, report_faults
from sparing.federated.server.round import RoundServer, round_server
from sparing.federated.server.trust import all_sizes
from sparing.federated.settings import Schedule, rate_at
from sparing.federated.state_log import LOCAL_BN, STATE, ClientTrees, StateLog, Tree
from sparing.report.progress import Progress

Tamper = Callable[[Update, Vector], Update]
"""Update and the global model it started from -> what the server receives; may raise."""

_ON_SERVER = ("params", "buffers", "server", "extras")  # what of a run's state lies where the model does


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a simulation leaves."""

    record: list[dict[str, Any]]
    """One row for each round: ``round`` (rounds done), ``lr``, ``answered`` and ``left_out`` (clients), ``train_loss``,
    ``bytes_up``, ``bytes_down``, ``steps``, ``seconds`` and ``clients_per_second`` (of training and averaging, without
    measurements); where one is due, the columns of ``metrics.round_row`` and ``metrics.evaluation_columns`` too."""

    params: Vector
    buffers: Vector
    state: RunState  # all that a next round would start from
    engine: str  # the one that was used


def simulate(
    make_model: Callable[[], nn.Module],
    clients: Sequence[Client],
    method: Method,
    schedule: Schedule,
    *,
    evaluate: Evaluate | None = None,
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    engine: EngineName = "auto",
    workers: int | None = None,
    devices: Sequence[str | torch.device] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int = 10,
    resume: bool = False,
    label: str = "",
    every: int = 1,
    members: bool = True,
    proxy: Tensor | None = None,
    mixture: bool = False,
    guard: Guard | None = None,
    tamper: Tamper | Collusion | None = None,
    root: Client | None = None,
    delays: Delays | None = None,
    patience: float = 60.0,
) -> Run:
    """Train a model over clients.

    All methods see the same initial model, the same clients in the same rounds and the same order of rows, by ``seed``.
    An interrupted run saves its state; ``resume=True`` continues to the same bits.

    Where ``make_model`` puts the model, clients train and the server steps. Rows may lie in host memory: each batch
    moves when it is used, at the price of a copy; rows on the device already are not copied. What clients keep between
    rounds goes to host memory.

    Args:
        make_model: Makes the model; called under its own seed.
        clients: The rows of each client; a ``client.population.Population`` makes them when they are drawn.
        method: A value such as ``FedAvg()``, ``FedSign(gamma=0.01)`` …
        schedule: Rounds, participation, local training.
        evaluate: Measures a model on held-out data, such as ``Accuracy(inputs, targets)``.
        loss: Mean loss of a batch.
        seed: Seed of all random draws.
        engine: How clients are trained; ``"auto"`` stacks small nets of known layers (convolutional ones unless
            ``workers`` is given), gives other convolutional networks to processes where there are several cores and the
            model is on the CPU, and loops otherwise.
        workers: Processes; by default one for each core.
        devices: Of the processes, where there are any, such as ``("cuda:0", "cuda:1")``: process k takes device
            k mod n. None: where ``make_model`` puts the model.
        checkpoint: File for the state of the run; the clients' own state is appended to a second file next to it.
        checkpoint_every: Rounds between two writes.
        resume: Whether to continue from that file, if it exists.
        label: Name of the progress bar, and of lines on stderr that say which clients are excluded; without a label
            neither is shown.
        every: Rounds between measurements, of the weights too; the last round has one.
        members: Whether clients' models are evaluated before averaging.
        proxy: The server's own inputs, for ``batch_norm="recalibrate"``.
        mixture: Whether running variances are those of the mixture, E[var] + Var[mean].
        guard: Which updates are excluded; ``Guard()`` by default.
        tamper: Changes updates before the server receives them, such as ``Sabotage(kind="flip", share=0.2)``
            or ``Collusion(kind="alie", share=0.2)``.
        root: Clean rows that the server holds, for ``combine=FLTrust()``.
        delays: Seconds until each client's update reaches the server, by client and round; the delays are simulated.
            The rows then have ``waited``, the seconds that the round took, and ``absent``, the clients that no round
            waits for until they answer in time again. None: all answer at once.
        patience: Seconds that a round waits for an answer, where there are delays.

    Returns:
        The record and the model.

    Raises:
        UserError: If settings, model, method and engine do not fit together.
        RunError: If a round has too few clients left, or the server's step overflows.
    """
    _check_clients(clients)
    require(every >= 1, "every", every, "it is a number of rounds", "pass every >= 1")
    require(checkpoint_every >= 1, "checkpoint_every", checkpoint_every, "it is a number of rounds", "pass 1 or more")
    require(patience > 0, "patience", patience, "nobody could answer", "pass patience > 0 (seconds)")
    require_file(resume, checkpoint)
    server = round_server(
        make_model, method, schedule, len(clients), seed=seed, loss=loss, guard=guard, proxy=proxy, mixture=mixture,
        root=root,
    )  # fmt: skip
    with closing(engine_of(engine, server.setup, clients, make_model, workers, devices)) as chosen:
        simulation = _Simulation(server, clients, chosen, tamper, evaluate, every, members, delays, patience)
        return simulation.run(None if checkpoint is None else Path(checkpoint), checkpoint_every, resume, label)


class _Simulation:
    """A server, its clients, and what happens to them round after round."""

    def __init__(
        self, server: RoundServer, clients: Sequence[Client], engine: Engine, tamper: Tamper | Collusion | None,
        evaluate: Evaluate | None, every: int, members: bool, delays: Delays | None, patience: float,
    ) -> None:  # fmt: skip
        self._server, self._clients, self._engine, self._tamper = server, clients, engine, tamper
        self._setup, self._measure, self._every, self._members = server.setup, evaluate, every, members
        self._delays, self._patience, self._mean_rows = delays, patience, fmean(sizes_of(clients))
        self._kinds = param_kinds(server.setup.model)
        # Copies: every client's round overwrites the model.
        self._initial = detached_copy(server.setup.params)
        self._buffers = detached_copy(buffers_of(server.setup.model))

    def run(self, file: Path | None, write_every: int, resume: bool, label: str) -> Run:
        """Do all rounds that are left."""
        method, schedule, seed = self._setup.method, self._setup.schedule, self._setup.seed
        sizes = all_sizes(sizes_of(self._clients), self._server.root)
        which = describe_run(schedule, method, seed, sizes, self._initial)
        if file is not None:
            which |= describe_data(self._clients, self._setup.loss, self._server.mixture)
        # Other engines have the same bits as each other; other kinds of devices do not.
        which["engine"] = "batched" if self._engine.name == "batched" else "one client at a time"
        kinds = self._engine.kinds if isinstance(self._engine, Workers) else {self._setup.device.type}
        which["engine"] += "" if kinds == {HOST.type} else f" on {' and '.join(sorted(kinds))}"
        run_state = RunState(params=self._initial, buffers=self._buffers, server=method.server_state(self._initial))
        log = None
        if resume and file is not None and file.exists():
            run_state, log = read(file, which, len(self._clients), most=schedule.rounds)
            tensors: dict[str, Any] = {
                part: placed(getattr(run_state, part), self._setup.device) for part in _ON_SERVER
            }
            run_state = replace(run_state, **tensors)
        if log is None and file is not None:
            log = StateLog(file, len(self._clients))
        written = run_state.rounds
        bar = Progress(label, total=schedule.rounds, unit="round", resume_at=run_state.rounds) if label else None
        reported: set[tuple[str, str]] = set()
        try:
            with bar or nullcontext():
                while run_state.rounds < schedule.rounds:
                    run_state = self._round(run_state)
                    row = run_state.rows[-1]
                    if bar is not None:
                        report_faults(row, reported, label)
                        name = "accuracy" if "accuracy" in row else "train_loss"
                        bar.advance(1, **{name: row[name]})
                    if file is not None and run_state.rounds - written >= write_every:
                        run_state = write(run_state, file, which, log)
                        written = run_state.rounds
        finally:
            # Also when interrupted: ``run_state`` changes only after a whole round, so the last whole round is saved.
            if file is not None and (run_state.rounds > written or not file.exists()):
                run_state = write(run_state, file, which, log)
        return Run(run_state.rows, run_state.params, run_state.buffers, run_state, self._engine.name)

    def _round(self, at: RunState) -> RunState:
        """Do one round; nothing of ``at`` changes."""
        start = time.perf_counter()
        ids = self._server.draw(at.rounds)
        sent = Sent(at.params, at.extras, at.buffers)
        trained, faults, waits = self._trained(at, ids, sent)
        weights = {result.update.client: result.update.weight for result in trained}  # as the engine made them
        received, more = self._tampered(trained, sent.params, sent.buffers)
        results, faults = self._server.accept(received, sent, at.rounds, weights, [*faults, *more])
        summed = self._server.sum_masked(ids, results, sent, at.rounds)
        if summed is not None:
            results = [result for result in results if result.update.client in summed.survivors]
            faults = sorted([*faults, *summed.faults], key=lambda fault: fault.client)
        updates = [result.update for result in results]
        counted = updates if summed is None else [summed.update]
        after, server_state = self._server.step(sent, counted, at.server, at.rounds)
        seconds = time.perf_counter() - start
        row = {
            "round": at.rounds + 1,
            "lr": rate_at(self._setup.schedule, at.rounds),
            "answered": len(results),
            "left_out": "; ".join(map(str, faults)),
            "train_loss": fmean(result.loss for result in results) if results else math.nan,
            **waits,
            **self._measured(at, after, updates),
            "bytes_up": summed.bytes_up if summed else sum(bytes_of(u.params, u.buffers, u.extras) for u in updates),
            # To all that were drawn: who fails does so after the model was sent.
            "bytes_down": len(ids) * bytes_of(sent.params, sent.buffers, sent.extras)
            + (summed.bytes_down if summed else 0),
            "steps": sum(result.steps for result in results),
            "seconds": seconds,
            "clients_per_second": len(ids) / seconds,
        }
        return RunState(
            rounds=at.rounds + 1, params=after.params, buffers=after.buffers, server=server_state, extras=after.extras,
            **_kept(at, results), rows=[*at.rows, row],
        )  # fmt: skip

    def _trained(
        self, at: RunState, ids: Sequence[int], sent: Sent
    ) -> tuple[list[ClientResult], list[Fault], dict[str, Any]]:
        """Train clients in the order in which they answer until the round closes; what it waited for, if it did."""
        before = [int(client) for client in str(at.rows[-1].get("absent", "")).split()] if at.rows else []
        waiting = self._server.opened(ids, before)
        times = {client: 0.0 if self._delays is None else float(self._delays(client, at.rounds)) for client in ids}
        wrong = [client for client in ids if not times[client] >= 0]
        require(
            not wrong,
            "delays",
            f"{times[wrong[0]] if wrong else 0} s",
            "nobody answers before it is asked",
            "pass seconds >= 0",
        )
        order, end = arrivals(times, before, self._patience, ranks(ids, at.rounds, self._setup.seed))
        # A state is made at a client's first round from the initial model, not from what is sent in that round.
        states = {client: at.clients[client] if client in at.clients else self._fresh(client) for client in ids}
        results: list[ClientResult] = []
        faults: list[Fault] = []
        # As many as are missing train together; who fails makes room for the next.
        while order and not waiting.enough:
            some, order = order[: waiting.needed - waiting.updates], order[waiting.needed - waiting.updates :]
            trained, failed = self._engine.train_clients(at.rounds, sorted(some), sent, states, at.local_bn)
            results, faults = [*results, *trained], [*faults, *failed]
            for client in some:
                waiting.take(client, update=all(fault.client != client for fault in failed))
        if self._delays is None and not self._setup.schedule.spare:
            return results, faults, {}
        results.sort(key=lambda result: result.update.client)
        waited = max((times[client] for client in waiting.answered), default=0.0) if waiting.enough else end
        for client in set(ids) - waiting.answered - set(waiting.unneeded):
            still = "not waited for, since it was absent before" if client in before else f"no answer in {end:g} s"
            faults.append(Fault(client, "absent", still))
        absent = " ".join(map(str, sorted(waiting.absent_after)))
        return results, faults, {"asked": len(ids), "waited": waited, "absent": absent}

    def _fresh(self, client: int) -> State:
        """Return the state of a client that has never trained."""
        fresh = self._setup.method.client_state(self._initial)
        return with_rows(fresh, lambda: len(self._clients[client]) / self._mean_rows)

    def _tampered(self, results: Sequence[ClientResult], params: Vector, buffers: Vector) -> RoundResults:
        """What reaches the server, after ``tamper``."""
        if self._tamper is None:
            return list(results), []
        if isinstance(self._tamper, Collusion):
            sends = self._tamper.attack([result.update for result in results], params, buffers)
            return [replace(result, update=update) for result, update in zip(results, sends, strict=True)], []
        received: list[ClientResult] = []
        faults: list[Fault] = []
        for result in results:
            client = result.update.client
            try:
                update = self._tamper(result.update, params)
                of_client = isinstance(update, Update) and update.client == client
                got, why = type(update).__name__, "it is not that of the client"
                require(of_client, "update", got, why, "send Update(client, ...)")
                received.append(replace(result, update=update))
            except Exception as error:  # noqa: BLE001  # an attack may be anything
                faults.append(crash_fault(client, error))
        return received, faults

    def _measured(self, at: RunState, after: Sent, updates: Sequence[Update]) -> Mapping[str, float]:
        """Measure the weights, the global model, and the clients' models before they were averaged, where it is due."""
        number, evaluate, model = at.rounds + 1, self._measure, self._setup.model
        if number % self._every and number != self._setup.schedule.rounds:
            return {}
        row = round_row(at.params, after.params, [update.params for update in updates], self._kinds)
        if evaluate is None:
            return row
        members = []
        for update in updates if self._members else ():
            load_(model, {**at.params, **update.params}, {**at.buffers, **update.buffers})
            members.append(dict(evaluate(model)))
        load_(model, after.params, after.buffers)
        return row | evaluation_columns(dict(evaluate(model)), members)


def _kept(at: RunState, results: Sequence[ClientResult]) -> dict[str, Any]:
    """What clients keep after a round: the method's state, and batch norm of their own."""
    states = {result.update.client: result.state for result in results}
    own = {result.update.client: result.local_bn for result in results if result.local_bn}
    return {"clients": _changed(at.clients, states), "local_bn": _changed(at.local_bn, own, LOCAL_BN)}


def _changed(trees: Mapping[int, Tree], new: Mapping[int, Tree], kind: int = STATE) -> ClientTrees[Tree]:
    """Clients' trees with some new ones."""
    return (trees if isinstance(trees, ClientTrees) else ClientTrees(trees, kind=kind)).changed(new)


def _check_clients(clients: Sequence[Client]) -> None:
    require(len(clients) > 0, "clients", "none", "somebody must train", "pass at least one Client")
    for at, client in enumerate(at_hand(clients)):
        require_tensors(client, f"client {at}")
        same = len(client.inputs) == len(client.targets) > 0
        got = f"{len(client.inputs)} inputs and {len(client.targets)} targets"
        require(same, f"client {at}", got, "each row needs both, and a client needs rows", "split the data anew")
