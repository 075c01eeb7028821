"""Where a run stands after a round, and its file: one safetensors file, whole or not at all, resumed to the same bits.

Momentum starts anew in each round and all randomness comes from streams of named labels, so between two rounds the
vectors, the states and the number of the round are all there is. The file holds a hash of itself, so that no byte of
it can change unseen.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from sparing.errors import UserError, require
from sparing.federated.methods import State, Vector
from sparing.federated.packing import pack, unpack
from sparing.federated.settings import Schedule
from sparing.report.atomic import write_whole

_FORMAT, _VERSION = "sparing.federated", 2
_UNSEALED = b"0" * 64
_ANEW = "remove it and resume to begin anew"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Standing:
    """Everything that the next round depends on, and the record so far."""

    rounds: int = 0  # done
    params: Vector
    buffers: Vector
    server: State = field(default_factory=dict)  # the method's state
    extras: State = field(default_factory=dict)  # sent beside the model in the next round
    clients: dict[int, State] = field(default_factory=dict)  # states of those that have trained
    own: dict[int, Vector] = field(default_factory=dict)  # batch norm of each client that keeps its own
    rows: list[dict[str, Any]] = field(default_factory=list)  # measurements, one row a round


def fingerprint(schedule: Schedule, method: object, seed: int, sizes: list[int], params: Vector) -> dict[str, str]:
    """Describe a run, text by what it describes, so that another run's checkpoint is not mistaken for its own."""
    same = replace(schedule, rounds=1, warmup_rounds=0) if schedule.decay == "none" else schedule
    return {
        "schedule": f"{same!r}, warm-up {schedule.warmup_rounds}",
        "method": repr(method),
        "seed": str(seed),
        "clients": hashlib.sha256(repr(sizes).encode()).hexdigest(),
        "initial model": hashlib.sha256(pack(params)).hexdigest(),
    }


def write(standing: Standing, path: str | PathLike[str], run: dict[str, str]) -> Path:
    """Write the state of a run; a file that is there is replaced in one step."""
    tree = {
        "params": standing.params,
        "buffers": standing.buffers,
        "server": standing.server,
        "extras": standing.extras,
        "clients": {str(client): state for client, state in standing.clients.items()},
        "own": {str(client): vector for client, vector in standing.own.items()},
    }
    known = {"format": _FORMAT, "version": _VERSION, "sha256": _UNSEALED.decode()}
    data = pack(tree, known | {"run": run, "rounds": standing.rounds, "rows": standing.rows})
    return write_whole(path, data.replace(_UNSEALED, hashlib.sha256(data).hexdigest().encode(), 1))


def read(path: str | PathLike[str], run: dict[str, str]) -> Standing:
    """Read what ``write`` wrote; refuse a file that is missing, damaged or of another run."""
    name = Path(path).name
    try:
        data = Path(path).read_bytes()
        tree, facts = unpack(data)
        whole = (facts["format"], facts["version"]) == (_FORMAT, _VERSION)
        sealed = str(facts["sha256"]) if whole else ""
    except OSError as error:
        raise UserError("checkpoint", got=name, why=f"it cannot be read ({error.strerror})", do=_ANEW) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError("checkpoint", got=name, why=str(error), do=_ANEW) from None
    require(whole, "checkpoint", name, f"no {_FORMAT} of version {_VERSION}", _ANEW)
    same = hashlib.sha256(data.replace(sealed.encode(), _UNSEALED, 1)).hexdigest() == sealed
    require(same, "checkpoint", name, "it changed since it was written", _ANEW)
    if odd := [what for what in run if facts["run"].get(what) != run[what]]:
        raise UserError(
            "checkpoint",
            got=f"{name} of another run",
            why=f"it differs in {', '.join(odd)}",
            do="pass the same settings, or resume=False to begin anew",
        )
    return Standing(
        rounds=facts["rounds"],
        params=tree["params"],
        buffers=tree["buffers"],
        server=tree["server"],
        extras=tree["extras"],
        clients={int(client): state for client, state in tree["clients"].items()},
        own={int(client): vector for client, vector in tree["own"].items()},
        rows=facts["rows"],
    )
