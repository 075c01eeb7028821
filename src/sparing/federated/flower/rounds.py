"""What happened in the rounds of a Flower run, and how replies are read: as untrusted input."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import MetricRecord, RecordDict

from sparing.errors import require
from sparing.federated.client.train import count_steps
from sparing.federated.flower.records import ARRAYS, get_state, vector_of
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.interface import Method, Update, Vector
from sparing.federated.server.faults import HEAVY, Fault, Guard
from sparing.federated.settings import Schedule


@dataclass(frozen=True, slots=True)
class FlowerRound:
    """What happened in a round."""

    number: int  # from 1, as Flower counts
    drawn: tuple[int, ...]
    received: tuple[int, ...]  # clients whose update counted
    faults: tuple[Fault, ...]  # clients that were left out; "absent" if not online or without an answer
    bytes_down: int  # arrays to all clients together
    bytes_up: int  # arrays from all clients together
    evaluated: tuple[int, ...] = ()  # clients that measured the new model on their held-out rows
    refused: tuple[str, ...] = ()  # nodes that were not believed to be a client, and why
    unneeded: tuple[int, ...] = ()  # clients that were asked, and not waited for when enough had answered
    absent: tuple[int, ...] = ()  # clients that no round waits for until they answer in time again


def round_from_json(row: Mapping[str, Any]) -> FlowerRound:
    """Return the round from its ``asdict`` after JSON, which has lists for tuples."""
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return FlowerRound(**{**row, **lists, "faults": tuple(Fault(**fault) for fault in row["faults"])})


def known_weights(schedule: Schedule, clients: int, rows: Sequence[int] | None) -> dict[int, float] | None:
    """Return how much each client counts, or None if only the clients know their rows."""
    if schedule.weights == "uniform":
        return dict.fromkeys(range(clients), 1.0)
    return None if rows is None else {client: float(count) for client, count in enumerate(rows)}


def known_steps(schedule: Schedule, rows: Sequence[int] | None, *, normed: bool) -> list[int] | None:
    """Return how many local steps each client makes in a round, or None if only the clients know."""
    return None if rows is None else [count_steps(count, schedule, normed=normed) for count in rows]


def local_steps(contents: Mapping[int, RecordDict], known: Sequence[int] | None, guard: Guard) -> dict[int, int]:
    """Return how many local steps each client made, as far as the server knows or believes; 0 for a bad claim."""
    if known is not None:
        return {client: known[client] for client in contents}
    claims = dict.fromkeys(contents, 0)
    for client, content in contents.items():
        made = _record(content).get("steps")
        if isinstance(made, int) and made > 0:
            claims[client] = made
    # A claim only widens the distance that an update may go, so it is capped rather than refused.
    most = (guard.heavy or HEAVY) * statistics.median(claims.values() or [0])
    return {client: int(min(made, most)) for client, made in claims.items()}


def read_update(
    client: int, content: RecordDict, params: Vector, buffers: Vector, extra_names: Collection[str], weight: str
) -> Update:
    """Read a client's update; values are checked later, by ``faults.filter_results``."""
    record, template = content.array_records[ARRAYS], {**params, **buffers}
    if strange := sorted(record.keys() - template.keys()):
        raise KeyError(f"{strange[0]} is no tensor of the model")
    extras = get_state(content, template)
    if extras.keys() != set(extra_names):
        raise KeyError(f"{sorted(extras)} travels beside the model, not {sorted(extra_names)}")
    for name, vector in extras.items():
        if any(value.shape != template[key].shape for key, value in vector.items()):
            raise ValueError(f"{name} has other shapes than the model")
    claim = float(_record(content)[weight])
    return Update(client, vector_of(record, params), claim, extras, vector_of(record, buffers))


def common_metrics(contents: Sequence[RecordDict], weights: Sequence[float], weight: str) -> list[RecordDict]:
    """Keep the metrics that all clients have as finite numbers, and let each count as the server counts it."""
    records = [_record(content) for content in contents]
    names = [name for name in records[0] if all(_is_finite(record.get(name)) for record in records)]
    return [
        RecordDict({"metrics": MetricRecord({**{name: record[name] for name in names}, weight: share})})
        for record, share in zip(records, weights, strict=True)
    ]


def held_out_rows(content: RecordDict) -> float:
    """Return on how many held-out rows a client says that it measured; ``ValueError`` for a bad claim."""
    record = _record(content)
    rows = record.get("num-examples")
    if not isinstance(rows, int | float) or not rows > 0:
        raise ValueError("no number of held-out rows")
    if bad := [name for name, value in record.items() if not _is_finite(value)]:
        raise ValueError(f"{bad[0]} is not finite")
    return float(rows)


def bytes_in(content: RecordDict) -> int:
    """Return the size of all arrays of a message (bytes)."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def _record(content: RecordDict) -> MetricRecord:
    found = next(iter(content.metric_records.values()), None)
    if found is None:
        raise KeyError("no metrics")
    return found


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def check_counts(evaluation: float, clients: int, rows: Sequence[int] | None, method: Method) -> None:
    """Refuse numbers that cannot be."""
    require(0 <= evaluation <= 1, "evaluation", evaluation, "it is a share of the clients", "pass 0 <= share <= 1")
    require(clients >= 1, "clients", clients, "somebody must train", "pass the number of all clients")
    fits = rows is None or len(rows) == clients
    require(fits, "rows", f"of {len(rows or ())} clients", f"there are {clients}", "pass the rows of every client")
    why = "an update is divided by how far its client's steps go, and a false claim of few would stretch it"
    told = rows is not None or not isinstance(method, FedNova)
    require(told, "rows", "None with FedNova", why, "pass the rows of every client")
