"""What happened in the rounds of a Flower run, and what replies may tell: read as if anybody had written them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import MetricRecord, RecordDict
from torch import Tensor, nn

from sparing.errors import require
from sparing.federated.faults import HEAVY, Fault, Guard
from sparing.federated.flower_records import ARRAYS, get_state, vector_of
from sparing.federated.loop import norm_names, steps_of
from sparing.federated.methods import Update, Vector
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


def row_of(one: FlowerRound) -> dict[str, Any]:
    """Return a round as plain JSON."""
    return asdict(one)


def round_of(row: Mapping[str, Any]) -> FlowerRound:
    """Return the round that ``row_of`` wrote."""
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return FlowerRound(**{**row, **lists, "faults": tuple(Fault(**fault) for fault in row["faults"])})


def known_weights(schedule: Schedule, clients: int, rows: Sequence[int] | None) -> dict[int, float] | None:
    """Return how much each client counts, or None if only the clients know: by rows that the server was not told."""
    if schedule.weights == "uniform":
        return dict.fromkeys(range(clients), 1.0)
    return None if rows is None else {client: float(count) for client, count in enumerate(rows)}


def known_steps(schedule: Schedule, model: nn.Module, rows: Sequence[int] | None) -> list[int] | None:
    """Return how many local steps each client makes in a round, or None if only the clients know."""
    normed = bool(norm_names(model))
    return None if rows is None else [steps_of(count, schedule, normed=normed) for count in rows]


def steps_made(contents: Mapping[int, RecordDict], known: Sequence[int] | None, guard: Guard) -> dict[int, int]:
    """Return how many local steps each client made, as far as the server knows or believes; 0 for a bad claim."""
    if known is not None:
        return {client: known[client] for client in contents}
    claims = dict.fromkeys(contents, 0)
    for client, content in contents.items():
        made = _record(content).get("steps")
        if isinstance(made, int) and made > 0:
            claims[client] = made
    most = (guard.heavy or HEAVY) * statistics.median(claims.values() or [0])
    return {client: int(min(made, most)) for client, made in claims.items()}


def update_of(
    client: int, content: RecordDict, params: Vector, buffers: Vector, beside: Collection[str], weight: str
) -> Update:
    """Read a client's update; values are checked later, by ``faults.sift``."""
    record, template = content.array_records[ARRAYS], {**params, **buffers}
    if strange := sorted(record.keys() - template.keys()):
        raise KeyError(f"{strange[0]} is no tensor of the model")
    extras = get_state(content, template)
    if extras.keys() != set(beside):
        raise KeyError(f"{sorted(extras)} travels beside the model, not {sorted(beside)}")
    for name, vector in extras.items():
        if any(value.shape != template[key].shape for key, value in vector.items()):
            raise ValueError(f"{name} has other shapes than the model")
    claim = float(_record(content)[weight])
    return Update(client, vector_of(record, params), claim, extras, vector_of(record, buffers))


def alike(contents: Sequence[RecordDict], weights: Sequence[float], weight: str) -> list[RecordDict]:
    """Keep the metrics that all clients have as finite numbers, and let each count as the server counts it."""
    records = [_record(content) for content in contents]
    names = [name for name in records[0] if all(_is_finite(record.get(name)) for record in records)]
    return [
        RecordDict({"metrics": MetricRecord({**{name: record[name] for name in names}, weight: share})})
        for record, share in zip(records, weights, strict=True)
    ]


def rows_measured(content: RecordDict) -> float:
    """Return on how many held-out rows a client says that it measured; ``ValueError`` for a bad claim."""
    record = _record(content)
    rows = record.get("num-examples")
    if not isinstance(rows, int | float) or not rows > 0:
        raise ValueError("no number of held-out rows")
    if spoilt := [name for name, value in record.items() if not _is_finite(value)]:
        raise ValueError(f"{spoilt[0]} is not finite")
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


def check_counts(evaluation: float, clients: int, rows: Sequence[int] | None, *, resumes: bool, kept: bool) -> None:
    """Refuse numbers that cannot be, and a run that goes on from nothing."""
    require(0 <= evaluation <= 1, "evaluation", evaluation, "it is a share of the clients", "pass 0 <= share <= 1")
    require(clients >= 1, "clients", clients, "somebody must train", "pass the number of all clients")
    fits = rows is None or len(rows) == clients
    require(fits, "rows", f"of {len(rows or ())} clients", f"there are {clients}", "pass the rows of every client")
    why, do = "there is no file to go on from", "pass checkpoint=, the file of the run"
    require(kept or not resumes, "resume", True, why, do)


def check_norms(schedule: Schedule, model: nn.Module, proxy: Tensor | None) -> None:
    """Refuse to estimate statistics without rows to estimate them from."""
    lacks = schedule.batch_norm == "recalibrate" and proxy is None and bool(norm_names(model))
    got, why = '"recalibrate" without proxy', "the server needs rows of its own to estimate the statistics"
    require(not lacks, "batch_norm", got, why, 'pass proxy=inputs, or batch_norm="average"')
