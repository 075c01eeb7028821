"""A federated method as a Flower strategy: the schedule of ``simulate``, its server step, and who is who."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.federated.buffers import mix, recalibrate
from sparing.federated.checkpoint import Standing, fingerprint, read, write
from sparing.federated.faults import Fault, Guard, beside_of, require_enough, require_finite, sift
from sparing.federated.flower_client import INITIAL
from sparing.federated.flower_people import People, absent, last_line
from sparing.federated.flower_records import ARRAYS, CONFIG, put_state, record_of, vector_of
from sparing.federated.flower_rounds import (
    FlowerRound,
    alike,
    bytes_in,
    check_counts,
    check_norms,
    known_steps,
    known_weights,
    round_of,
    row_of,
    rows_measured,
    steps_made,
    update_of,
)
from sparing.federated.loop import Visit, buffers_of, load_, seeded_model
from sparing.federated.methods import Method, Sent, State, Update, Vector
from sparing.federated.settings import Schedule, drawn


class MethodStrategy(FedAvg):  # type: ignore[misc] # Flower is no dependency: its types are not read
    """Flower's FedAvg with the server step of a method, the drawn schedule, and memory of who was counted."""

    def __init__(
        self,
        method: Method,
        schedule: Schedule,
        make_model: Callable[[], nn.Module],
        clients: int,
        *,
        seed: int = 0,
        patience: float = 60.0,
        guard: Guard | None = None,
        proxy: Tensor | None = None,
        mixture: bool = False,
        evaluation: float = 0.0,
        rows: Sequence[int] | None = None,
        nodes: Mapping[int, int] | None = None,
        checkpoint: str | PathLike[str] | None = None,
        resume: bool = False,
    ) -> None:
        """See ``strategy``."""
        by = "num-examples" if schedule.weights == "size" else "one"
        super().__init__(fraction_train=schedule.participation, fraction_evaluate=evaluation, weighted_by_key=by)
        check_counts(evaluation, clients, rows, resumes=resume, kept=checkpoint is not None)
        method.check(schedule)
        self.method, self.schedule, self.clients, self.seed, self.mixture = method, schedule, clients, seed, mixture
        self.patience, self.guard, self.proxy = patience, guard or Guard(), proxy
        self.model = seeded_model(method, make_model, seed)
        check_norms(schedule, self.model, proxy)
        params = {name: p for name, p in named_parameters(self.model).items() if p.requires_grad}
        self.params: Vector = {name: p.detach().clone() for name, p in params.items()}
        self.buffers: Vector = {name: value.clone() for name, value in buffers_of(self.model).items()}
        self.initial, self.state = dict(self.params), method.server_state(self.params)
        self.extras: State = {}
        self._beside = beside_of(method, self.params, self.buffers)
        self._weights, self._steps = known_weights(schedule, clients, rows), known_steps(schedule, self.model, rows)
        self._people = People(clients, patience, nodes)
        self._start()
        self._file = None if checkpoint is None else Path(checkpoint)
        self._run = fingerprint(schedule, method, seed, list(rows or [clients]), self.initial)
        self._tag = hashlib.sha256(json.dumps(self._run).encode()).hexdigest()
        if resume and self._file is not None and self._file.exists():
            self._take_up(read(self._file, self._run))

    def _start(self) -> None:
        """Before the first round."""
        self.rounds: list[FlowerRound] = []
        self._before = 0  # rounds that another ServerApp did
        self._accepted: dict[int, int] = {}  # client -> last round in which it was counted
        self._asked: dict[int, int] = {}  # node -> client, of the round under way
        self._drawn: tuple[int, ...] = ()
        self._bytes_down = 0

    @property
    def left(self) -> int:
        """Rounds of the schedule that are not done (count), for ``start``."""
        return max(self.schedule.rounds - len(self.rounds), 0)

    def initial_arrays(self) -> ArrayRecord:
        """Return the global model for ``start``, of a resumed run the last one, by the names of its state."""
        return record_of({**self.params, **self.buffers})

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, **more: Any) -> Result:
        """Run rounds as Flower does, numbered on from those of the run that was taken up."""
        before, judge = self._before, more.get("evaluate_fn")
        if judge is not None:
            more["evaluate_fn"] = lambda number, arrays: judge(number + before, arrays)
        result = super().start(grid, initial_arrays, num_rounds, **more)
        for what in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            numbered = getattr(result, what)
            setattr(result, what, {number + before: record for number, record in numbered.items()})
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients, find their nodes, and write to those that are online."""
        server_round += self._before
        template = {**self.params, **self.buffers}
        model = vector_of(arrays, template)
        self.params = {name: model[name] for name in self.params}
        self.buffers = {name: model[name] for name in self.buffers}
        self._drawn = drawn(self.schedule, self.clients, server_round - 1, self.seed)
        nodes = self._people.find(grid, self._drawn)
        require_enough(len(nodes), server_round - 1, absent(self._drawn, nodes), self.guard)
        self._asked = {node: client for client, node in nodes.items()}
        messages = [self._message(server_round, node, client, arrays, config) for client, node in nodes.items()]
        self._bytes_down = sum(bytes_in(message.content) for message in messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make the next global model of the updates that can be averaged, each client counted once."""
        number = self._before + server_round
        answers, faults = self._read(replies)
        steps = steps_made({client: content for client, (_, content) in answers.items()}, self._steps, self.guard)
        visits = [Visit(update, {}, steps=steps[client]) for client, (update, _) in answers.items()]
        sound, found = sift(
            visits, self.params, self.buffers, self.guard, partial=self.schedule.blocks is not None,
            beside=self._beside, weights=self._weights, momentum=self.schedule.momentum,
            rounds=number if self.schedule.batch_norm == "local" else 1,
        )  # fmt: skip
        faults += found
        told = {fault.client for fault in faults} | set(answers)
        faults += [Fault(client, "absent", "no answer") for client in self._drawn if client not in told]
        faults.sort(key=lambda fault: fault.client)
        require_enough(len(sound), number - 1, faults, self.guard)
        updates = sorted((visit.update for visit in sound), key=lambda update: update.client)
        received = tuple(update.client for update in updates)
        self._step(updates)
        require_finite(self.params, number - 1)
        self._accepted |= dict.fromkeys(received, number)
        up = sum(bytes_in(content) for _, content in answers.values())
        refused = self._people.refused
        self.rounds.append(
            FlowerRound(number, self._drawn, received, tuple(faults), self._bytes_down, up, refused=refused)
        )
        self._write()
        contents, weights = [answers[client][1] for client in received], [update.weight for update in updates]
        # Metrics may differ between clients if mods do: only what all have is averaged.
        metrics = self.train_metrics_aggr_fn(alike(contents, weights, self.weighted_by_key), self.weighted_by_key)
        return self.initial_arrays(), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the clients that measure the new model, and write to those that are online."""
        if not self.fraction_evaluate:
            return []
        server_round += self._before
        chosen = drawn(self.schedule, self.clients, server_round - 1, self.seed, self.fraction_evaluate, "evaluation")
        nodes = self._people.find(grid, chosen)
        self._asked = {node: client for client, node in nodes.items()}
        return [
            self._message(server_round, node, client, arrays, config, MessageType.EVALUATE)
            for client, node in nodes.items()
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average what the clients measured, by their held-out rows; failures join the round's record."""
        answers: dict[int, tuple[RecordDict, float]] = {}
        faults: list[Fault] = []
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id)
            if client is None or client in answers:
                continue
            if reply.has_error():
                faults.append(Fault(client, "crash", f"evaluation: {last_line(reply.error.reason)}"))
                continue
            try:
                answers[client] = (reply.content, rows_measured(reply.content))
            except (KeyError, ValueError, TypeError) as error:
                faults.append(Fault(client, "not finite", f"evaluation: {error.args[0]}"))
        faults += self._overweight(answers)
        last = self.rounds[-1]
        self.rounds[-1] = replace(last, evaluated=tuple(sorted(answers)), faults=(*last.faults, *faults))
        self._write()
        if not answers:
            return None
        contents, rows = zip(*(answers[client] for client in sorted(answers)), strict=True)
        return self.evaluate_metrics_aggr_fn(alike(contents, rows, "num-examples"), "num-examples")

    def _overweight(self, answers: dict[int, tuple[RecordDict, float]]) -> list[Fault]:
        """Take out clients whose claim of held-out rows would drown the others', as ``Guard.heavy`` has it."""
        if self.guard.heavy is None or len(answers) < 3:
            return []
        middle = statistics.median(rows for _, rows in answers.values())
        heavy = [client for client, (_, rows) in answers.items() if rows > self.guard.heavy * middle]
        claims = {client: answers.pop(client)[1] / middle for client in heavy}
        return [
            Fault(client, "weight", f"evaluation: claims {claims[client]:.3g} times the median") for client in heavy
        ]

    def _write(self) -> None:
        """Keep where the run stands, for a ServerApp that takes it up."""
        if self._file is not None:
            rows = [row_of(one) for one in self.rounds]
            standing = Standing(
                rounds=len(rows),
                params=self.params,
                buffers=self.buffers,
                server=self.state,
                extras=self.extras,
                rows=rows,
            )
            write(standing, self._file, self._run)

    def _take_up(self, standing: Standing) -> None:
        """Go on where another ServerApp stood."""
        self.params, self.buffers = standing.params, standing.buffers
        self.state, self.extras = standing.server, standing.extras
        self.rounds = [round_of(row) for row in standing.rows]
        self._before = standing.rounds
        for one in self.rounds:
            self._accepted |= dict.fromkeys(one.received, one.number)

    def _step(self, updates: Sequence[Update]) -> None:
        """Take the method's server step, then the buffers'."""
        sent = Sent(self.params, self.extras, self.buffers)
        made = self.method.aggregate(sent.params, updates, self.state, self.clients)
        self.params, self.state, self.extras = made
        self.buffers = self.method.buffers(sent.buffers, updates)
        if self.mixture:
            self.buffers = mix(self.buffers, updates)
        if self.schedule.batch_norm == "recalibrate" and self.proxy is not None:
            load_(self.model, self.params, self.buffers)
            recalibrate(self.model, self.proxy)
            self.buffers = {name: value.clone() for name, value in buffers_of(self.model).items()}

    def _message(
        self,
        number: int,
        node: int,
        client: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        kind: str = MessageType.TRAIN,
    ) -> Message:
        """Write to one client; the arrays are shared between the messages, the configuration is its own."""
        accepted = self._accepted.get(client, 0)
        ours = {"server-round": number, "sparing-seed": self.seed, "accepted-round": accepted}
        says = ConfigRecord({**config, **ours, "sparing-client": client, "sparing-run": self._tag})
        content = RecordDict({ARRAYS: arrays, CONFIG: says})
        put_state(content, self.extras if kind == MessageType.TRAIN else {})
        late = kind == MessageType.TRAIN and not accepted and number > 1
        if late and self.method.client_state(self.initial):
            content[INITIAL] = record_of(self.initial)
        return Message(content=content, message_type=kind, dst_node_id=node, group_id=str(number))

    def _read(self, replies: Iterable[Message]) -> tuple[dict[int, tuple[Update, RecordDict]], list[Fault]]:
        """Read the replies by client; a second reply of one client, or one that nobody asked for, is passed over."""
        answers: dict[int, tuple[Update, RecordDict]] = {}
        faults: list[Fault] = []
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id)
            if client is None or client in answers:
                continue
            if reply.has_error():
                faults.append(Fault(client, "crash", last_line(reply.error.reason)))
                continue
            try:
                update = update_of(client, reply.content, self.params, self.buffers, self._beside, self.weighted_by_key)
                answers[client] = (update, reply.content)
            except Exception as error:  # noqa: BLE001  # whatever a client sends, the round survives it
                faults.append(Fault(client, "wrong shape", f"unreadable reply: {last_line(str(error))[:200]}"))
        return answers, faults


def strategy(
    method: Method,
    schedule: Schedule,
    make_model: Callable[[], nn.Module],
    clients: int,
    *,
    seed: int = 0,  # sent to the clients
    patience: float = 60.0,  # seconds that a round waits for drawn clients that are not online
    guard: Guard | None = None,  # which updates are left out
    proxy: Tensor | None = None,  # the server's own inputs, for batch_norm="recalibrate"
    mixture: bool = False,  # whether running variances are those of the mixture, E[var] + Var[mean]
    evaluation: float = 0.0,  # share of clients that measure each new model on held-out rows; drawn independently
    rows: Sequence[int] | None = None,  # of each client
    nodes: Mapping[int, int] | None = None,  # node -> client, as keys were registered (``Deployment.partitions``)
    checkpoint: str | PathLike[str] | None = None,  # written after every round
    resume: bool = False,  # whether to go on from that file, if it exists; clients with a state need a ``memory``
) -> MethodStrategy:
    """Return the Flower strategy that runs the rounds of ``simulate``, to the same bits.

    The clients of a round are those of ``drawn``, found by their ``partition-id``: which nodes happen to be online,
    and Python's global random numbers, have no say. A client that left and came back, also as another node, is
    counted once. Start it with ``start(grid, initial_arrays=made.initial_arrays(), num_rounds=made.left)``.

    A node says itself which client it is unless ``nodes`` does; a client whose node is online cannot be claimed by
    another, but one that is offline can. How much a client counts is not its own to say: 1 with uniform weights, its
    ``rows`` where they are passed; otherwise claims beyond ``Guard.heavy`` medians are left out.
    """
    return MethodStrategy(
        method, schedule, make_model, clients, seed=seed, patience=patience, guard=guard, proxy=proxy, mixture=mixture,
        evaluation=evaluation, rows=rows, nodes=nodes, checkpoint=checkpoint, resume=resume,
    )  # fmt: skip
