"""A study of a few seconds."""

from __future__ import annotations

import pytest

from sparing.jobs.transfer import Transfer


@pytest.fixture
def tiny(tmp_path) -> Transfer:
    return Transfer(
        out=tmp_path / "study", widths=(32,), base_width=16, densities=(1.0, 0.25), log2_rates=(-8.0, -5.0), seeds=(0,),
        rules=("sp", "supar"), steps=10, batch=32, layers=2, coordinates=False,
    )  # fmt: skip
