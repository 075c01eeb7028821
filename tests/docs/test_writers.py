"""A result file that is filled over many runs says which."""

from __future__ import annotations

import json

import pytest


def test_a_run_is_named_once_and_those_before_it_stay(tmp_path):
    from benchmarks.writers import writers

    path = tmp_path / "rows.json"
    first = {"commit": "a", "cpu": "x", "time": "1", "memory": 3}
    assert writers(path, first) == [{"commit": "a", "cpu": "x", "time": "1"}]
    path.write_text(json.dumps({"environment": first, "rows": {}}))  # of before there was a list
    later = [writers(path, first | {"time": "2"}), writers(path, first | {"commit": "b"})]
    assert [[(one["commit"], one["time"]) for one in each] for each in later] == [
        [("a", "1")],
        [("a", "1"), ("b", "1")],
    ]
    assert ["note" in one for one in later[1]] == [True, False]
    path.write_text(json.dumps({"environment": first, "writers": later[1]}))
    for commit in ("a", "b"):  # two processes in turn
        assert writers(path, first | {"commit": commit, "time": "3"}) == later[1]
    assert len(writers(path, first | {"command": "another"})) == 3


@pytest.mark.parametrize("kind", ["valley", "layers", "recipe", "table"])
def test_every_store_writes_it(tmp_path, monkeypatch, kind):
    from benchmarks import condense_recipe, condense_table
    from benchmarks.layers import store as layers
    from benchmarks.valley import store as valley

    path = tmp_path / "valley_text.json"
    monkeypatch.setattr(valley, "RESULTS", tmp_path)
    monkeypatch.setattr(condense_table, "RESULT", path)
    for at, name in enumerate("aab"):
        for part in (valley, layers, condense_recipe, condense_table):
            monkeypatch.setattr(part, "this_run", lambda name=name: {"commit": name})
        fill = {
            "valley": lambda at=at: valley.Store("text").once(str(at), lambda: {"value": 1}),
            "layers": lambda at=at: layers.Store(path, folder=tmp_path).put(str(at), {"value": 1}),
            "recipe": lambda at=at: condense_recipe.Table(path).row(str(at), lambda: {"value": 1}),
            "table": lambda at=at: condense_table.Table(None).row(str(at), lambda: {"value": 1}),
        }[kind]
        fill()
    document = json.loads(path.read_text())
    assert [one["commit"] for one in document["writers"]] == ["a", "b"]
    assert len(document["rows"]) == 3
