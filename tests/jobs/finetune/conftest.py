"""A short run without what takes most of its time."""

from __future__ import annotations

import pytest

from sparing.jobs.finetune import job, loop, state


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page and the ledgers, most of a short run, where they are not the subject."""
    monkeypatch.setattr(job, "write_page", lambda record, path, caveats: path.write_text(record.question))
    monkeypatch.setattr(loop, "note_predicted", lambda *arguments: None)
    monkeypatch.setattr(loop, "watched_step_", lambda *given: state.take_step_(*given[:2]))
