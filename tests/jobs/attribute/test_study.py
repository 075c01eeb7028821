"""The study of influences: rows by seed, means over seeds, one case by its name."""

from __future__ import annotations

import json
import math

import pytest
from benchmarks import attribution as study

from sparing.report import Record


@pytest.fixture
def small(images, monkeypatch, tmp_path):
    """Two cases of digits, three drop sets, a result file of their own."""
    for name, value in {"SETS": 3, "SHARE": 0.1, "TESTS": (1, 4), "RESULT": tmp_path / "rows.json"}.items():
        monkeypatch.setattr(study, name, value)
    cases = {"digits": images(), "digits, rate 0.01": images(lr=0.01)}
    monkeypatch.setattr(study, "CASES", cases)
    return study


def test_a_seed_is_measured_by_every_way(small) -> None:
    row = small.measured("digits", 3)
    assert (row["case"], row["seed"], row["rows"], row["steps"], row["sets"]) == ("digits", 3, 40, 8, 3)
    for way in ("exact", "grad-dot", "grad-cosine", "random"):
        assert -1 <= row[f"{way}_least"] <= row[f"{way}_each"] <= 1
    assert row["error"] < 1  # exact influences say more of a run of eight steps than no change at all would


def test_an_exact_name_is_one_case_and_what_is_there_is_kept(small, monkeypatch) -> None:
    asked = []

    def measured(name: str, seed: int) -> dict[str, object]:
        asked.append((name, seed))
        return {"case": name, "seed": seed, "rows": 1, "steps": 1, "sets": 1, "exact_each": float(seed)}

    monkeypatch.setattr(small, "measured", measured)
    for words, count in (("--only digits --seeds 2", 2), ("--only rate --seeds 1", 3), ("--seeds 2", 4)):
        monkeypatch.setattr("sys.argv", ["attribution", *words.split()])
        small.main()
        assert len(asked) == count
    assert asked == [("digits", 0), ("digits", 1), ("digits, rate 0.01", 0), ("digits, rate 0.01", 1)]
    found = {row["case"]: row for row in json.loads(small.RESULT.read_text())["tables"]["summary"]}
    assert (found["digits"]["n"], found["digits"]["exact_each"]) == (2, 0.5)
    assert found["digits"]["exact_each_se"] == pytest.approx(math.sqrt(0.5) / math.sqrt(2))


def test_one_seed_has_no_error(small) -> None:
    record = Record(question="", settings={}, seed=0, environment={})
    record.add("seeds", case="digits", seed=0, rows=1, steps=1, sets=1, exact_each=0.25)
    small.summarised(record)
    assert record.table("summary")[0]["exact_each_se"] is None
