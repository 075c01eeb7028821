"""Settings for an attribution of a second or two."""

from __future__ import annotations

import pytest

from sparing.jobs.attribute import Settings, job

POEM = "\n\n".join(f"{place}: the {animal} sat down." for animal in ("cat", "dog", "hen") for place in "abcdefg")


@pytest.fixture
def pageless(monkeypatch):
    """Drawing takes seconds, and most of these tests are about other files."""
    monkeypatch.setattr(job, "write_page", lambda record, path, inputs: path)


@pytest.fixture
def images(tmp_path):
    pytest.importorskip("sklearn")

    def settings(**changes):
        fast = {"data": "digits", "train_rows": 40, "batch": 10, "epochs": 2, "width": 8, "lr": 0.05, "shown": 3}
        return Settings(**{"out": tmp_path / "run", "predictions": (1, 4), "retrain": 4, "share": 0.1} | fast | changes)

    return settings


@pytest.fixture
def text(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)

    def settings(**changes):
        fast = {"data": str(tmp_path / "poem.txt"), "train_rows": 12, "batch": 4, "epochs": 1, "width": 8, "shown": 2}
        fast |= {"optimizer": "adamw", "length": 16, "predictions": (0,), "retrain": 3, "share": 0.1}
        return Settings(**{"out": tmp_path / "run"} | fast | changes)

    return settings
