"""A federated method as a Flower strategy: the schedule and server step of ``simulate``, and node identities."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import Tensor, nn

from sparing.errors import require
from sparing.federated.checkpoint import RunState, describe_run, read, require_file, write
from sparing.federated.client.train import Client, ClientResult, buffers_of
from sparing.federated.flower.agreement import SETTINGS, client_settings
from sparing.federated.flower.client import INITIAL
from sparing.federated.flower.nodes import NodeRegistry, absent_faults, last_line
from sparing.federated.flower.records import ARRAYS, CONFIG, put_state, record_of, vector_of
from sparing.federated.flower.rounds import (
    FlowerRound,
    bytes_in,
    check_counts,
    common_metrics,
    held_out_rows,
    known_steps,
    known_weights,
    local_steps,
    read_update,
    round_from_json,
)
from sparing.federated.flower.secure import SECURE, SecureRound
from sparing.federated.flower.waiting import ClosingGrid
from sparing.federated.methods.interface import Method, Sent, State, Update, Vector
from sparing.federated.methods.private import Private
from sparing.federated.methods.secure import SecureSum
from sparing.federated.packing import detached_copy
from sparing.federated.server.closing import OpenRound, ranks
from sparing.federated.server.faults import Fault, Guard, heavy_claims, require_enough
from sparing.federated.server.round import in_round, round_server
from sparing.federated.server.trust import all_sizes
from sparing.federated.settings import Schedule, sample_clients


class MethodStrategy(FedAvg):  # type: ignore[misc] # Flower is no dependency: its types are not read
    """Flower's strategy for the rounds of ``simulate``, to the same bits; one value runs once.

    The clients of a round are those of ``sample_clients``, found by their ``partition-id``: neither which nodes happen
    to be online nor Python's global random numbers matter. A client that left and came back, also as another node, is
    counted once. Start it with ``start(grid, made.initial_arrays())``.

    A node says itself which client it is unless ``nodes`` does; a client whose node is online cannot be claimed by
    another, but one that is offline can. How much a client counts is not its own to say: 1 with uniform weights, its
    ``rows`` where they are passed; otherwise claims beyond ``Guard.heavy`` medians are left out.
    """

    def __init__(
        self,
        method: Method,
        schedule: Schedule,
        make_model: Callable[[], nn.Module],
        clients: int,  # all of them, K
        *,
        seed: int = 0,  # sent to the clients
        patience: float = 60.0,  # seconds that a round waits for drawn clients that are not online
        guard: Guard | None = None,  # which updates are left out
        proxy: Tensor | None = None,  # the server's own inputs, for batch_norm="recalibrate"
        mixture: bool = False,  # whether running variances are those of the mixture, E[var] + Var[mean]
        evaluation: float = 0.0,  # share of clients that measure each new model on held-out rows; drawn separately
        rows: Sequence[int] | None = None,  # of each client
        nodes: Mapping[int, int] | None = None,  # node -> client, as keys were registered: ``Deployment.partitions``
        checkpoint: str | PathLike[str] | None = None,  # written after every round
        resume: bool = False,  # continue from that file, if it exists; clients with a state need a ``memory``
        root: Client | None = None,  # clean rows of the server's own, for ``combine=FLTrust()``
    ) -> None:
        by = "num-examples" if schedule.weights == "size" else "one"
        super().__init__(fraction_train=schedule.participation, fraction_evaluate=evaluation, weighted_by_key=by)
        check_counts(evaluation, clients, rows, method)
        require_file(resume, checkpoint)
        self.method, self.schedule, self.clients, self.seed, self.patience = method, schedule, clients, seed, patience
        self._server = server = round_server(
            make_model, method, schedule, clients, seed=seed, guard=guard, proxy=proxy, mixture=mixture, root=root
        )
        self.guard, self.model = server.guard, server.setup.model
        self.params: Vector = detached_copy(server.setup.params)
        self.buffers: Vector = detached_copy(buffers_of(self.model))
        self.initial, self.state = dict(self.params), method.server_state(self.params)
        self._weights = known_weights(schedule, clients, rows)
        self._steps = known_steps(schedule, rows, normed=bool(server.setup.norms))
        self._registry = NodeRegistry(clients, patience, nodes)
        self._start_at_zero()
        self._file = None if checkpoint is None else Path(checkpoint)
        self._run = describe_run(schedule, method, seed, all_sizes(rows or [clients], root), self.initial)
        self._tag = hashlib.sha256(json.dumps(self._run).encode()).hexdigest()
        if resume and self._file is not None and self._file.exists():
            self._restore(read(self._file, self._run, most=schedule.rounds)[0])

    def _start_at_zero(self) -> None:
        self.rounds: list[FlowerRound] = []
        self.extras: State = {}
        self._resumed_rounds = 0  # rounds that another ServerApp did
        self._accepted: dict[int, int] = {}  # client -> last round in which it was counted
        self._clients_asked: dict[int, int] = {}  # node -> client, of the current round
        self._drawn: tuple[int, ...] = ()
        self._bytes_down = 0
        self._absent: frozenset[int] = frozenset()
        self._unneeded: tuple[int, ...] = ()

    @property
    def left(self) -> int:
        """Rounds of the schedule that are not done (count), for ``start``."""
        return max(self.schedule.rounds - len(self.rounds), 0)

    def initial_arrays(self) -> ArrayRecord:
        """Return the global model for ``start``, of a resumed run the last one, by the names of its state."""
        return record_of({**self.params, **self.buffers})

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int | None = None, **more: Any) -> Result:
        """Run rounds as Flower does, None for all that are left, numbered on from those of a resumed run."""
        num_rounds = self.left if num_rounds is None else num_rounds
        why = f"{self.left} of the schedule's {self.schedule.rounds} rounds are left"
        require(num_rounds <= self.left, "num_rounds", num_rounds, why, "pass server.left, or a longer Schedule")
        before, judge = self._resumed_rounds, more.get("evaluate_fn")
        if judge is not None:
            more["evaluate_fn"] = lambda number, arrays: judge(number + before, arrays)
        result = super().start(ClosingGrid(grid), initial_arrays, num_rounds, **more)
        for what in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            numbered = getattr(result, what)
            setattr(result, what, {number + before: record for number, record in numbered.items()})
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients, find their nodes, and write to those that are online."""
        server_round += self._resumed_rounds
        template = {**self.params, **self.buffers}
        # What Flower passes on is the truth: its ``start`` may have been given other arrays.
        model = vector_of(arrays, template)
        self.params = {name: model[name] for name in self.params}
        self.buffers = {name: model[name] for name in self.buffers}
        if not self.rounds:
            # Clients that are drawn late start from what round 1 sends, which need not be what make_model made.
            self.initial = dict(self.params)
        self._drawn = self._server.draw(server_round - 1)
        nodes = self._registry.find(grid, self._drawn, self._absent)
        if not isinstance(self.method, Private):
            require_enough(len(nodes), server_round - 1, absent_faults(self._drawn, nodes), self.guard)
        self._clients_asked = {node: client for client, node in nodes.items()}
        masks: dict[int, ConfigRecord] = {}
        if isinstance(self.method, SecureSum):
            wait = max(self.patience, 1.0)
            asked = self.schedule.asked(self.clients)
            self._secure = SecureRound(self.method, grid, nodes, self.params, server_round, wait, self._absent, asked)
            with in_round(server_round - 1):
                masks = self._secure.begin()
            nodes = {client: nodes[client] for client in masks}
        messages = [self._message(server_round, node, client, arrays, config) for client, node in nodes.items()]
        for message, mask in zip(messages, masks.values(), strict=False):
            message.content[SECURE] = mask
        self._open(grid, server_round, self._server.opened(tuple(nodes), self._absent))
        self._bytes_down = sum(bytes_in(message.content) for message in messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make the next global model of the updates that can be averaged, each client counted once."""
        number = self._resumed_rounds + server_round
        if isinstance(self.method, SecureSum):
            return self._unmask(number, self._secure, replies), None
        answers, faults = self._read_replies(replies)
        steps = local_steps({client: content for client, (_, content) in answers.items()}, self._steps, self.guard)
        results = [ClientResult(update, {}, steps=steps[client]) for client, (update, _) in answers.items()]
        replied = dict.fromkeys((fault.client for fault in faults), False) | dict.fromkeys(answers, True)
        faults += self._missing(set(replied), replied)
        sent = Sent(self.params, self.extras, self.buffers)
        valid, faults = self._server.accept(results, sent, number - 1, self._weights, faults)
        # Replies come in any order.
        updates = sorted((result.update for result in valid), key=lambda update: update.client)
        received = tuple(update.client for update in updates)
        up = sum(bytes_in(content) for _, content in answers.values())
        self._step(number, sent, updates, received, faults, up)
        contents, weights = [answers[client][1] for client in received], [update.weight for update in updates]
        # Metrics may differ between clients if mods do: only what all have is averaged.
        if not contents:
            return self.initial_arrays(), None
        metrics = self.train_metrics_aggr_fn(
            common_metrics(contents, weights, self.weighted_by_key), self.weighted_by_key
        )
        return self.initial_arrays(), metrics

    def _open(self, grid: Grid, number: int, waiting: OpenRound) -> None:
        """Let the grid wait as a round does that may close before all have answered."""
        if isinstance(grid, ClosingGrid):
            grid.waiting = waiting if self.schedule.spare or self._absent else None
            grid.clients, grid.rank = self._clients_asked, ranks(self._drawn, number - 1, self.seed)

    def _missing(self, named: Collection[int], replies: Mapping[int, bool]) -> list[Fault]:
        """Note who answered, with an update or not; return faults for those that did not and were waited for."""
        waiting = self._server.opened(self._drawn, self._absent)
        for client, update in replies.items():
            waiting.take(client, update=update)
        self._unneeded, self._absent = waiting.unneeded, waiting.absent_after
        gone = [client for client in self._drawn if client not in named and client not in self._unneeded]
        return [Fault(client, "absent", "no answer") for client in gone]

    def _step(
        self, number: int, sent: Sent, updates: Sequence[Update], received: tuple[int, ...], faults: Sequence[Fault],
        up: int,
    ) -> None:  # fmt: skip
        """Make the next model, note the round, and save both."""
        after, self.state = self._server.step(sent, updates, self.state, number - 1)
        self.params, self.buffers, self.extras = after.params, after.buffers, after.extras
        self._accepted |= dict.fromkeys(received, number)
        refused = self._registry.refused
        self.rounds.append(
            FlowerRound(
                number,
                self._drawn,
                received,
                tuple(faults),
                self._bytes_down,
                up,
                refused=refused,
                unneeded=self._unneeded,
                absent=tuple(sorted(self._absent)),
            )
        )
        self._save()

    def _unmask(self, number: int, secure: SecureRound, replies: Iterable[Message]) -> ArrayRecord:
        """Make the next global model of a masked sum."""
        contents: dict[int, RecordDict] = {}
        faults: list[Fault] = []
        for client, content in self._contents(replies, contents, faults):
            contents.setdefault(client, content)
        sent = Sent(self.params, self.extras, self.buffers)
        with in_round(number - 1):
            update = secure.finish(contents, self.params)
        received = secure.server.survivors
        faults += [Fault(client, "wrong shape", why) for client, why in secure.server.faults.items()]
        replied = dict.fromkeys((fault.client for fault in faults), False) | dict.fromkeys(received, True)
        faults += self._missing(set(replied), replied)
        # Also who sent its vector and then nothing: the next round would wait for it again.
        self._absent |= secure.silent
        self._bytes_down += secure.server.bytes_down
        self._step(number, sent, [update], received, faults, secure.server.bytes_up)
        return self.initial_arrays()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the clients that measure the new model, and write to those that are online."""
        if not self.fraction_evaluate:
            return []
        server_round += self._resumed_rounds
        chosen = sample_clients(
            self.schedule, self.clients, server_round - 1, self.seed, self.fraction_evaluate, "evaluation"
        )
        nodes = self._registry.find(grid, chosen, self._absent)
        self._clients_asked = {node: client for client, node in nodes.items()}
        self._open(grid, server_round, OpenRound(tuple(nodes), len(nodes), self._absent))
        return [
            self._message(server_round, node, client, arrays, config, MessageType.EVALUATE)
            for client, node in nodes.items()
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average what the clients measured, by their held-out rows; failures join the round's record."""
        answers: dict[int, tuple[RecordDict, float]] = {}
        faults: list[Fault] = []
        for client, content in self._contents(replies, answers, faults, "evaluation: "):
            try:
                answers[client] = (content, held_out_rows(content))
            except (KeyError, ValueError, TypeError) as error:
                faults.append(Fault(client, "not finite", f"evaluation: {error.args[0]}"))
        claims = {client: rows for client, (_, rows) in answers.items()}
        # Without this one claim of many held-out rows would outweigh all others' numbers.
        for client, medians in heavy_claims(claims, self.guard).items():
            del answers[client]
            faults.append(Fault(client, "weight", f"evaluation: claims {medians:.3g} times the median"))
        last = self.rounds[-1]
        self.rounds[-1] = replace(last, evaluated=tuple(sorted(answers)), faults=(*last.faults, *faults))
        self._save()
        if not answers:
            return None
        contents, rows = zip(*(answers[client] for client in sorted(answers)), strict=True)
        return self.evaluate_metrics_aggr_fn(common_metrics(contents, rows, "num-examples"), "num-examples")

    def _save(self) -> None:
        """Save the state of the run, for a ServerApp that resumes it."""
        if self._file is not None:
            rows = [asdict(one) for one in self.rounds]
            initial = self.initial if self.method.client_state(self.initial) else {}
            state = RunState(
                rounds=len(rows), params=self.params, buffers=self.buffers, server=self.state, extras=self.extras,
                rows=rows, initial=initial,
            )  # fmt: skip
            write(state, self._file, self._run)

    def _restore(self, run_state: RunState) -> None:
        """Continue from the state that another ServerApp saved."""
        self.params, self.buffers = run_state.params, run_state.buffers
        self.state, self.extras = run_state.server, run_state.extras
        self.initial = run_state.initial or self.initial
        self.rounds = [round_from_json(row) for row in run_state.rows]
        self._resumed_rounds = run_state.rounds
        self._absent = frozenset(self.rounds[-1].absent) if self.rounds else frozenset()
        for one in self.rounds:
            self._accepted |= dict.fromkeys(one.received, one.number)

    def _message(
        self, number: int, node: int, client: int, arrays: ArrayRecord, config: ConfigRecord,
        kind: str = MessageType.TRAIN,
    ) -> Message:  # fmt: skip
        """Write to one client; the arrays are shared between the messages, the configuration is its own."""
        accepted = self._accepted.get(client, 0)
        ours = {"server-round": number, "sparing-seed": self.seed, "accepted-round": accepted}
        says = ConfigRecord({**config, **ours, "sparing-client": client, "sparing-run": self._tag})
        agreed = ConfigRecord(dict(client_settings(self.method, self.schedule)))
        content = RecordDict({ARRAYS: arrays, CONFIG: says, SETTINGS: agreed})
        put_state(content, self.extras if kind == MessageType.TRAIN else {})
        # A state starts from the initial model, which a client that is drawn late has never seen.
        late = kind == MessageType.TRAIN and not accepted and number > 1
        if late and self.method.client_state(self.initial):
            content[INITIAL] = record_of(self.initial)
        return Message(content=content, message_type=kind, dst_node_id=node, group_id=str(number))

    def _read_replies(self, replies: Iterable[Message]) -> tuple[dict[int, tuple[Update, RecordDict]], list[Fault]]:
        """Read the replies by client; a second reply of one client, or an unexpected one, is ignored."""
        answers: dict[int, tuple[Update, RecordDict]] = {}
        faults: list[Fault] = []
        back, extras = self._server.setup.returned(self.buffers), self._server.extra_names
        for client, content in self._contents(replies, answers, faults):
            try:
                update = read_update(client, content, self.params, back, extras, self.weighted_by_key)
                answers[client] = (update, content)
            except Exception as error:  # noqa: BLE001  # whatever a client sends, the round survives it
                faults.append(Fault(client, "wrong shape", f"unreadable reply: {last_line(str(error))[:200]}"))
        return answers, faults

    def _contents(
        self, replies: Iterable[Message], answers: Container[int], faults: list[Fault], during: str = ""
    ) -> Iterator[tuple[int, RecordDict]]:
        """Yield what clients replied, of those that were asked and are not in ``answers`` yet; note who failed."""
        for reply in replies:
            client = self._clients_asked.get(reply.metadata.src_node_id)
            if client is None or client in answers:
                continue
            if reply.has_error():
                faults.append(Fault(client, "crash", f"{during}{last_line(reply.error.reason)}"))
            else:
                yield client, reply.content


strategy = MethodStrategy
