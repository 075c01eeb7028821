"""The controls of a run: what they reach, that they are told, and that every kind of model has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparing.jobs.pretrain import run, show, tables
from sparing.jobs.pretrain.control import bare_loss, note_controls
from sparing.jobs.pretrain.models import config_for
from sparing.report import Record


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "time_layer", lambda d_in, d_out, density, tokens: (d_in * 1e-6, d_out * 1e-6))


def test_a_run_says_what_its_controls_reach_and_whether_it_passed(settings, inputs, capsys):
    """Six steps on a story of lines that are all alike pass nothing."""
    record = run(settings)
    rows = {row["control"]: row["loss"] for row in record.table("controls")}
    loss = record.table("test")[0]["loss"]
    assert list(rows) == ["unigram", "bigram", "no body"]
    assert rows["bigram"] < rows["unigram"] < loss
    assert all(row["model_below"] == row["loss"] - loss for row in record.table("controls"))
    assert "Not passed: the model ends above unigram counts" in (settings.out / "report.html").read_text()
    show(record)
    assert "Not passed" in capsys.readouterr().out.splitlines()[-2]

    counts = Record(question="", settings=settings, seed=0)
    note_controls(replace(settings, control=False), inputs, None, counts, loss=loss)
    assert counts.table("controls") == record.table("controls")[:2]


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "muon"}, {"family": "gpt2"}, {"backend": "csr"}, {"dynamic": "gmp"}, {"masks": "2:4"}],
    ids=str,
)
def test_a_model_of_any_kind_has_a_control_without_a_body(settings, inputs, changes):
    own = replace(settings, **({"density": "1/2"} | changes))
    config = config_for(own, len(inputs.tokenizer), inputs.tokenizer.eos_token_id)
    loss = bare_loss(own, inputs, config)
    assert 2 < loss < 4  # ln 35 = 3.6 untrained
