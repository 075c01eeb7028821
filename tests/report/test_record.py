"""A record is read as it was written, or refused."""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.report.record import Record, plain

_SPECIAL = {"NaN", "Infinity", "-Infinity"}
_CELLS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text().filter(lambda text: text not in _SPECIAL)
)
_NAMES = st.text(min_size=1).filter(lambda name: name not in {"table", "self"})


def small(**changes) -> Record:
    known = {"question": "How much?", "settings": {"steps": 3}, "seed": 0, "environment": {"python": "3"}}
    return Record(**known | changes)


def same(one: object, other: object) -> bool:
    """Equality that takes NaN for itself and tells 1 from 1.0 and True."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(), st.lists(st.tuples(st.text(), st.dictionaries(_NAMES, _CELLS, max_size=4)), max_size=5))
def test_what_is_read_is_what_was_written(tmp_path: Path, question: str, rows: list) -> None:
    record = small(question=question, seed=[1, 2], units={"peak": "B", "speed": "×"})
    for table, cells in rows:
        record.add(table, **cells)
    back = Record.read(record.write(tmp_path / "record.jsonl"))
    assert replace(back, rows=[]) == replace(record, rows=[])
    assert len(back.rows) == len(record.rows)
    for was, now in zip(record.rows, back.rows, strict=True):
        assert list(was) == list(now)
        assert all(same(was[name], now[name]) for name in was)


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    record = small()
    record.add("t", a=math.nan, b=math.inf, c=-math.inf)
    lines = record.write(tmp_path / "r").read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    header, row = (json.loads(line, parse_constant=refuse) for line in lines)
    assert row == {"table": "t", "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert header["format"] == "sparing.record"


def test_every_torn_file_is_refused(tmp_path: Path) -> None:
    record = small()
    for step in range(3):
        record.add("loss", step=step, loss=1.5, note="γ")
    whole = record.write(tmp_path / "whole").read_bytes()
    torn = tmp_path / "torn"
    for end in range(len(whole)):
        torn.write_bytes(whole[:end])
        with pytest.raises(UserError):
            Record.read(torn)
    torn.write_bytes(whole)
    assert Record.read(torn) == record


def _header(**changes: object) -> str:
    known = {"format": "sparing.record", "version": 1, "question": "?", "settings": {}, "seed": 0}
    return json.dumps(known | {"environment": {}, "units": {}, "rows": 1} | changes)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not strict JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"text": "a user\'s data"}\n', "not the header of a record"),
        (b"[" * 100_000, "not strict JSON"),
        (_header(version=2).encode(), "version is 2"),
        (_header(seed="zero").encode(), "lacks 'seed'"),
        (_header(units={"a": 1}).encode() + b'\n{"table": "t"}\n', "a unit is not a text"),
        (_header().encode() + b"\n[1]\n", "line 2 is not a row"),
        (_header().encode() + b'\n{"loss": 1}\n', "line 2 is not a row"),
        (_header().encode() + b'\n{"table": "t", "a": [1]}\n', "line 2 holds a value"),
        (_header().encode() + b'\n{"table": "t", "a": NaN}\n', "line 2 is not strict JSON"),
        (_header().encode() + b'\n{"table": "t"}\n{"table": "t"}\n', "1 whole rows are announced and 2 found"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=why):
        Record.read(path)


def test_a_missing_file_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        Record.read(tmp_path / "absent")


def test_scalars_of_numpy_and_torch_become_numbers() -> None:
    record = small()
    scalars = {"a": np.float32(0.5), "b": torch.tensor(2), "c": torch.tensor([1.5]), "d": np.bool_(True)}
    record.add("t", **scalars, e=Path("/data/x/y.txt"))
    assert record.table("t") == [{"a": 0.5, "b": 2, "c": 1.5, "d": True, "e": "y.txt"}]
    assert [type(cell) for cell in record.table("t")[0].values()] == [float, int, float, bool, str]


@pytest.mark.parametrize("cell", [[1, 2], {"a": 1}, torch.zeros(2), object(), "NaN", 1j])
def test_other_values_are_refused(cell: object) -> None:
    with pytest.raises(UserError, match="cell 'a'"):
        small().add("t", a=cell)


def test_a_lone_surrogate_cannot_stop_the_writing(tmp_path: Path) -> None:
    record = small(question="ok")
    record.add("t", a="\udc80")
    assert Record.read(record.write(tmp_path / "r")).table("t") == [{"a": "?"}]


def test_tables_in_order_of_first_use() -> None:
    record = small()
    for name in ("b", "a", "b"):
        record.add(name, x=1)
    assert record.tables == ["b", "a"]
    assert record.table("absent") == []


class Policy(enum.Enum):
    KEEP = "keep"


@dataclass(frozen=True)
class Uniform:
    pass


@dataclass(frozen=True)
class Draw:
    weights: tuple[float, ...] = (0.5, math.inf)
    state: Policy = Policy.KEEP


@dataclass(frozen=True)
class Settings:
    model: Path = Path("/srv/somebody/models/stories")
    data: Path = Path("data/texts.jsonl")
    written: str = "C:\\Users\\somebody\\x.txt"
    dtype: torch.dtype = torch.bfloat16
    draw: Draw = field(default_factory=Draw)
    sampler: Uniform = field(default_factory=Uniform)
    names: frozenset[str] = frozenset({"b", "a"})
    lr: float = math.nan
    act: object = math.sqrt
    thing: object = field(default_factory=object)


def test_settings_become_plain_json_without_folders_or_addresses() -> None:
    assert plain(Settings(), top=True) == {
        "model": "stories", "data": "data/texts.jsonl", "written": "x.txt", "dtype": "torch.bfloat16",
        "draw": {"kind": "Draw", "weights": [0.5, "Infinity"], "state": "keep"}, "sampler": "Uniform",
        "names": ["a", "b"], "lr": "NaN", "act": "sqrt", "thing": "object",
    }  # fmt: skip


@settings(max_examples=40)
@given(st.recursive(_CELLS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner)))
def test_plain_is_strict_json_and_stays_so(value: object) -> None:
    once = plain(value)
    assert json.loads(json.dumps(once, allow_nan=False)) == once
    assert plain(once) == once


def test_the_environment_is_filled_in_and_rows_are_found_by_their_cells() -> None:
    record = Record(question="?", settings={}, seed=0)
    assert record.environment["python"]
    for step in (1, 2):
        record.add("train", step=step, loss=1.0)
    assert record.table("train", step=2, loss=1.0) == [{"step": 2, "loss": 1.0}]
    assert record.table("train", step=3) == record.table("train", absent=1) == []
