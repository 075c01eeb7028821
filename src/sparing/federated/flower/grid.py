"""Flower without a network: the ClientApp of every node called in this process, one after another.

It is for tests, and for studies that want Flower's messages and strategies without its processes. It needs a part of
Flower that is not public, so it is held to the version that it was written for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import flwr
import torch.nn.functional as F
from flwr.app import Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor, nn

from sparing.errors import require
from sparing.federated.client.train import Client, Loss, load_
from sparing.federated.flower.client import client_app
from sparing.federated.flower.rounds import FlowerRound
from sparing.federated.flower.server import strategy
from sparing.federated.methods.interface import Method, State, Vector
from sparing.federated.methods.secure import SecureSum
from sparing.federated.secure.signing import new_signers
from sparing.federated.server.faults import Guard
from sparing.federated.settings import Schedule
from sparing.report.quiet import errors_alone

_VERSION = "1.41."
_CRASHED = 1  # code of the error that a reply carries in place of an update


class InProcessGrid(Grid):  # type: ignore[misc] # Flower is no dependency: its types are not read
    """Nodes that are function calls; node i + 1 is client i."""

    def __init__(
        self, app: ClientApp | ClientAppCallable, clients: int, run_config: Mapping[str, Any] | None = None
    ) -> None:
        """Start with a node for each client."""
        version, why = flwr.__version__, "the grid reaches into parts of Flower that may change"
        require(version.startswith(_VERSION), "Flower", version, why, "pip install 'sparing[flower]'")
        self.app, self.run_config = app, dict(run_config or {})
        self.contexts: dict[int, Context] = {}
        self._online: list[int] = []
        self._replies: dict[str, Message] = {}
        self._numbers, self._run = itertools.count(1), Run.create_empty(1)
        self.clients = clients
        # What messages are stamped with; in Flower's own processes the runtime sets it.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1 << 62
        for client in range(clients):
            self.join(client)

    def join(self, client: int) -> int:
        """Bring a new node for a client, without memory, and return its number."""
        node = len(self.contexts) + 1
        config = {"partition-id": client, "num-partitions": self.clients}
        self.contexts[node] = Context(1, node, config, RecordDict(), dict(self.run_config))
        self._online.append(node)
        return node

    def leave(self, node: int) -> None:
        """Take a node offline; its memory stays."""
        self._online.remove(node)

    def come_back(self, node: int) -> None:
        """Bring a node online again that left."""
        self._online.append(node)

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message, as Flower's own grids do."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are online."""
        return list(self._online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Call the app for each message; messages to nodes that are not online stay without a reply."""
        names = []
        for message in messages:
            names.append(name := str(next(self._numbers)))
            # Flower's own grids set it in the same way; the attribute has no setter.
            message.metadata.__dict__["_message_id"] = name
            if message.metadata.dst_node_id in self._online:
                self._replies[name] = self._answer(message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages, each once."""
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Call the app for each message and return the replies, in order."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # noqa: BLE001 - a client may fail in any way, and the round goes on, as in Flower
            return Message(Error(_CRASHED, f"{type(error).__name__}: {error}"), reply_to=message)


@dataclass(frozen=True, slots=True, eq=False)
class FlowerRun:
    """What a run on Flower leaves."""

    params: Vector
    buffers: Vector
    state: State  # of the method on the server
    rounds: list[FlowerRound]
    metrics: dict[int, dict[str, Any]]
    """Round, from 1 -> means of what the clients measured, under ``held-`` that on held-out rows of theirs, and what
    ``evaluate`` did."""


def run_in_process(
    make_model: Callable[[], nn.Module],
    clients: Sequence[Client],
    method: Method,
    schedule: Schedule,
    *,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,  # the global model, after each round
    held: Sequence[Client] | None = None,  # held-out rows of each client, measured by all after each round
    loss: Loss = F.cross_entropy,
    seed: int = 0,
    guard: Guard | None = None,
    proxy: Tensor | None = None,
    mods: Sequence[Mod] = (),
    root: Client | None = None,  # the server's own rows, for ``combine=FLTrust()``
) -> FlowerRun:
    """Run a method on Flower's ClientApp, messages and strategy in this process: the bits of the loop engine."""
    require(len(clients) > 0, "clients", "none", "somebody must train", "pass at least one")
    fits, why = held is None or len(held) == len(clients), "each client measures on rows of its own"
    require(fits, "held", f"rows of {len(held or ())}", why, f"pass rows for each of {len(clients)} clients")
    held_of = None if held is None else held.__getitem__
    made = partial(client_app, method, make_model, clients.__getitem__, schedule, loss=loss, held_of=held_of, mods=mods)
    app = made() if not isinstance(method, SecureSum) or not method.signed else _app_each(made, len(clients))
    share = 0.0 if held is None else 1.0
    with errors_alone("flwr"):
        server = strategy(
            method, schedule, make_model, len(clients), seed=seed, guard=guard, proxy=proxy, patience=0.0,
            evaluation=share, rows=[len(client) for client in clients], root=root,
        )  # fmt: skip

    def measured(number: int, arrays: Any) -> MetricRecord | None:
        if evaluate is None or not number:
            return None
        load_(server.model, server.params, server.buffers)
        return MetricRecord(dict(evaluate(server.model)))

    grid = InProcessGrid(app, len(clients))
    with errors_alone("flwr"):
        result = server.start(grid, server.initial_arrays(), schedule.rounds, evaluate_fn=measured)
    metrics = {n: _numbers(result, n) for n in range(1, schedule.rounds + 1)}
    return FlowerRun(server.params, server.buffers, server.state, server.rounds, metrics)


def _app_each(made: Callable[..., ClientApp], clients: int) -> ClientAppCallable:
    """An app for each node, with a key of its own to sign by."""
    apps = [made(signer=signer) for signer in new_signers(clients).values()]
    return lambda message, context: apps[context.node_config["partition-id"]](message, context)


def _numbers(result: Any, number: int) -> dict[str, Any]:
    """Gather what was measured in a round by clients in training, by clients on held-out rows, and by the server."""
    held = {f"held-{name}": value for name, value in result.evaluate_metrics_clientapp.get(number, {}).items()}
    trained = result.train_metrics_clientapp.get(number, {})
    return {**trained, **held, **result.evaluate_metrics_serverapp.get(number, {})}
