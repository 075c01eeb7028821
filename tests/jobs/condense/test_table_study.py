"""The paper's table in miniature, run from its command to its rows."""

from __future__ import annotations

import dataclasses
import json

from benchmarks import condense_table as study


def test_the_table_is_filled_from_the_command_and_goes_on(small, inputs, monkeypatch, tmp_path) -> None:
    seen: list[int] = []

    def gather(name: str, *, held_out: int):
        seen.append(held_out)
        return inputs

    out = tmp_path / "table.json"
    monkeypatch.setattr(study, "gather", gather)
    monkeypatch.setattr(study, "BASE", dataclasses.replace(small, measurements=0))
    monkeypatch.setattr(study, "RATES", (0.1, 0.3))
    monkeypatch.setattr(study, "RESULT", out)
    case = study.Case(per_class=1, methods=("reverse", "hessian-free"), seeds=1, seconds=0.05, trial=0.02)
    monkeypatch.setattr(study, "CASES", (case,))
    monkeypatch.setattr(study.sys, "argv", ["condense_table"])
    study.main()
    rows = json.loads(out.read_text())["rows"]
    assert seen == [small.held_out_images]
    assert {"run 1 reverse 0", "run 1 hessian-free 0", "start 1", "trial 1 reverse 0.3"} <= set(rows)
    assert 0 <= rows["run 1 reverse 0"]["accuracy"] <= 100
    study.main()  # nothing is made again
    assert json.loads(out.read_text())["rows"] == rows
