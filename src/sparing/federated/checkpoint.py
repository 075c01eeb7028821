"""The state of a run after a round, and its file: one safetensors file, written whole or not at all.

Momentum restarts in each round and all randomness comes from streams of named labels, so between two rounds the
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
from sparing.federated.methods.interface import State, Vector
from sparing.federated.packing import pack, unpack
from sparing.federated.settings import Schedule
from sparing.report.atomic import write_whole

_FORMAT, _VERSION = "sparing.federated", 2
_BLANK_HASH = b"0" * 64
_START_OVER = "remove it and resume to begin anew"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunState:
    """Everything that the next round depends on, and the record so far."""

    rounds: int = 0  # done
    params: Vector
    buffers: Vector
    server: State = field(default_factory=dict)  # the method's state
    extras: State = field(default_factory=dict)  # sent beside the model in the next round
    clients: dict[int, State] = field(default_factory=dict)  # states of those that have trained
    local_bn: dict[int, Vector] = field(default_factory=dict)  # batch norm of each client that keeps its own
    rows: list[dict[str, Any]] = field(default_factory=list)  # measurements, one row a round


def describe_run(schedule: Schedule, method: object, seed: int, sizes: list[int], params: Vector) -> dict[str, str]:
    """Describe a run, text by what it describes, so that another run's checkpoint is not mistaken for its own."""
    # Where the rate does not depend on the number of rounds, a run may be prolonged.
    same = replace(schedule, rounds=1, warmup_rounds=0) if schedule.decay == "none" else schedule
    return {
        "schedule": f"{same!r}, warm-up {schedule.warmup_rounds}",
        "method": repr(method),
        "seed": str(seed),
        "clients": hashlib.sha256(repr(sizes).encode()).hexdigest(),
        "initial model": hashlib.sha256(pack(params)).hexdigest(),
    }


def require_file(resume: bool, path: object | None) -> None:
    """Refuse to resume without a file."""
    why, do = "there is no file to go on from", "pass checkpoint=, the file of the run"
    require(path is not None or not resume, "resume", True, why, do)


def write(run_state: RunState, path: str | PathLike[str], run: dict[str, str]) -> Path:
    """Write the state of a run; a file that is there is replaced in one step."""
    tree = {
        "params": run_state.params,
        "buffers": run_state.buffers,
        "server": run_state.server,
        "extras": run_state.extras,
        "clients": {str(client): state for client, state in run_state.clients.items()},
        "own": {str(client): vector for client, vector in run_state.local_bn.items()},
    }
    known = {"format": _FORMAT, "version": _VERSION, "sha256": _BLANK_HASH.decode()}
    # The hash is that of the file with zeros in its own place, so it covers its header too.
    data = pack(tree, known | {"run": run, "rounds": run_state.rounds, "rows": run_state.rows})
    return write_whole(path, data.replace(_BLANK_HASH, hashlib.sha256(data).hexdigest().encode(), 1))


def read(path: str | PathLike[str], run: dict[str, str]) -> RunState:
    """Read what ``write`` wrote; refuse a file that is missing, damaged or of another run."""
    name = Path(path).name
    try:
        data = Path(path).read_bytes()
        tree, facts = unpack(data)
        known_format = (facts["format"], facts["version"]) == (_FORMAT, _VERSION)
        stored_hash = str(facts["sha256"]) if known_format else ""
    except OSError as error:
        raise UserError("checkpoint", got=name, why=f"it cannot be read ({error.strerror})", do=_START_OVER) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError("checkpoint", got=name, why=str(error), do=_START_OVER) from None
    require(known_format, "checkpoint", name, f"no {_FORMAT} of version {_VERSION}", _START_OVER)
    same = hashlib.sha256(data.replace(stored_hash.encode(), _BLANK_HASH, 1)).hexdigest() == stored_hash
    require(same, "checkpoint", name, "it changed since it was written", _START_OVER)
    if different := [what for what in run if facts["run"].get(what) != run[what]]:
        raise UserError(
            "checkpoint",
            got=f"{name} of another run",
            why=f"it differs in {', '.join(different)}",
            do="pass the same settings, or resume=False to begin anew",
        )
    return RunState(
        rounds=facts["rounds"],
        params=tree["params"],
        buffers=tree["buffers"],
        server=tree["server"],
        extras=tree["extras"],
        clients={int(client): state for client, state in tree["clients"].items()},
        local_bn={int(client): vector for client, vector in tree["own"].items()},
        rows=facts["rows"],
    )
