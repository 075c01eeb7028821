"""The page says what the record has."""

from __future__ import annotations

import pytest

from sparing.jobs.federate import run
from sparing.jobs.federate.page import answer, caveats
from sparing.jobs.federate.tables import wilson
from sparing.report import Figure


def drawn_once(monkeypatch):
    """Draw one picture of each kind, for a desk alone: drawing is what a page takes its time for."""
    draw, made, titles = Figure.svg, {}, set()

    def svg(self, theme="light", *, narrow=False):
        titles.add(self.title)
        kind = self.draw.__qualname__
        if kind not in made:
            made[kind] = draw(self)
        return made[kind]

    monkeypatch.setattr(Figure, "svg", svg)
    return titles


def test_the_page_has_the_numbers_of_the_record(tiny, monkeypatch):
    pictures = drawn_once(monkeypatch)
    settings = tiny(method=("fedavg", "fedsign"))
    record = run(settings)
    text = (settings.out / "report.html").read_text()
    rows = record.table("methods")
    best = max(rows, key=lambda row: row["accuracy"])
    assert f"{100 * best['accuracy']:.1f} %" in answer(record)
    assert all(f"{row['method']} {100 * row['accuracy']:.1f} %" in text for row in rows)
    assert "Every byte was foretold" in text
    assert f"{rows[0]['predicted_steps']:,}" in text
    assert "of 50 test rows" in text
    assert "One seed (0)." in text
    assert [row["bytes_up"] for row in rows] == [row["predicted_up"] for row in rows]
    assert len(pictures) == 8
    assert any("own-sign and hinge" in note for note in caveats(record))


def test_the_interval_of_a_share_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for hits, n in ((0, 20), (7, 20), (500, 1000)):
        known = stats.binomtest(hits, n).proportion_ci(0.95, "wilson")
        assert wilson(hits / n, n) == pytest.approx((known.low, known.high), abs=1e-6)
