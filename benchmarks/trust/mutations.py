"""A thousand damaged checkpoints: each is refused in a line that tells what to do, or loads to the very same state.

The checkpoints are real ones: of the four jobs, of the federated course, and of sharding's folders of
``torch.distributed.checkpoint``. Each damage is drawn from its number and loaded as a resumed run loads it.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.trust.damage import KINDS, Damage, delete, put_back, replace_all
from benchmarks.trust.sources import SOURCES, Source, same
from benchmarks.trust.store import Store
from sparing.errors import RunError, UserError

TRIALS = 1000
"""Damaged checkpoints in all, at least."""

APART = {("federate", put_back), ("federate", delete), ("sharding", put_back), ("sharding", replace_all)}
"""What cannot be: these keep one checkpoint, without which a federated run begins anew; and whose a folder of the
sharding room is, its caller must know."""


def run(jobs: Sequence[str], share: int, of: int) -> None:
    """Try every kind of damage on every source; a row for each pair."""
    rows = Store("mutations")
    pairs = [(name, kind) for name in SOURCES for kind in KINDS if (name, kind) not in APART]
    each = -(-TRIALS // len(pairs))
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Source] = {}
        for name, kind in pairs[share::of]:
            if name.split(",")[0] not in {*jobs, "sharding"}:
                continue

            def measure(name: str = name, kind: Damage = kind) -> dict[str, Any]:
                if name not in made:
                    made[name] = SOURCES[name](Path(folder) / name)
                return tried(made[name], kind, range(each))

            rows.once(f"{name}, {kind.__name__}", measure)


def tried(source: Source, kind: Damage, numbers: Sequence[int]) -> dict[str, Any]:
    """Damage copies of a checkpoint in one way; a row of counts and, of what went wrong, the words."""
    found, words = Counter[str](), []
    for number, (verdict, said) in zip(numbers, verdicts(source, kind, numbers), strict=True):
        found[verdict] += 1
        if verdict in {"silent", "crashed", "unclear"}:
            words.append(f"{number}: {verdict}: {said}")
    counts = {name: found[name] for name in ("refused", "equal", "silent", "crashed", "unclear")}
    return {"source": source.name, "damage": kind.__name__, "trials": len(numbers), **counts, "wrong": words[:5]}


def verdicts(source: Source, kind: Damage, numbers: Sequence[int]) -> Iterator[tuple[str, str]]:
    """For each number a damaged copy, loaded: refused, equal, silent, crashed or unclear, and what was said."""
    place = source.folder.with_name(f"{source.folder.name}-damaged")
    for number in numbers:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source.folder, place)
        kind(source.target(place), random.Random(f"{source.name} {kind.__name__} {number}"))
        yield _verdict(source, place)


def _verdict(source: Source, place: Path) -> tuple[str, str]:
    try:
        state = source.load(place)
    except (UserError, RunError) as error:
        return ("refused" if _clear(error) else "unclear"), str(error)
    except Exception:  # noqa: BLE001  # anything else would be a traceback on somebody's screen
        return "crashed", traceback.format_exc(limit=-2)
    return ("equal" if same(state, source.state) else "silent"), "it loads"


def _clear(error: UserError | RunError) -> bool:
    """Whether a line says what, got, why and do, and no more than a screen holds."""
    parts = [error.what, str(error.got), error.why, error.do] if isinstance(error, UserError) else [str(error)]
    return all(part.strip() for part in parts) and "\n" not in str(error) and len(str(error)) < 1000
