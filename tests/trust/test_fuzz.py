"""A seeded slice of the fuzzer, in its own process; and that it sees what it looks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oracles.scripts import forked
from sparing.cli import VERBS

SLICE = {"plan": (0, 12), "merge": (0, 8), "fetch": (0, 6)}
"""Cases of verbs whose runs cost least; the ten thousand are those of ``python -m benchmarks.trust``."""

CODE = """
import json, torch
torch.set_num_threads(1)
from benchmarks.trust import fuzz, fuzz_world
import sparing.jobs.fetch as fetch
fuzz_world.LEAST["plan"] += ["--weights=None", "--optimizers"]  # ten ways to price instead of twenty
with fuzz.Fuzzer(tuple(%(slice)r), pages=False) as fuzzer:
    rows = {verb: fuzzer.block(verb, range(*some)) for verb, some in %(slice)r.items()}
    case = fuzz.Case("fetch", 0, ["fetch"])
    whole, seen = fetch.run, {}
    def fail(settings): raise KeyError("unforeseen")
    def spoil(settings):
        open("book.txt", "a").write("x")
        return whole(settings)
    def hang(settings):
        import signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True: pass
    for name, run in (("traceback", fail), ("changed ['book.txt']", spoil), ("status -9", hang)):
        fetch.run, fuzz.PATIENCE = run, 0.4  # processor seconds: longer than the way to `hang` takes
        seen[name] = fuzzer.tried(case).wrong
print(json.dumps([rows, seen]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = tmp_path_factory.mktemp("fuzz") / "slice.py"
    script.write_text(CODE % {"slice": SLICE})
    done = forked(script, folder=script.parent)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.mark.processes
@pytest.mark.slow  # twenty-six runs of three commands
@pytest.mark.parametrize("verb", SLICE)
def test_no_case_ends_in_a_traceback_or_changes_what_is_not_its_own(verb: str, told: Any) -> None:
    row = told[0][verb]
    assert row["wrong"] == []
    assert row["cases"] == sum(row["status"].values()) == SLICE[verb][1]
    assert set(row["status"]) <= {"0", "1", "2", "130"}


@pytest.mark.processes
@pytest.mark.slow
def test_the_fuzzer_sees_what_it_looks_for(told: Any) -> None:
    """An unforeseen error behind the guard, a file of others that is changed, a run that does not stop."""
    assert told[1] == {name: name for name in told[1]}


def test_ten_thousand_cases_of_every_verb() -> None:
    from benchmarks.trust.fuzz import CASES

    assert set(CASES) == set(VERBS)
    assert sum(CASES.values()) == 10_000
