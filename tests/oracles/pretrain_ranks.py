"""Trainings from scratch as every rank of a group starts them, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def exact() -> Iterator[Any]:
    """The job with models of float64, and without its page and its timings, which have tests of their own."""
    from sparing.jobs.pretrain import job

    kept = {name: getattr(job, name) for name in ("fresh_model", "write_page", "note_predicted")}
    job.fresh_model = lambda *given, **how: kept["fresh_model"](*given, **how).double()
    job.write_page = lambda record, path, caveats: path.write_text("\n".join(caveats))
    job.note_predicted = lambda state, record: None
    try:
        yield job
    finally:
        vars(job).update(kept)


def runs(cases: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Run one after another; what the last of each case recorded, or the error it ended with."""
    with exact() as job:
        return {name: _last(job, settings) for name, settings in cases.items()}


def _last(job: Any, settings: Sequence[Any]) -> Any:
    try:
        return [job.run(one) for one in settings][-1].rows
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
