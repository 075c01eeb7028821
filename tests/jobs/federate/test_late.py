"""``--spare`` and ``--delays`` from the flags to the page."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from refusals import refused
from sparing.jobs.federate import run
from sparing.jobs.federate.groups import Late, Secure
from sparing.jobs.federate.methods import delays_of
from sparing.jobs.federate.settings import Settings


def test_delays_have_their_distribution():
    """Of 4,000 draws the mean of the logarithm is known to 0.7/√4000 = .011 for independent ones."""
    assert delays_of(Settings()) is None
    delay = delays_of(Settings(delays="lognormal", late=Late(median=2.0, spread=0.7, gone=0.25), seed=3))
    logs = [math.log(time / 2) for k in range(4000) if (time := delay(k, k % 5)) < math.inf]
    assert len(logs) / 4000 == pytest.approx(0.75, abs=0.03)
    assert sum(logs) / len(logs) == pytest.approx(0.0, abs=0.05)
    assert math.sqrt(sum(x * x for x in logs) / len(logs)) == pytest.approx(0.7, abs=0.04)
    one = [[math.log(delay(k, number)) for number in (0, 1)] for k in range(1500) if delay(k, 0) < math.inf]
    centred = [[x - math.log(2) for x in pair] for pair in one]
    shared = sum(a * b for a, b in centred) / len(centred)
    assert shared == pytest.approx(0.7**2 / 2, abs=0.05)  # half of the variance is the client's


def test_a_run_closes_early_and_says_so(tiny, tmp_path):
    some = {"participation": 0.4, "spare": 0.5, "aggregation": "secure", "secure": Secure(threshold=0.3)}
    pytest.importorskip("cryptography", reason="cryptography, of sparing[secure]")
    record = run(tiny(**some, delays="lognormal", late=Late(gone=0.3, patience=9.0), rounds=3))
    rounds = record.table("rounds")
    assert [row["asked"] for row in rounds] == [3, 3, 3]
    assert max(row["answered"] for row in rounds) == 2
    assert all(0 < row["waited"] <= 9.0 for row in rounds)
    page = (tmp_path / "out" / "report.html").read_text()
    assert re.search(r"Rounds ask 50\.0.% more clients", page)
    assert "by the delays that were drawn" in page
    assert "masked integers of 32 bits" in page


def test_flower_makes_no_delays():
    refused("pass --engine embedded", Settings, engine="flower", delays="lognormal")
    refused("--secure.dropout 0", Settings, engine="flower", secure=Secure(dropout=0.1))
    assert replace(Settings(), spare=0.2).training().asked(100) == 12
