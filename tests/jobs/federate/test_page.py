"""The page says what the record has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snapshots import check_page
from sparing.jobs.federate import Settings, run
from sparing.jobs.federate.figures import optimizer_text
from sparing.jobs.federate.page import PAGE, accuracy_text, answer, caveats, deeper, price_text
from sparing.jobs.federate.tables import pair_rows, wilson
from sparing.report import Record


@pytest.fixture
def record() -> Record:
    """Of FedAvg and FedSign over two rounds; written by a run."""
    return Record.read(Path(__file__).with_name("record.jsonl"))


def test_snapshot(record):
    check_page(PAGE.of(record), __file__)


def test_what_was_not_measured_is_not_on_the_page(record):
    for row in record.rows:
        row |= {name: None for name in ("ssr_global", "ssr_pairs", "fusion_gap") if name in row}
    titles = [section.title for section in PAGE.of(record).sections]
    assert titles == ["Accuracy", "Length and direction", "Who holds what", "The price"]


STEPS = {
    "SGD (rate 0.3, momentum 0.9)": {"optimizer": "sgd", "lr": 0.3},
    "SGD (rate 0.1, momentum 0.5, weight decay 0.0001)": {"lr": None, "momentum": 0.5, "weight_decay": 1e-4},
    "AdamW (rate 0.001, β₁ 0.9, β₂ 0.999)": {"optimizer": "adamw", "lr": None},
    "AdamW (rate 0.01, β₁ 0.8, β₂ 0.999, gradients clipped to 2)": {
        "optimizer": "adamw", "lr": 0.01, "momentum": 0.8, "clip": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("told", STEPS)
def test_the_optimizer_is_told_with_its_rate_also_where_none_was_given(record, told):
    record.settings |= STEPS[told]
    assert f"on rows of their own by {told}, and" in accuracy_text(record)
    assert any(f"the same optimizer and rate, {told}:" in caveat for caveat in caveats(record))
    again = deeper(record)
    assert ("--optimizer adamw" in again) == told.startswith("AdamW")
    assert ("--lr" in again) == (STEPS[told]["lr"] is not None)


@pytest.mark.parametrize(("signed", "says"), [
    ({}, "did not sign, so it is taken to follow the protocol"),  # of a record from before the setting
    ({"signed": False}, "did not sign, so it is taken to follow the protocol"),
    ({"signed": True}, "a server that lies to them gets nothing"),
])  # fmt: skip
def test_a_secure_sum_says_whether_clients_signed(record, signed, says):
    record.settings |= {"aggregation": "secure", "secure": {"bits": 24, "threshold": 0.6, **signed}}
    told = price_text(record)
    assert "integers of 24 bits" in told
    assert "60.0 %" in told
    assert says in told
    assert ("--secure.signed" in told) is not signed.get("signed", False)


def test_what_the_page_says_of_a_step_is_what_the_clients_are_given():
    """β₂ is no setting of the command: the text has the value that the schedule has."""
    for optimizer in ("sgd", "adamw"):
        made = Settings(optimizer=optimizer).training()
        text = optimizer_text(Record(question="", seed=0, settings=vars(Settings(optimizer=optimizer))))
        assert f"rate {made.lr:g}, " in text
        assert f"{made.momentum:g}" in text
        assert (f"β₂ {made.beta2:g}" in text) == (optimizer == "adamw")


def test_an_attack_without_victims_is_mentioned(record):
    record.settings |= {"attack": "flip", "attacked": 0.1}
    assert PAGE.of(record).sections[-1].text.startswith("Attack: **flip**; each client is hit with a chance of 0.1. No")


def test_the_interval_of_a_share_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for hits, n in ((0, 20), (7, 20), (500, 1000)):
        known = stats.binomtest(hits, n).proportion_ci(0.95, "wilson")
        assert wilson(hits / n, n) == pytest.approx((known.low, known.high), abs=1e-6)


def test_two_methods_are_compared_on_the_same_rows(tiny, pageless):
    record = run(tiny(methods=("fedavg", "fedsign", "own-sign"), lr=0.3))
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
    record = Record(question="?", settings={"methods": ("fedavg", "fedsign")}, seed=0)
    for name, share in (("FedAvg", 0.520), ("FedSign", 0.505)):
        low, high = wilson(share, 2000)
        record.add("methods", method=name, accuracy=share, accuracy_low=low, accuracy_high=high, n=2000)
    first, second = torch.zeros(2000), torch.zeros(2000)
    first[: only[0]], second[only[0] : sum(only)] = 1, 1
    record.add("pairs", **pair_rows({"FedAvg": first, "FedSign": second})[0])
    assert f"FedAvg leads FedSign by 1.5 percentage points, {says}" in answer(record)
