"""Whatever stands on the command line: one line of refusal, status 2, nothing written, never a traceback."""

from __future__ import annotations

import dataclasses
import importlib
from itertools import chain
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparing.cli import VERBS, main

GOES_NOWHERE = {
    "finetune": ["no-such-model", "no-such.jsonl"], "pretrain": ["--data", "no-such.txt"], "condense": ["--resume"],
    "federate": ["--data", "no-such.safetensors"],
}  # fmt: skip
"""Arguments with which a run ends before any work, whatever the other settings are."""

LEFT_OUT = {"out", "resume", "overwrite", "model", "data", "engine", "lisa", "lora"}
"""Settings that would undo that, are tried elsewhere, or bring in Flower, which takes seconds."""

STRANGE = [
    "0", "-1", "1", "2", "3", "1e308", "-1e308", "1e-320", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "1/0", "0/1",
    "", " ", "x", "None", "True", "é", "٣", "a\nb", "a\tb", "\x1b[2J", "\udcff", "x" * 300, "../..", "*", "=", ",",
    "1/3", "erk:", "er:-1", "*=1/2", "*=", "auto", "none", "80GB", "-5GB", "IIG", "NNN", "XYZ",
]  # fmt: skip


def options(verb: str) -> st.SearchStrategy[list[str]]:
    """Up to three settings of a verb with strange, random or no values."""
    settings = importlib.import_module(VERBS[verb].module).Settings
    hints = get_type_hints(settings)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    names = [name for name in hints if name not in {*LEFT_OUT, *groups}]
    names += [f"{group}.{field.name}" for group, hint in groups.items() for field in dataclasses.fields(hint)]
    names = [name.replace("_", "-") for name in names if name.partition(".")[0] not in LEFT_OUT]
    if verb == "finetune":
        names += ["lisa.active", "lisa.period", "lisa.blocks", "lisa.warmup", "lora.rank", "lora.alpha", "lora.dropout"]
    numbers = st.integers().map(str) | st.floats().map(str) | st.integers(-3, 300).map(str)
    values = st.sampled_from(STRANGE) | numbers | st.text(st.characters(exclude_characters="\0"), max_size=8)
    pair = st.tuples(st.sampled_from(names), values.filter(lambda value: not value.startswith("-h")))
    return st.lists(pair.map(lambda both: [f"--{both[0]}", both[1]]), max_size=3).map(lambda pairs: list(chain(*pairs)))


def check(verb: str, given_: list[str], where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    status = main([verb, *given_, *GOES_NOWHERE[verb], "--out", str(where / "out")])
    said = capsys.readouterr()
    assert (status, said.out) == (2, ""), said.err
    *notes, refusal = said.err.removesuffix("\n").split("\n")
    assert all(note.startswith("note: --") for note in notes)
    assert refusal.startswith("sparing: ")
    assert refusal.endswith(f"see `sparing {verb} --help`") or refusal.count("; ") >= 2
    assert list(where.iterdir()) == []


@pytest.mark.parametrize("verb", GOES_NOWHERE)
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_strange_settings(verb: str, data: st.DataObject, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(verb, data.draw(options(verb)), tmp_path, capsys)
