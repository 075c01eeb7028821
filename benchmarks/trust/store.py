"""Rows of ``trust_<part>.json``, kept as they come."""

from __future__ import annotations

from benchmarks.valley import store


class Store(store.Store):
    """A JSON file with one row per trial, by key; several processes may fill one file."""

    def __init__(self, part: str) -> None:
        """Open the file of a part with the rows it has."""
        self.path = store.RESULTS / f"trust_{part}.json"
        self.command = f"python -m benchmarks.trust --only {part}"
        self.rows = self._read()
