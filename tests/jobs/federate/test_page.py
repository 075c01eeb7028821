"""The page says what the record has."""

from __future__ import annotations

import pytest
import torch

from sparing.jobs.federate import run
from sparing.jobs.federate.page import answer, caveats
from sparing.jobs.federate.tables import pair_rows, wilson
from sparing.report import Figure, Record


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


def test_two_methods_are_compared_on_the_same_rows(tiny, pageless):
    record = run(tiny(method=("fedavg", "fedsign", "own-sign"), lr=0.3))
    rows = {row["method"]: row for row in record.table("methods")}
    pairs = record.table("pairs")
    assert len(pairs) == 3
    for pair in pairs:
        gap = rows[pair["first"]]["accuracy"] - rows[pair["second"]]["accuracy"]
        assert pair["difference"] == pytest.approx(gap)
        assert pair["first_only"] - pair["second_only"] == round(50 * gap) >= 0


@pytest.mark.parametrize(
    ("only", "says"),
    [
        (
            (40, 10),
            "more than chance in these rows explains: 40 rows that only it has right against 10 (McNemar, p < 0",
        ),
        (
            (90, 60),
            "more than chance in these rows explains: 90 rows that only it has right against 60 (McNemar, p = 0",
        ),
        ((630, 600), "which may be chance: 630 rows that only it has right against 600 (McNemar, p = 0.408)"),
    ],
)
def test_a_lead_is_judged_by_the_rows_that_differ(only, says):
    """1.5 points of 2,000 rows: the intervals of the two shares overlap, whatever the pairs say."""
    record = Record(question="?", settings={"method": ("fedavg", "fedsign")}, seed=0)
    for name, share in (("FedAvg", 0.520), ("FedSign", 0.505)):
        low, high = wilson(share, 2000)
        record.add("methods", method=name, accuracy=share, accuracy_low=low, accuracy_high=high, n=2000)
    first, second = torch.zeros(2000), torch.zeros(2000)
    first[: only[0]], second[only[0] : sum(only)] = 1, 1
    record.add("pairs", **pair_rows({"FedAvg": first, "FedSign": second})[0])
    assert f"FedAvg leads FedSign by 1.5 percentage points, {says}" in answer(record)
