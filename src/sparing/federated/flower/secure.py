"""Secure aggregation on Flower: a mod at each client, and the server's exchanges around the one that trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid
from torch import Tensor

from sparing.errors import RunError
from sparing.federated.flower.records import ARRAYS, METRICS, config_int, config_of, vector_of
from sparing.federated.flower.waiting import collect
from sparing.federated.methods.interface import Update, Vector
from sparing.federated.methods.secure import SecureSum, moves_of, summed
from sparing.federated.secure.protocol import SecureClient, SecureServer, Stage, threshold_of
from sparing.federated.secure.signing import Signer
from sparing.federated.server.closing import OpenRound

SECURE = "secure"
"""Record of a message that belongs to a masked sum."""

_STATE = "sparing/secure"  # record of a client's secrets between the exchanges of a round
_KEPT = ("keys", "held")


def secure_mod(
    method: SecureSum,
    params_of: Callable[[ConfigRecord], Mapping[str, Tensor]],
    signer: Signer | None = None,
    asked_by_plan: int = 0,  # clients of a round, where they sign: the server's word does not count
) -> Mod:
    """Return the mod that masks what a ClientApp sends; ``client_app`` adds it for a ``SecureSum`` by itself.

    An update without masks never leaves the client, nor do its metrics: whatever the app reports stays with it.
    ``params_of`` gives names, shapes and dtypes of the parameters, from the server's configuration of the round.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        asked = config_of(message.content, SECURE) if message.has_content() else ConfigRecord()
        if not asked:
            if message.metadata.message_type == MessageType.TRAIN:
                raise RunError("secure sum: the server asks for an update without masks; nothing is sent")
            return call_next(message, context)
        stage = Stage(asked["stage"])
        begins = stage is Stage.KEYS
        client = _begun(asked, method, signer, asked_by_plan) if begins else _load(context.state, method, signer)
        if stage is Stage.VECTORS:
            # Held before the app runs, which may empty the record that it was given.
            template = params_of(config_of(message.content))
            base = vector_of(message.content.array_records[ARRAYS], template)
            reply = call_next(message, context)
            if reply.has_error():
                return reply
            after = vector_of(reply.content.array_records[ARRAYS], template)
            answer: dict[str, object] = {
                "vector": client.mask(_listed(asked), method.ring.encode(moves_of(base, after)))
            }
        else:
            answer = _answer(client, stage, asked)
        _save(context.state, None if stage is Stage.UNMASK else client)
        content = RecordDict({SECURE: ConfigRecord(answer)})
        if stage is Stage.VECTORS:
            content[METRICS] = MetricRecord({"one": 1.0})
        return Message(content, reply_to=message)

    return mod


def _begun(asked: ConfigRecord, method: SecureSum, signer: Signer | None, asked_by_plan: int) -> SecureClient:
    """Begin a round with fresh secrets; a client that signs knows its number and the threshold by itself."""
    number = config_int(asked, "client")
    if signer is not None and number != signer.number:
        raise RunError(f"client {signer.number}: secure sum: the server calls it client {number}")
    need = threshold_of(method.threshold, asked_by_plan or config_int(asked, "asked"))
    return SecureClient(number, need, method.ring, signer=signer)


def _answer(client: SecureClient, stage: Stage, asked: ConfigRecord) -> dict[str, object]:
    """What a client replies to an exchange in which nothing is trained."""
    if stage is Stage.KEYS:
        return {"keys": client.publish()}
    if stage is Stage.SHARES:
        bound, sealed = client.share(_listed(asked))
        return {"bound": bound, **_lists(sealed)}
    survivors = [int(who) for who in asked["survivors"]]
    if stage is Stage.SIGNATURES:
        return {"signature": client.sign(survivors)}
    return _lists(client.reveal(survivors, _listed(asked)))


class SecureRound:
    """The server's side of one round: what goes before and after the messages that train."""

    def __init__(
        self, method: SecureSum, grid: Grid, nodes: Mapping[int, int], params: Vector, number: int, timeout: float,
        absent: frozenset[int] = frozenset(), asked_by_plan: int = 0,
    ) -> None:  # fmt: skip
        """Take who was asked: client -> node, for how many seconds an exchange waits, and for whom it does not."""
        size = sum(value.numel() for value in params.values())
        self._absent = absent
        self.silent: frozenset[int] = frozenset()  # clients that did not answer some exchange before it closed
        self._method, self._grid, self._nodes, self._number, self._timeout = method, grid, nodes, number, timeout
        asked = asked_by_plan if method.signed else len(nodes)
        need = threshold_of(method.threshold, asked)
        self.server = SecureServer(method.ring, asked, need, size, signed=method.signed)

    def begin(self) -> dict[int, ConfigRecord]:
        """Exchange keys and shares; return what goes into the message that trains, for each client still there."""
        asks = {who: {"asked": len(self._nodes), "client": who} for who in self._nodes}
        published = self._exchange(Stage.KEYS, asks)
        keys = self.server.take_keys({who: _bytes(record, "keys") for who, record in published.items()})
        shared = self._exchange(Stage.SHARES, {who: _lists(keys) for who in keys})
        routed = self.server.take_shares(
            {who: (_bytes(record, "bound"), _listed(record)) for who, record in shared.items()}
        )
        return {who: ConfigRecord({"stage": Stage.VECTORS.value, **_lists(sealed)}) for who, sealed in routed.items()}

    def finish(self, replies: Mapping[int, RecordDict], params: Vector) -> Update:
        """Take the masked vectors, unmask their sum, and return the update that stands for it."""
        survivors = self.server.take_vectors(
            {who: _bytes(config_of(content, SECURE), "vector") for who, content in replies.items()}
        )
        asks: dict[int, dict[str, object]] = {who: {"survivors": list(survivors)} for who in survivors}
        if self._method.signed:
            signed = self._exchange(Stage.SIGNATURES, asks)
            proofs = self.server.take_signatures({who: _bytes(record, "signature") for who, record in signed.items()})
            asks = {who: {**asks[who], **_lists(proofs)} for who in proofs}
        told = self._exchange(Stage.UNMASK, asks)
        total = self.server.take_unmasking({who: _listed(record) for who, record in told.items()})
        return summed(params, self._method.ring.decode(total), len(survivors))

    def _exchange(self, stage: Stage, asks: Mapping[int, Mapping[str, object]]) -> dict[int, ConfigRecord]:
        """Ask clients and return the records of those that answer."""
        messages = [
            Message(
                RecordDict({SECURE: ConfigRecord({"stage": stage.value, **says})}), self._nodes[who], MessageType.QUERY,
                group_id=str(self._number),
            )
            for who, says in asks.items()
        ]  # fmt: skip
        clients = {self._nodes[who]: who for who in asks}
        answers: dict[int, ConfigRecord] = {}
        waiting = OpenRound(tuple(asks), len(asks), self._absent)
        for reply in collect(self._grid, messages, self._timeout, waiting, clients, {}):
            who = clients.get(reply.metadata.src_node_id)
            if who is not None and who not in answers and not reply.has_error():
                answers[who] = config_of(reply.content, SECURE)
        self.silent |= asks.keys() - waiting.answered
        return answers


def _lists(texts: Mapping[int, bytes]) -> dict[str, object]:
    return {"who": list(texts), "what": list(texts.values())}


def _listed(record: ConfigRecord) -> dict[int, bytes]:
    """Read what ``_lists`` wrote, as untrusted input: another form is no texts at all."""
    who, what = record.get("who", []), record.get("what", [])
    fine = isinstance(who, list) and isinstance(what, list) and len(who) == len(what)
    if not fine or not all(isinstance(one, int) for one in who) or not all(isinstance(one, bytes) for one in what):
        return {}
    return dict(zip(who, what, strict=True))


def _bytes(record: ConfigRecord, name: str) -> bytes:
    value = record.get(name)
    return value if isinstance(value, bytes) else b""


def _save(records: RecordDict, client: SecureClient | None) -> None:
    """Keep a client's secrets until the round's last exchange, after which they are gone."""
    for key in [key for key in records if key.startswith(_STATE)]:
        del records[key]
    if client is not None:
        secrets = {"mask": client.mask_key, "seal": client.seal_key, "seed": client.seed}
        records[_STATE] = ConfigRecord({"number": client.number, "threshold": client.threshold, **secrets})
        records[f"{_STATE}/told"] = ConfigRecord({"told": list(client.told)})
        for name in _KEPT:
            records[f"{_STATE}/{name}"] = ConfigRecord(_lists(getattr(client, name)))


def _load(records: RecordDict, method: SecureSum, signer: Signer | None) -> SecureClient:
    kept = config_of(records, _STATE)
    if not kept:
        raise RunError("secure sum: this client published no keys in this round, or was restarted since")
    keys, held = (_listed(config_of(records, f"{_STATE}/{name}")) for name in _KEPT)
    return SecureClient(
        config_int(kept, "number"), config_int(kept, "threshold"), method.ring, mask_key=_bytes(kept, "mask"),
        seal_key=_bytes(kept, "seal"), seed=_bytes(kept, "seed"), keys=keys, held=held, signer=signer,
        told=tuple(config_of(records, f"{_STATE}/told").get("told", ())),
    )  # fmt: skip
