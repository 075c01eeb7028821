"""Settings of the runs that the tests of `sparing evaluate` make."""

from __future__ import annotations

from pathlib import Path

from sparing.jobs.evaluate import Settings


def settings_for(model: Path, tmp_path: Path, **changes) -> Settings:
    return Settings(**{"model": model, "out": tmp_path / "out", "length": 24, "batch": 3} | changes)
