"""``--aggregation secure`` from the flag to the record."""

from __future__ import annotations

import pytest

from refusals import refused
from sparing.federated import FedAvg
from sparing.federated.methods.secure import SecureSum
from sparing.jobs.federate import run
from sparing.jobs.federate.groups import Secure
from sparing.jobs.federate.methods import method_of
from sparing.jobs.federate.settings import Settings


def test_a_flag_is_its_value():
    assert method_of("fedavg", Settings(aggregation="secure")) == SecureSum(FedAvg())
    own = Secure(bound=2.0, bits=40, step=0.5, threshold=0.3, dropout=0.1)
    wanted = SecureSum(FedAvg(), bound=2.0, bits=40, step=0.5, threshold=0.3, dropout=0.1, seed=7)
    assert method_of("fedavg", Settings(aggregation="secure", secure=own, seed=7)) == wanted
    refused("leave it out", method_of, "norm-matched", Settings(aggregation="secure"))
    refused("--privacy none", method_of, "fedavg", Settings(aggregation="secure", privacy="clients"))
    refused("combine=Mean", method_of, "fedavg", Settings(aggregation="secure", robust="krum"))


@pytest.mark.usefixtures("pageless")
def test_a_run_counts_what_it_predicted_and_one_that_cannot_writes_nothing(tiny, tmp_path):
    pytest.importorskip("cryptography", reason="cryptography, of sparing[secure]")
    row = run(tiny(aggregation="secure")).table("methods")[0]
    assert (row["bytes_up"], row["bytes_down"]) == (row["predicted_up"], row["predicted_down"])
    assert row["value"].startswith("SecureSum(")
    refused("unmasked", run, tiny(aggregation="secure", methods=("scaffold",), out=tmp_path / "other"))
    refused("pass bits=32", run, tiny(aggregation="secure", secure=Secure(bits=16), out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()
