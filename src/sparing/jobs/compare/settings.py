"""Settings of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.limits import Several
from sparing.jobs.settings import Output

MOST = 8
"""Runs on a page: as many lines as a reader tells apart."""


@dataclass(frozen=True, kw_only=True)
class Settings(Output):
    """Put several runs on one page: curves over each other, tables side by side, and where their settings differ.

    Only the records are read, so the runs may come from other machines. OUT gets report.html and record.jsonl.
    """

    runs: Annotated[Positional[tuple[Path, ...]], Several(), arg(metavar="RUN RUN [RUN ...]")]
    """Folders of finished runs, or their record.jsonl (two to eight)."""

    out: Path = Path("runs/compare")

    def __post_init__(self) -> None:
        """Refuse what is no comparison, or no longer one."""
        super().__post_init__()
        fits = 2 <= len(self.runs) <= MOST
        require(fits, "runs", len(self.runs), "that is no comparison of a page", f"pass 2 to {MOST} runs")
