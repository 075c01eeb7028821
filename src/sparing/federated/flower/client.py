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
from sparing.federated.client.train import (
    Client,
    ClientResult,
    ClientSetup,
    Loss,
    buffers_of,
    client_setup,
    initial_model,
    load_,
    received_model,
    require_tensors,
)
from sparing.federated.client.train import train as train_client
from sparing.federated.flower.agreement import SETTINGS, client_settings, require_agreement
from sparing.federated.flower.records import (
    ARRAYS,
    METRICS,
    config_int,
    config_of,
    get_state,
    put_state,
    record_of,
    vector_of,
)
from sparing.federated.flower.secure import secure_mod
from sparing.federated.methods.interface import Method, Sent, State, Vector
from sparing.federated.methods.secure import SecureSum
from sparing.federated.metrics import Accuracy, Evaluate
from sparing.federated.packing import pack, unpack
from sparing.federated.secure.signing import Signer
from sparing.federated.settings import Schedule
from sparing.report.atomic import write_whole

DataOf = Callable[[int], Client]
"""Number of a client, its node's ``partition-id`` -> its rows."""

Judge = Callable[[Client], Evaluate]
"""Held-out rows of a client -> what measures a model on them."""

IDENTITY = "who"
"""Record that says whose reply it is."""

INITIAL = "initial"
"""Record of the initial model, sent to a client that first trains in a later round if its state starts from it."""

# A reply may be lost on the way, so a round's state is pending until the server names that round as accepted; only then
# does it replace the kept one, from which the client trains.
_KEPT, _PENDING, _LOCAL_BN = "sparing/kept/", "sparing/pending/", "sparing/own/"
_ROUNDS = "sparing/rounds"  # record of the rounds whose state is kept and pending


def client_app(
    method: Method,
    make_model: Callable[[], nn.Module],
    data_of: DataOf,
    schedule: Schedule,
    *,
    loss: Loss = F.cross_entropy,
    held_of: DataOf | None = None,  # held-out rows of a client; None: the app has no ``evaluate``
    judge: Judge = lambda rows: Accuracy(rows.inputs, rows.targets),
    mods: Sequence[Mod] = (),  # Flower's, such as ``sign_telemetry``
    signer: Signer | None = None,  # the client's key and all clients' public ones, for ``SecureSum(signed=True)``
    memory: str | PathLike[str] | None = None,  # folder of the node's state, for runs that another ServerApp resumes
) -> ClientApp:
    """Return the ClientApp that trains as ``simulate`` does, to the same bits.

    Method and schedule are the server's: a client whose own differ in what it trains by answers with an error that
    names the fields, and is left out.
    The state of the method lives in ``context.state`` and is as old as the last update that the server says it
    received. A node that lost it, by a restart, answers with an error instead of starting afresh in silence.
    """
    method.check(schedule)
    process = _ClientProcess(
        method, make_model, data_of, schedule, loss, held_of, judge, None if memory is None else Path(memory)
    )
    # Outermost, so that the other mods see what the app sends and nothing of theirs leaves the client unmasked.
    signs = isinstance(method, SecureSum) and method.signed
    why, do = "clients that sign have keys, and others none", "pass SecureSum(..., signed=True) and signer=Signer(...)"
    require(signs == (signer is not None), "signer", "one" if signer else "none", why, do)
    asked = 0 if signer is None else schedule.asked(len(signer.known))
    masks = [secure_mod(method, process.params_of, signer, asked)] if isinstance(method, SecureSum) else []
    app = ClientApp(mods=[*masks, *mods])
    app.train()(process.train)
    app.query()(_send_identity)
    if held_of is not None:
        app.evaluate()(process.evaluate)
    return app


@dataclass(slots=True)
class _ClientProcess:
    """What a client process keeps between messages: for each seed a model to train on."""

    method: Method
    make_model: Callable[[], nn.Module]
    data_of: DataOf
    schedule: Schedule
    loss: Loss
    held_of: DataOf | None
    judge: Judge
    folder: Path | None
    setups: dict[int, ClientSetup] = field(default_factory=dict)

    def train(self, message: Message, context: Context) -> Message:
        """Train for one round and reply with the update."""
        self._require_agreement(message)
        config = config_of(message.content)
        number, client = config_int(config, "server-round"), _client_of(config, context)
        setup = self._setup(config_int(config, "sparing-seed"))
        sent, initial = _read_model(message.content, setup)
        memory = self._store(client, config, context, setup)
        state, local_bn = memory.state_after(config_int(config, "accepted-round"), initial)
        rows = self.data_of(client)
        require_tensors(rows, f"client {client}")
        result = train_client(setup, rows, sent, state, number=number - 1, client_id=client, local_bn=local_bn)
        memory.save_pending(result, number)
        return Message(_reply(result, len(rows)), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Measure the global model on the client's held-out rows and reply with the numbers."""
        self._require_agreement(message)
        config = config_of(message.content)
        number, client = config_int(config, "server-round"), _client_of(config, context)
        setup = self._setup(config_int(config, "sparing-seed"))
        sent, _ = _read_model(message.content, setup)
        local_bn = self._store(client, config, context, setup).local_bn(config_int(config, "accepted-round"))
        model = received_model(setup, sent, local_bn)
        load_(setup.model, model.params, model.buffers)
        if self.held_of is None or not len(rows := self.held_of(client)):
            raise RunError(f"client {client}, round {number}: it has no held-out rows to measure the model on")
        numbers = {"one": 1.0, "num-examples": len(rows), **self.judge(rows)(setup.model)}
        content = RecordDict({METRICS: MetricRecord(numbers), IDENTITY: ConfigRecord({"client": client})})
        return Message(content, reply_to=message)

    def _require_agreement(self, message: Message) -> None:
        servers = config_of(message.content, SETTINGS)
        require_agreement(client_settings(self.method, self.schedule), servers)

    def _store(self, client: int, config: ConfigRecord, context: Context, setup: ClientSetup) -> _StateStore:
        run = str(config.get("sparing-run", ""))
        file = None if self.folder is None else self.folder / f"client-{client}.safetensors"
        memory = _StateStore(context.state, setup, file, run)
        memory.load()
        return memory

    def params_of(self, config: ConfigRecord) -> Vector:
        """Return the parameters of the model that a configuration of the server's is about."""
        return {name: value.detach() for name, value in self._setup(config_int(config, "sparing-seed")).params.items()}

    def _setup(self, seed: int) -> ClientSetup:
        if seed not in self.setups:
            model = initial_model(self.method, self.make_model, seed)
            self.setups[seed] = client_setup(model, self.method, self.schedule, seed=seed, loss=self.loss)
        return self.setups[seed]


@dataclass(slots=True)
class _StateStore:
    """A client's state in its context: what the server accepted, and what it may not have received yet."""

    records: RecordDict
    setup: ClientSetup
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

    def state_after(self, accepted: int, initial: Vector) -> tuple[State, Vector]:
        """Return the method's state and the client's own batch norm as of the last accepted round, 0 for none."""
        fresh = self.setup.method.client_state(initial)
        if not fresh and self.setup.schedule.batch_norm != "local":
            return {}, {}
        if not accepted:
            return fresh, {}
        self._confirm(accepted)
        return get_state(self.records, _template(self.setup), f"{_KEPT}state/"), self.local_bn(accepted)

    def local_bn(self, accepted: int) -> Vector:
        """Return the client's own batch norm as of the last accepted round, empty where none is kept."""
        if not accepted or self.setup.schedule.batch_norm != "local":
            return {}
        self._confirm(accepted)
        return get_state(self.records, _template(self.setup), f"{_KEPT}{_LOCAL_BN}").get("own", {})

    def _confirm(self, accepted: int) -> None:
        """Make the pending state the kept one once its round was accepted; refuse a state that is not of that round."""
        rounds = config_of(self.records, _ROUNDS)
        if rounds.get("pending") == accepted:
            for key in [key for key in self.records if key.startswith(_KEPT)]:
                del self.records[key]
            for key in [key for key in self.records if key.startswith(_PENDING)]:
                self.records[key.replace(_PENDING, _KEPT, 1)] = self.records.pop(key)
            self.records[_ROUNDS] = ConfigRecord({"kept": accepted, "pending": 0})
        elif rounds.get("kept") != accepted:
            raise RunError(
                f"client state of round {accepted}: not at this node, which has {rounds.get('kept', 0)}; "
                f"{self.setup.method.name} cannot go on without it; was the node restarted?"
            )

    def save_pending(self, result: ClientResult, number: int) -> None:
        """Store a round's state as pending, until the server says that it received the update; also in the file."""
        if not result.state and not result.local_bn:
            return
        put_state(self.records, result.state, f"{_PENDING}state/")
        put_state(self.records, {"own": result.local_bn} if result.local_bn else {}, f"{_PENDING}{_LOCAL_BN}")
        kept = config_of(self.records, _ROUNDS).get("kept", 0)
        self.records[_ROUNDS] = ConfigRecord({"kept": kept, "pending": number})
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            template, arrays = _template(self.setup), self.records.array_records
            tree = {key: vector_of(arrays[key], template) for key in arrays if key.startswith((_KEPT, _PENDING))}
            write_whole(self.file, pack(tree, {"run": self.run, "rounds": dict(self.records[_ROUNDS])}))


def _read_model(content: RecordDict, setup: ClientSetup) -> tuple[Sent, Vector]:
    """Read what the server sent, and the initial model, which is what it sent if it says nothing else."""
    arrays = content.array_records
    why = "there is no model in it"
    require(ARRAYS in arrays, "Flower message", sorted(content), why, "use sparing's strategy")
    params = vector_of(arrays[ARRAYS], setup.params)
    buffers = vector_of(arrays[ARRAYS], buffers_of(setup.model))
    if missing := sorted(setup.params.keys() - params.keys()):
        why = "the server sent a model without it"
        raise UserError(f"parameter {missing[0]!r}", got="none", why=why, do="make the same model on both sides")
    initial = vector_of(arrays[INITIAL], setup.params) if INITIAL in arrays else params
    return Sent(params, get_state(content, _template(setup)), buffers), initial


def _reply(result: ClientResult, rows: int) -> RecordDict:
    """Pack an update: one record of arrays if nothing travels beside the model, and the metrics."""
    update = result.update
    numbers = {"one": 1.0, "num-examples": rows, "train-loss": result.loss, "steps": result.steps}
    content = RecordDict({ARRAYS: record_of({**update.params, **update.buffers}), METRICS: MetricRecord(numbers)})
    put_state(content, update.extras)
    content[IDENTITY] = ConfigRecord({"client": update.client})
    return content


def _send_identity(message: Message, context: Context) -> Message:
    return Message(RecordDict({IDENTITY: ConfigRecord({"client": _partition_id(context)})}), reply_to=message)


def _client_of(config: ConfigRecord, context: Context) -> int:
    """The client that this node is; refused if the server takes the node for another."""
    number = _partition_id(context)
    asked = config_int(config, "sparing-client", number)
    why = f"the server knows this node as client {asked}"
    do = f"start the SuperNode with --node-config 'partition-id={asked}', or register its key for client {number}"
    require(asked == number, "node configuration 'partition-id'", number, why, do)
    return number


def _partition_id(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or number < 0:
        why, do = "it says which client a node is", "start the SuperNode with --node-config 'partition-id=0'"
        raise UserError("node configuration 'partition-id'", got=repr(number), why=why, do=do)
    return number


def _template(setup: ClientSetup) -> Vector:
    return {**{name: value.detach() for name, value in setup.params.items()}, **buffers_of(setup.model)}
