"""Splits, topologies, records and federated checkpoints that somebody edited: read, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparing.errors import UserError
from sparing.federated import dirichlet
from sparing.federated.splits import load, save
from sparing.report import Record
from sparing.sharding.planner.config import Topology

SPLIT = {
    "seed": [1e999, "x", None, []], "alpha": [10**400, "x", []], "clients": [None, [[0], [0]], [[-1]], [1]],
}  # fmt: skip
TOPOLOGY = {"version": [2, True, "1"], "overlap": [1e999, 2, "x"], "axes": [[], [[]], [{}], [None] * 4, 3]}
RECORD = {
    "seed": [["x"], [None], [[1]], "0", 0.5], "rows": [-1, True, "0"], "units": [{"a": 1}, []], "settings": [[], 1],
}  # fmt: skip


def split(path: Path) -> Any:
    save(dirichlet(torch.arange(40) % 4, clients=4, alpha=1.0), path)
    return load


def topology(path: Path) -> Any:
    path.write_text(Topology(groups=2, per_group=2, inter="8Gbps", intra="80Gbps").to_json())
    return Topology.read


def record(path: Path) -> Any:
    Record(question="q", settings={}, seed=[0, 1]).write(path)
    return Record.read


CASES = [
    (make, key, value) for make, edits in ((split, SPLIT), (topology, TOPOLOGY), (record, RECORD))
    for key, values in edits.items() for value in values
]  # fmt: skip


@pytest.mark.parametrize(("make", "key", "value"), CASES, ids=lambda part: getattr(part, "__name__", str(part)[:20]))
def test_an_edited_entry(tmp_path: Path, make: Callable[[Path], Any], key: str, value: Any) -> None:
    path = tmp_path / "file.json"
    read = make(path)
    known = json.loads(path.read_text())
    assert key in known
    path.write_text(json.dumps(known | {key: value}) + "\n" * (make is record))
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [split, topology, record])
@pytest.mark.parametrize("content", [b"", b"null", b"[" * 5000, b"\xff\xfe", b'{"seed": ' + b"9" * 5000 + b"}"])
def test_what_is_none(tmp_path: Path, make: Callable[[Path], Any], content: bytes) -> None:
    path = tmp_path / "file.json"
    read = make(path)
    path.write_bytes(content)
    with pytest.raises(UserError):
        read(path)


def test_a_line_moves_no_cursor() -> None:
    """Names in a file may be anybody's: an escape is shown, not obeyed."""
    said = str(UserError("line 1", got="fields \x1b[2J\r", why="no such é", do="write\nothers"))
    assert said == "line 1: got fields \\x1b[2J\\r; no such é; write others"


def test_no_damaged_federated_checkpoint_loads_to_another_state(tmp_path: Path) -> None:
    from benchmarks.trust.damage import KINDS
    from benchmarks.trust.mutations import APART, tried
    from benchmarks.trust.sources import SOURCES

    source = SOURCES["federate"](tmp_path / "federate")
    rows = [tried(source, kind, range(5)) for kind in KINDS if ("federate", kind) not in APART]
    assert [row["wrong"] for row in rows if row["wrong"]] == []
    assert all(row["refused"] + row["equal"] == 5 for row in rows)
