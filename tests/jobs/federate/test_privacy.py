"""``--privacy`` from the flag to the page."""

from __future__ import annotations

import math

import pytest

from refusals import refused
from sparing.federated import FedAvg, Private
from sparing.jobs.federate import run
from sparing.jobs.federate.groups import Privacy
from sparing.jobs.federate.methods import method_of
from sparing.jobs.federate.settings import Settings


def test_a_flag_is_its_value():
    own = Privacy(noise=0.5, clip=2.0, quantile=0.4)
    settings = Settings(privacy="server", private=own, seed=7)
    assert method_of("fedavg", settings) == Private(FedAvg(), noise=0.5, clip=2.0, quantile=0.4, per_round=10, seed=7)
    clients = Settings(privacy="clients", private=Privacy(noise=0.5))
    assert method_of("fedavg", clients, clients=50) == Private(
        FedAvg(), noise=0.5, clip=1.0, per_round=5, at_clients=True
    )
    refused("leave it out", method_of, "norm-matched", settings)
    refused("combine=Mean", method_of, "fedavg", Settings(privacy="server", robust="median"))


def test_the_page_has_epsilon_before_and_after(tiny, tmp_path):
    pytest.importorskip("dp_accounting", reason="dp-accounting, of sparing[privacy]")
    record = run(tiny(privacy="server", sampling="poisson", private=Privacy(noise=0.5, clip=0.5)))
    before, after = record.table("privacy")
    assert (before["when"], after["when"], before["delta"]) == ("before", "after", pytest.approx(5**-1.1))
    assert 0 < before["epsilon"] < math.inf
    assert after["epsilon"] > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "What the models tell of a client" in page
    assert "each by a coin of its own" in page
    assert record.table("methods")[0]["answered"] == record.table("methods")[0]["predicted_updates"]


def test_a_run_that_cannot_be_private_writes_nothing(tiny, tmp_path):
    refused('sampling="fixed"', run, tiny(privacy="clients", sampling="poisson"))
    for hidden in ({"privacy": "server"}, {"aggregation": "secure"}):
        refused("pass --batch-norm recalibrate", lambda hidden=hidden: tiny(net="cnn-bn", batch_norm="local", **hidden))
    refused("beside the model", run, tiny(privacy="server", methods=("scaffold",)))
    assert not (tmp_path / "out").exists()
