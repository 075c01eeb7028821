"""A federated method as a Flower ClientApp: the client step of every engine, with its memory in ``context.state``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import torch.nn.functional as F
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from torch import nn

from sparing.errors import RunError, UserError, require
from sparing.federated.flower_records import (
    ARRAYS,
    METRICS,
    config_of,
    get_state,
    put_state,
    record_of,
    vector_of,
    whole,
)
from sparing.federated.loop import (
    Client,
    Loss,
    Visit,
    Workbench,
    buffers_of,
    load_,
    received_by,
    seeded_model,
    workbench,
)
from sparing.federated.loop import train as train_client
from sparing.federated.methods import Method, Sent, State, Vector
from sparing.federated.metrics import Accuracy, Evaluate
from sparing.federated.packing import pack, unpack
from sparing.federated.settings import Schedule
from sparing.report.atomic import write_whole

DataOf = Callable[[int], Client]
"""Number of a client, its node's ``partition-id`` -> its rows."""

Judge = Callable[[Client], Evaluate]
"""Held-out rows of a client -> what measures a model on them."""

WHO = "who"
"""Record that says whose reply it is."""

INITIAL = "initial"
"""Record of the initial model, sent at a later first visit if the method's client state begins with it."""

_KEPT, _PENDING, _OWN = "sparing/kept/", "sparing/pending/", "sparing/own/"
_ROUNDS = "sparing/rounds"  # record of the rounds whose state is kept and pending


def _accuracy(rows: Client) -> Evaluate:
    return Accuracy(rows.inputs, rows.targets)


def client_app(
    method: Method,
    make_model: Callable[[], nn.Module],
    data_of: DataOf,
    schedule: Schedule,
    *,
    loss: Loss = F.cross_entropy,
    held_of: DataOf | None = None,  # held-out rows of a client; None: the app has no ``evaluate``
    judge: Judge = _accuracy,
    mods: Sequence[Mod] = (),  # Flower's, such as ``sign_telemetry``
    memory: str | PathLike[str] | None = None,  # folder of the node's state, for runs that another ServerApp resumes
) -> ClientApp:
    """Return the ClientApp that trains as ``simulate`` does, to the same bits.

    The state of the method lives in ``context.state`` and is as old as the last update that the server says it
    received. A node that lost it, by a restart, answers with an error instead of starting afresh in silence.
    """
    method.check(schedule)
    host = _Host(method, make_model, data_of, schedule, loss, held_of, judge, None if memory is None else Path(memory))
    app = ClientApp(mods=list(mods))
    app.train()(host.train)
    app.query()(_say_who)
    if held_of is not None:
        app.evaluate()(host.evaluate)
    return app


@dataclass(slots=True)
class _Host:
    """What a client process keeps between messages: the model, as room to work in."""

    method: Method
    make_model: Callable[[], nn.Module]
    data_of: DataOf
    schedule: Schedule
    loss: Loss
    held_of: DataOf | None
    judge: Judge
    folder: Path | None
    benches: dict[int, Workbench] = field(default_factory=dict)

    def train(self, message: Message, context: Context) -> Message:
        """Train for one round and reply with the update."""
        config = config_of(message.content)
        number, client = whole(config, "server-round"), _asked(config, context)
        bench = self._bench(whole(config, "sparing-seed"))
        sent, initial = _received(message.content, bench)
        memory = self._memory(client, config, context, bench)
        state, own = memory.recall(whole(config, "accepted-round"), initial)
        rows = self.data_of(client)
        visit = train_client(bench, rows, sent, state, number=number - 1, client_id=client, own=own)
        memory.keep(visit, number)
        return Message(_reply(visit, len(rows)), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Measure the global model on the client's held-out rows and reply with the numbers."""
        config = config_of(message.content)
        number, client = whole(config, "server-round"), _asked(config, context)
        bench = self._bench(whole(config, "sparing-seed"))
        sent, _ = _received(message.content, bench)
        own = self._memory(client, config, context, bench).own(whole(config, "accepted-round"))
        model = received_by(bench, sent, own)
        load_(bench.model, model.params, model.buffers)
        if self.held_of is None or not len(rows := self.held_of(client)):
            raise RunError(f"client {client}, round {number}: it has no held-out rows to measure the model on")
        numbers = {"one": 1.0, "num-examples": len(rows), **self.judge(rows)(bench.model)}
        content = RecordDict({METRICS: MetricRecord(numbers), WHO: ConfigRecord({"client": client})})
        return Message(content, reply_to=message)

    def _memory(self, client: int, config: ConfigRecord, context: Context, bench: Workbench) -> _Memory:
        run = str(config.get("sparing-run", ""))
        file = None if self.folder is None else self.folder / f"client-{client}.safetensors"
        memory = _Memory(context.state, bench, file, run)
        memory.load()
        return memory

    def _bench(self, seed: int) -> Workbench:
        if seed not in self.benches:
            model = seeded_model(self.method, self.make_model, seed)
            self.benches[seed] = workbench(model, self.method, self.schedule, seed=seed, loss=self.loss)
        return self.benches[seed]


@dataclass(slots=True)
class _Memory:
    """A client's state in its context: what the server accepted, and what it may not have received yet."""

    records: RecordDict
    bench: Workbench
    file: Path | None
    run: str

    def load(self) -> None:
        """Read what this client of this run left in its file, if the context knows nothing: another ServerApp asks."""
        if self.file is None or _ROUNDS in self.records or not self.file.exists():
            return
        try:
            tree, facts = unpack(self.file.read_bytes())
            same = facts["run"] == self.run
        except (OSError, ValueError, KeyError, TypeError) as error:
            why, do = "the client's state cannot be read", "delete it, and begin the run anew"
            raise UserError(self.file.name, got=str(error), why=why, do=do) from None
        if same:
            for key, vector in tree.items():
                self.records[key] = record_of(vector)
            self.records[_ROUNDS] = ConfigRecord(facts["rounds"])

    def save(self) -> None:
        """Write it."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            template, kept = _template(self.bench), self.records.array_records
            tree = {key: vector_of(kept[key], template) for key in kept if key.startswith((_KEPT, _PENDING))}
            write_whole(self.file, pack(tree, {"run": self.run, "rounds": dict(self.records[_ROUNDS])}))

    def recall(self, accepted: int, initial: Vector) -> tuple[State, Vector]:
        """Return the method's state and the client's own batch norm as of the last accepted round, 0 for none."""
        fresh = self.bench.method.client_state(initial)
        if not fresh and self.bench.schedule.batch_norm != "local":
            return {}, {}
        if not accepted:
            return fresh, {}
        self._settle(accepted)
        return get_state(self.records, _template(self.bench), f"{_KEPT}state/"), self.own(accepted)

    def own(self, accepted: int) -> Vector:
        """Return the own batch norm after the round that the server accepted last, empty where none is kept."""
        if not accepted or self.bench.schedule.batch_norm != "local":
            return {}
        self._settle(accepted)
        return get_state(self.records, _template(self.bench), f"{_KEPT}{_OWN}").get("own", {})

    def _settle(self, accepted: int) -> None:
        """Make what the accepted round left behind what is kept."""
        rounds = config_of(self.records, _ROUNDS)
        if rounds.get("pending") == accepted:
            self._promote(accepted)
        elif rounds.get("kept") != accepted:
            raise RunError(
                f"client state of round {accepted}: not at this node, which has {rounds.get('kept', 0)}; "
                f"{self.bench.method.name} cannot go on without it; was the node restarted?"
            )

    def keep(self, visit: Visit, number: int) -> None:
        """Put aside what a round left behind, until the server says that it received the update."""
        if not visit.state and not visit.own:
            return
        put_state(self.records, visit.state, f"{_PENDING}state/")
        put_state(self.records, {"own": visit.own} if visit.own else {}, f"{_PENDING}{_OWN}")
        kept = config_of(self.records, _ROUNDS).get("kept", 0)
        self.records[_ROUNDS] = ConfigRecord({"kept": kept, "pending": number})
        self.save()

    def _promote(self, number: int) -> None:
        for key in [key for key in self.records if key.startswith(_KEPT)]:
            del self.records[key]
        for key in [key for key in self.records if key.startswith(_PENDING)]:
            self.records[key.replace(_PENDING, _KEPT, 1)] = self.records.pop(key)
        self.records[_ROUNDS] = ConfigRecord({"kept": number, "pending": 0})


def _received(content: RecordDict, bench: Workbench) -> tuple[Sent, Vector]:
    """Read what the server sent, and the initial model, which is what it sent if it says nothing else."""
    arrays = content.array_records
    if ARRAYS not in arrays:
        raise UserError(
            "Flower message", got=sorted(content), why="there is no model in it", do="use sparing's strategy"
        )
    params = vector_of(arrays[ARRAYS], bench.params)
    buffers = vector_of(arrays[ARRAYS], buffers_of(bench.model))
    if missing := sorted(bench.params.keys() - params.keys()):
        why = "the server sent a model without it"
        raise UserError(f"parameter {missing[0]!r}", got="none", why=why, do="make the same model on both sides")
    initial = vector_of(arrays[INITIAL], bench.params) if INITIAL in arrays else params
    return Sent(params, get_state(content, _template(bench)), buffers), initial


def _reply(visit: Visit, rows: int) -> RecordDict:
    """Pack an update: one record of arrays if nothing travels beside the model, and the metrics."""
    update = visit.update
    numbers = {"one": 1.0, "num-examples": rows, "train-loss": visit.loss, "steps": visit.steps}
    content = RecordDict({ARRAYS: record_of({**update.params, **update.buffers}), METRICS: MetricRecord(numbers)})
    put_state(content, update.extras)
    content[WHO] = ConfigRecord({"client": update.client})
    return content


def _say_who(message: Message, context: Context) -> Message:
    return Message(RecordDict({WHO: ConfigRecord({"client": _number_of(context)})}), reply_to=message)


def _asked(config: ConfigRecord, context: Context) -> int:
    """The client that the server writes to, which must be this node's own."""
    number = _number_of(context)
    asked = whole(config, "sparing-client", number)
    require(
        asked == number,
        "node configuration 'partition-id'",
        number,
        f"the server knows this node as client {asked}",
        f"start the SuperNode with --node-config 'partition-id={asked}', or register its key for client {number}",
    )
    return number


def _number_of(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or number < 0:
        raise UserError(
            "node configuration 'partition-id'",
            got=repr(number),
            why="it says which client a node is",
            do="start the SuperNode with --node-config 'partition-id=0'",
        )
    return number


def _template(bench: Workbench) -> Vector:
    return {**{name: value.detach() for name, value in bench.params.items()}, **buffers_of(bench.model)}
