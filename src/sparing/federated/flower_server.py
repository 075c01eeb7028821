"""A federated method as a Flower strategy: the schedule of ``simulate``, its server step, and who is who."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.federated.buffers import mix, recalibrate
from sparing.federated.faults import Fault, Guard, require_enough, sift
from sparing.federated.flower_client import INITIAL
from sparing.federated.flower_people import People, absent, last_line
from sparing.federated.flower_records import ARRAYS, CONFIG, get_state, put_state, record_of, vector_of
from sparing.federated.loop import Visit, buffers_of, load_, norm_names, seeded_model
from sparing.federated.methods import Method, Sent, State, Update, Vector
from sparing.federated.settings import Schedule, drawn


@dataclass(frozen=True, slots=True)
class FlowerRound:
    """What happened in a round."""

    number: int
    """Of the round, 1 for the first, as Flower counts."""

    drawn: tuple[int, ...]
    """Clients that the schedule drew."""

    received: tuple[int, ...]
    """Clients whose update counted, each once."""

    faults: tuple[Fault, ...]
    """Clients that were left out, and why; those that were not there or did not answer are ``"absent"``."""

    bytes_down: int
    """Arrays sent to all clients together (bytes)."""

    bytes_up: int
    """Arrays received from all clients together (bytes)."""

    evaluated: tuple[int, ...] = ()
    """Clients that measured the new model on rows of their own, where any were asked."""


class MethodStrategy(FedAvg):  # type: ignore[misc] # Flower is no dependency: its types are not read
    """Flower's FedAvg with the server step of a method, the drawn schedule, and memory of who was counted.

    Attributes:
        rounds: What happened in each round so far.
        state: The method's server state.
        params: Parameters of the global model, by name.
        buffers: Its buffers.
    """

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
    ) -> None:
        """See ``strategy``."""
        by = "num-examples" if schedule.weights == "size" else "one"
        super().__init__(fraction_train=schedule.participation, fraction_evaluate=evaluation, weighted_by_key=by)
        require(0 <= evaluation <= 1, "evaluation", evaluation, "it is a share of the clients", "pass 0 <= share <= 1")
        require(clients >= 1, "clients", clients, "somebody must train", "pass the number of all clients")
        method.check(schedule)
        self.method, self.schedule, self.clients, self.seed, self.mixture = method, schedule, clients, seed, mixture
        self.patience, self.guard, self.proxy = patience, guard or Guard(), proxy
        self.model = seeded_model(method, make_model, seed)
        lacks = schedule.batch_norm == "recalibrate" and proxy is None and bool(norm_names(self.model))
        got, why = '"recalibrate" without proxy', "the server needs rows of its own to estimate the statistics"
        require(not lacks, "batch_norm", got, why, 'pass proxy=inputs, or batch_norm="average"')
        params = {name: p for name, p in named_parameters(self.model).items() if p.requires_grad}
        self.params: Vector = {name: p.detach().clone() for name, p in params.items()}
        self.buffers: Vector = {name: value.clone() for name, value in buffers_of(self.model).items()}
        self.initial, self.state = dict(self.params), method.server_state(self.params)
        self.extras: State = {}
        first = Sent(self.params, {}, self.buffers)
        fresh = method.client_state(self.params)
        self._beside = method.finish(first, self.params, fresh, 1, 1.0, self.buffers)[1].keys()
        self.rounds: list[FlowerRound] = []
        self._people = People(clients, patience)
        self._accepted: dict[int, int] = {}  # client -> last round in which it was counted
        self._asked: dict[int, int] = {}  # node -> client, of the round under way
        self._drawn: tuple[int, ...] = ()
        self._bytes_down = 0

    def initial_arrays(self) -> ArrayRecord:
        """Return the initial global model for ``start``: parameters and buffers by the names of its state."""
        return record_of({**self.params, **self.buffers})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients, find their nodes, and write to them.

        Args:
            server_round: Of the round, from 1.
            arrays: The global model.
            config: Sent along, with the round, the seed and what the server has of the client.
            grid: Where the nodes are.

        Returns:
            A message for each drawn client that is there.

        Raises:
            RunError: If too few are there.
        """
        template = {**self.params, **self.buffers}
        model = vector_of(arrays, template)
        self.params = {name: model[name] for name in self.params}
        self.buffers = {name: model[name] for name in self.buffers}
        self._drawn = drawn(self.schedule, self.clients, server_round - 1, self.seed)
        nodes = self._people.find(grid, self._drawn)
        require_enough(len(nodes), server_round - 1, absent(self._drawn, nodes), self.guard)
        self._asked = {node: client for client, node in nodes.items()}
        messages = [self._message(server_round, node, client, arrays, config) for client, node in nodes.items()]
        self._bytes_down = sum(_bytes(message.content) for message in messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Make the next global model of the updates that can be averaged, each client counted once.

        Args:
            server_round: Of the round, from 1.
            replies: As they came, with errors.

        Returns:
            The model, and the clients' metrics, averaged with the weights of the schedule.

        Raises:
            RunError: If too few are left.
        """
        answers, faults = self._read(replies)
        visits = [Visit(update, {}) for update, _ in answers.values()]
        partial = self.schedule.blocks is not None
        sound, found = sift(visits, self.params, self.buffers, self.guard, partial=partial)
        faults += found
        told = {fault.client for fault in faults} | set(answers)
        faults += [Fault(client, "absent", "no answer") for client in self._drawn if client not in told]
        faults.sort(key=lambda fault: fault.client)
        require_enough(len(sound), server_round - 1, faults, self.guard)
        updates = [visit.update for visit in sound]
        received = tuple(sorted(update.client for update in updates))
        self._step(updates)
        self._accepted |= dict.fromkeys(received, server_round)
        contents = [answers[client][1] for client in received]
        up = sum(_bytes(content) for _, content in answers.values())
        self.rounds.append(FlowerRound(server_round, self._drawn, received, tuple(faults), self._bytes_down, up))
        # Metrics may differ between clients if mods do: only what all have is averaged.
        return self.initial_arrays(), self.train_metrics_aggr_fn(_alike(contents), self.weighted_by_key)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the clients that measure the new model, and write to those that are there.

        Args:
            server_round: Of the round, from 1.
            arrays: The new global model.
            config: Sent along, with the round, the seed and what the server has of the client.
            grid: Where the nodes are.

        Returns:
            A message for each of them; none if no share of the clients shall.
        """
        if not self.fraction_evaluate:
            return []
        chosen = drawn(self.schedule, self.clients, server_round - 1, self.seed, self.fraction_evaluate, "evaluation")
        nodes = self._people.find(grid, chosen)
        self._asked = {node: client for client, node in nodes.items()}
        return [
            self._message(server_round, node, client, arrays, config, MessageType.EVALUATE)
            for client, node in nodes.items()
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average what the clients measured, by their held-out rows; who failed is named in the round's record.

        Args:
            server_round: Of the round, from 1.
            replies: As they came, with errors.

        Returns:
            The means over all held-out rows, or None if nobody answered.
        """
        answers: dict[int, RecordDict] = {}
        faults: list[Fault] = []
        for reply in replies:
            client = self._asked.get(reply.metadata.src_node_id)
            if client is None or client in answers:
                continue
            if reply.has_error():
                faults.append(Fault(client, "crash", f"evaluation: {last_line(reply.error.reason)}"))
            elif fault := _unmeasured(reply.content):
                faults.append(Fault(client, "not finite", f"evaluation: {fault}"))
            else:
                answers[client] = reply.content
        last = self.rounds[-1]
        self.rounds[-1] = replace(last, evaluated=tuple(sorted(answers)), faults=(*last.faults, *faults))
        if not answers:
            return None
        return self.evaluate_metrics_aggr_fn(_alike([answers[client] for client in sorted(answers)]), "num-examples")

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
        says = ConfigRecord({**config, "server-round": number, "sparing-seed": self.seed, "accepted-round": accepted})
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
                answers[client] = (self._update(client, reply.content), reply.content)
            except (KeyError, ValueError, TypeError) as error:
                faults.append(Fault(client, "wrong shape", f"unreadable reply: {error}"))
        return answers, faults

    def _update(self, client: int, content: RecordDict) -> Update:
        record = content.array_records[ARRAYS]
        template = {**self.params, **self.buffers}
        if strange := sorted(record.keys() - template.keys()):
            raise KeyError(f"{strange[0]} is no tensor of the model")
        params, buffers = vector_of(record, self.params), vector_of(record, self.buffers)
        metrics = next(iter(content.metric_records.values()))
        extras = get_state(content, template)
        if extras.keys() != self._beside:
            raise KeyError(f"{sorted(extras)} travels beside the model, not {sorted(self._beside)}")
        for name, vector in extras.items():
            if any(value.shape != template[key].shape for key, value in vector.items()):
                raise ValueError(f"{name} has other shapes than the model")
        return Update(client, params, float(metrics[self.weighted_by_key]), extras, buffers)


def strategy(
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
) -> MethodStrategy:
    """Return the Flower strategy that runs the rounds of ``simulate``, to the same bits.

    The clients of a round are those of ``drawn``, found by their ``partition-id``: which nodes happen to be online,
    and Python's global random numbers, have no say. A client that left and came back, also as another node, is
    counted once. Start it with ``start(grid, initial_arrays=made.initial_arrays(), num_rounds=schedule.rounds)``.

    Args:
        method: The same value as the ClientApp has.
        schedule: The same value as the ClientApp has.
        make_model: Makes the initial global model; called under a seed of its own, as by ``simulate``.
        clients: All clients (count), K.
        seed: The experiment; sent to the clients.
        patience: How long a round waits for drawn clients that are not online (seconds).
        guard: Which updates are left out.
        proxy: The server's own inputs, for ``batch_norm="recalibrate"``.
        mixture: Whether running variances are those of the mixture, E[var] + Var[mean].
        evaluation: Share of all clients that measure each new model on held-out rows of their own; drawn apart from
            those that train.

    Returns:
        A strategy for one run: it keeps the method's server state.

    Raises:
        UserError: If the method refuses the schedule, or rows are missing.
    """
    return MethodStrategy(
        method, schedule, make_model, clients, seed=seed, patience=patience, guard=guard, proxy=proxy, mixture=mixture,
        evaluation=evaluation,
    )  # fmt: skip


def _alike(contents: Sequence[RecordDict]) -> list[RecordDict]:
    """Keep the metrics that all clients have."""
    records = [next(iter(content.metric_records.values())) for content in contents]
    names = [name for name in records[0] if all(name in record for record in records)]
    return [RecordDict({"metrics": MetricRecord({name: record[name] for name in names})}) for record in records]


def _unmeasured(content: RecordDict) -> str:
    """Return what is wrong with a client's numbers, nothing if all are well."""
    record = next(iter(content.metric_records.values()), None)
    if record is None or not isinstance(rows := record.get("num-examples"), int | float) or not rows > 0:
        return "no number of held-out rows"
    spoilt = [name for name, value in record.items() if not math.isfinite(float(sum(_numbers(value))))]
    return f"{spoilt[0]} is not finite" if spoilt else ""


def _numbers(value: float | list[float]) -> list[float]:
    return list(value) if isinstance(value, list) else [value]


def _bytes(content: RecordDict) -> int:
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())
