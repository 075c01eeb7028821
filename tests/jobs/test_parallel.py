"""Settings over several ranks that cannot work, and processes that cannot meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparing.errors import UserError
from sparing.jobs.parallel import meet_ranks
from sparing.jobs.settings import Parallel


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"plan": "none", "memory": "8GB"}, "memory: got 8GB; nothing is cut without a plan"),
        ({"groups": 2, "topology": Path("a.json")}, "the topology file has them"),
        ({"plan": "NGI"}, "NGI"),
        ({"plan": "III", "memory": "8GB"}, "for the choice of a plan"),
        ({"memory": "much"}, "much"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(wrong: dict[str, object], words: str):
    with pytest.raises(UserError, match=words):
        Parallel(**{"plan": "auto", "device": "cpu"} | wrong)  # type: ignore[arg-type]


def test_several_processes_need_a_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(UserError, match="each of 2 processes would train"),
        meet_ranks(Parallel(plan="none", device="cpu")),
    ):
        pass
