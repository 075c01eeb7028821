"""Ten digits over five clients: the smallest run that is one."""

from __future__ import annotations

import pytest

from sparing.jobs.federate import Settings, job
from sparing.jobs.federate.groups import Dirichlet


@pytest.fixture
def pageless(monkeypatch):
    """Drawing takes seconds, and most of these tests are about numbers."""
    monkeypatch.setattr(job, "write_page", lambda record, path: path)


@pytest.fixture
def tiny(tmp_path):
    """Make settings of a run of a second; those that are passed replace ours."""

    def make(**changes):
        small = {
            "methods": ("fedavg",), "data": "digits", "train_rows": 200, "test_rows": 50, "clients": 5,
            "participation": 0.6, "rounds": 2, "local_epochs": 1, "dirichlet": Dirichlet(alpha=1.0),
            "out": tmp_path / "out",
        }  # fmt: skip
        return Settings(**small | changes)

    return make
