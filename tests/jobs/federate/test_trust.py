"""``--robust fltrust`` from the flag to the record."""

from __future__ import annotations

import pytest
import torch

from refusals import refused
from sparing.jobs.federate import run
from sparing.jobs.federate.groups import Trust
from sparing.jobs.federate.inputs import load_data, root_of, subsample
from sparing.jobs.federate.settings import Settings


def test_the_servers_rows_are_held_out_and_measure_nothing(tiny):
    settings = tiny(trust=Trust(rows=40))
    rows = subsample(load_data("digits", seed=0, validation=0.1), settings)
    assert root_of(rows, settings) == (rows, None)
    left, root = root_of(rows, tiny(robust="fltrust", trust=Trust(rows=40)))
    assert len(root) == 40
    both = torch.cat([left.validation_inputs, root.inputs]).flatten(1)
    assert torch.equal(both.sum(1).sort().values, rows.validation_inputs.flatten(1).sum(1).sort().values)
    assert len(root.targets.unique()) > 5


@pytest.mark.usefixtures("pageless")
def test_a_run_has_it_and_one_that_cannot_writes_nothing(tiny, tmp_path):
    record = run(tiny(robust="fltrust", trust=Trust(rows=40)))
    held = record.table("data")[0]["validation_rows"]
    assert record.table("methods")[0]["value"] == repr_of_fltrust()
    assert held == len(load_data("digits", seed=0, validation=0.1).validation_targets) - 40
    refused("a client's state", run, tiny(robust="fltrust", methods=("feddyn",), out=tmp_path / "other"))
    refused("larger --held-out", run, tiny(robust="fltrust", held_out=0.0, out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def repr_of_fltrust():
    from sparing.jobs.federate.methods import method_of

    return repr(method_of("fedavg", Settings(robust="fltrust")))
