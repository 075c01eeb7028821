"""The state of a run after a round, and its files: one safetensors file, written whole or not at all, and a log.

The log has what clients keep and the rows of measurements (``state_log``): it grows by what changed since the last
checkpoint, however many clients there are. Without one everything is in the one file.

Momentum restarts in each round and all randomness comes from streams of named labels, so between two rounds the
vectors, the states and the number of the round are all there is. The file holds a hash of itself, so that no byte of
it can change unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from sparing.errors import UserError, require
from sparing.federated.client.population import at_hand
from sparing.federated.client.train import Client
from sparing.federated.methods.interface import State, Vector
from sparing.federated.packing import pack, unpack
from sparing.federated.settings import Schedule
from sparing.federated.state_log import LOCAL_BN, STATE, ClientTrees, Ending, StateLog
from sparing.report.atomic import write_whole

_FORMAT, _VERSION = "sparing.federated", 3
_BLANK_HASH = b"0" * 64
_LATER = ("rows", "loss", "mixture")  # what checkpoints of earlier releases do not say
_START_OVER = "remove it and resume to begin anew"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunState:
    """Everything that the next round depends on, and the record so far."""

    rounds: int = 0  # done
    params: Vector
    buffers: Vector
    server: State = field(default_factory=dict)  # the method's state
    extras: State = field(default_factory=dict)  # sent beside the model in the next round
    clients: Mapping[int, State] = field(default_factory=ClientTrees)  # states of those that have trained
    # batch norm of each client that keeps its own
    local_bn: Mapping[int, Vector] = field(default_factory=partial(ClientTrees, kind=LOCAL_BN))
    rows: list[dict[str, Any]] = field(default_factory=list)  # measurements, one row a round
    initial: Vector = field(default_factory=dict)  # what round 1 sent, where it need not be what make_model makes


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


def describe_data(clients: Sequence[Client], loss: object, mixture: bool) -> dict[str, str]:
    """Describe what else decides a run: first rows of the clients at hand, name of the loss, how variances are mixed.

    All rows would cost their reading; other data, or the same in another order, mostly differ in their first rows.
    """
    found = hashlib.sha256()
    for at, one in enumerate(at_hand(clients)):
        for first in (one.inputs[:1], one.targets[:1]):
            dense = first.detach().to_dense().cpu().contiguous()
            found.update(f"{at} {dense.dtype} {tuple(dense.shape)}".encode())
            found.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    return {
        "rows": found.hexdigest(),
        "loss": getattr(loss, "__qualname__", type(loss).__name__),
        "mixture": str(mixture),
    }


def require_file(resume: bool, path: object | None) -> None:
    """Refuse to resume without a file."""
    why, do = "there is no file to go on from", "pass checkpoint=, the file of the run"
    require(path is not None or not resume, "resume", True, why, do)


def write(run_state: RunState, path: str | PathLike[str], run: dict[str, str], log: StateLog | None = None) -> RunState:
    """Write the state of a run; a file that is there is replaced in one step. Returns it with the clients on disk."""
    tree: dict[str, Any] = {
        "params": run_state.params, "buffers": run_state.buffers, "server": run_state.server,
        "extras": run_state.extras,
    }  # fmt: skip
    if run_state.initial:
        tree["initial"] = run_state.initial
    rest: dict[str, Any] = {"rows": run_state.rows}
    clients, local_bn = run_state.clients, run_state.local_bn
    if log is not None and isinstance(clients, ClientTrees) and isinstance(local_bn, ClientTrees):
        # The log first: the file that names its end is the one that counts.
        rest = {"log": asdict(log.append({STATE: clients.fresh, LOCAL_BN: local_bn.fresh}, run_state.rows))}
        clients, local_bn = clients.written(log), local_bn.written(log)
    else:
        tree["clients"] = {str(client): state for client, state in clients.items()}
        tree["own"] = {str(client): vector for client, vector in local_bn.items()}
    known = {"format": _FORMAT, "version": _VERSION, "sha256": _BLANK_HASH.decode()}
    # The hash is that of the file with zeros in its own place, so it covers its header too.
    data = pack(tree, known | {"run": run, "rounds": run_state.rounds} | rest)
    write_whole(path, data.replace(_BLANK_HASH, hashlib.sha256(data).hexdigest().encode(), 1))
    if log is not None:
        log.remove_others()
    return replace(run_state, clients=clients, local_bn=local_bn)


def read(
    path: str | PathLike[str], run: dict[str, str], clients: int = 0, *, most: int | None = None
) -> tuple[RunState, StateLog | None]:
    """Read what ``write`` wrote, of so many clients; refuse files that are missing, damaged or of another run.

    A run of more rounds than ``most`` is refused too: its model would pass for that of fewer.
    """
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
    _refuse_other(name, facts, run, most)
    log, rows = _reopened(Path(path), facts, clients)
    states = ClientTrees({int(client): state for client, state in tree.get("clients", {}).items()}, log)
    own = ClientTrees({int(client): one for client, one in tree.get("own", {}).items()}, log, LOCAL_BN)
    known_state = RunState(
        rounds=facts["rounds"],
        params=tree["params"],
        buffers=tree["buffers"],
        server=tree["server"],
        extras=tree["extras"],
        clients=states,
        local_bn=own,
        rows=rows,
        initial=tree.get("initial", {}),
    )
    return known_state, log


def _refuse_other(name: str, facts: Mapping[str, Any], run: Mapping[str, str], most: int | None) -> None:
    """Refuse a checkpoint of another run, or of more rounds than are asked for."""
    known = facts["run"]
    if different := [what for what in run if known.get(what, run[what] if what in _LATER else None) != run[what]]:
        raise UserError(
            "checkpoint",
            got=f"{name} of another run",
            why=f"it differs in {', '.join(different)}",
            do="pass the same settings, or resume=False to begin anew",
        )
    got, do = f"{facts['rounds']} rounds done", "pass as many rounds, or resume=False"
    require(most is None or facts["rounds"] <= most, "checkpoint", got, f"the schedule has {most}", do)


def _reopened(path: Path, facts: dict[str, Any], clients: int) -> tuple[StateLog | None, list[dict[str, Any]]]:
    """The states that a checkpoint names, and the rows of measurements."""
    if "log" not in facts:
        return None, facts["rows"]
    try:
        return StateLog.reopened(path, clients, Ending(**facts["log"]))
    except OSError as error:
        why = f"the states of its clients cannot be read ({error.strerror})"
    except (ValueError, TypeError) as error:
        why = str(error)
    raise UserError("checkpoint", got=path.name, why=why, do=_START_OVER)
