"""A result file that is filled over many runs says which."""

from __future__ import annotations

import json

from benchmarks.writers import writers


def test_a_run_is_named_once_and_those_before_it_stay(tmp_path):
    path = tmp_path / "rows.json"
    first = {"commit": "a", "cpu": "x", "time": "1", "memory": 3}
    assert writers(path, first) == [{"commit": "a", "cpu": "x", "time": "1"}]
    path.write_text(json.dumps({"environment": first, "rows": {}}))  # of before there was a list
    later = [writers(path, first | {"time": "2"}), writers(path, first | {"commit": "b"})]
    assert [[(one["commit"], one["time"]) for one in each] for each in later] == [
        [("a", "1")],
        [("a", "1"), ("b", "1")],
    ]
    path.write_text(json.dumps({"environment": first, "writers": later[1]}))
    assert writers(path, first | {"commit": "b", "time": "3"}) == later[1]
    assert len(writers(path, first)) == 3  # a file that went back to the first


def test_a_store_writes_it(tmp_path, monkeypatch):
    from benchmarks.valley import store

    monkeypatch.setattr(store, "RESULTS", tmp_path)
    for name in ("a", "a", "b"):
        monkeypatch.setattr(store, "_about", lambda name=name: {"commit": name})
        kept = store.Store("text")
        kept.once(f"row {len(kept.rows)}", lambda: {"value": 1})
    document = json.loads((tmp_path / "valley_text.json").read_text())
    assert [one["commit"] for one in document["writers"]] == ["a", "b"]
    assert len(document["rows"]) == 3
