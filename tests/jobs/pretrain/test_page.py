"""The page says in words and numbers what the record holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparing.jobs.pretrain import Pretrain, job, prices, run
from sparing.jobs.pretrain.page import (
    answer,
    cost_section,
    loss_section,
    masks_section,
    rates_section,
    sparsity,
    write_page,
)


@pytest.fixture
def record(settings: Pretrain, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prices, "time_layer", lambda d_in, d_out, density, tokens: (d_in * 1e-6, d_out * 1e-6))
    monkeypatch.setattr(job, "write_page", lambda record, path, caveats: path.write_text("\n".join(caveats)))
    return run(replace(settings, dynamic="gmp", warmup=0))


def test_the_page_holds_every_chapter(record, settings: Pretrain):
    caveats = (settings.out / "report.html").read_text(encoding="utf-8").splitlines()
    record.settings["out"] = "out"  # as it is while the job writes its page
    assert any(words.startswith("No rule is known to transfer rates") for words in caveats)
    page = write_page(record, settings.out / "report.html", caveats).read_text(encoding="utf-8")
    for words in ("Loss", "Text", "Learning rates", "Sparsity", "Cost of a step", "How to reproduce", "Caveats"):
        assert f">{words}</h2>" in page, words
    assert "*.mlp.up_proj" in page
    assert "Density falls from 1.00 to 0.5" in page
    assert "No rule is known to transfer rates" in page
    assert str(Path(settings.out).parent) not in page
    assert str(Path(settings.data[0]).parent) not in page


def test_the_answer_has_the_numbers(record):
    test = record.table("test")[0]
    words = answer(record)
    assert f"**{test['loss']:.2f} nat/token**" in words
    assert "50.0 % of its hidden weights" in words


def test_the_loss_that_rises_is_told(record):
    assert loss_section(record).figures[0].title.startswith("Held-out loss falls to ")
    record.rows.append({"table": "held_out", "step": 7, "loss": 99.0, "seconds": 1.0})
    assert "then rises" in loss_section(record).figures[0].title


def test_a_dense_run_has_no_masks(record):
    record.rows[:] = [row for row in record.rows if row["table"] != "layers"]
    assert sparsity(record) == "all of its weights"


def test_tables_are_those_of_the_record(record):
    short, whole = rates_section(record).tables
    assert [row["weights"] for row in short.rows][-2:] == ["lm_head", "norms and biases (5)"]
    assert sum(row["parameters"] for row in short.rows[:-1]) + 5 * 16 == record.table("cost")[0]["measured"]
    assert len(whole.rows) == len(record.table("plan"))
    by_kind, every = masks_section(record).tables
    assert (len(by_kind.rows), len(every.rows)) == (7, 14)
    assert sum(row["live"] for row in by_kind.rows) == sum(row["live"] for row in every.rows)
    assert by_kind.rows[0]["density"] == pytest.approx(0.5, abs=0.01)
    assert [row["quantity"] for row in cost_section(record).tables[0].rows][:2] == ["parameters", "live weights"]
