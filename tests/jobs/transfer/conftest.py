"""A study of a few seconds."""

from __future__ import annotations

import pytest
import torch

from sparing.jobs.transfer import Transfer


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny(tmp_path) -> Transfer:
    return Transfer(
        out=tmp_path / "study", widths=(32,), base_width=16, densities=(1.0, 0.25), log2_rates=(-8.0, -5.0), seeds=(0,),
        rules=("sp", "supar"), steps=10, batch=32, layers=2, coordinates=False,
    )  # fmt: skip
