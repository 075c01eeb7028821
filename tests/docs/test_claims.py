"""Verdicts on the papers' claims, what was predicted beside what was measured, and the one list of benchmarks."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "results"


# ---- pages and files


def test_every_verdict_rests_on_numbers_that_bear_it():
    from benchmarks.claims.sources import Pages
    from benchmarks.claims_tables import unsound

    see = Pages({path.stem: path.read_text() for path in PAGES.glob("*.md")})
    assert unsound(see) == []


def test_a_verdict_falls_with_its_numbers():
    """Turn the sign of one cell that a verdict rests on."""
    from benchmarks.claims.sources import Pages
    from benchmarks.claims_tables import unsound

    texts = {path.stem: path.read_text() for path in PAGES.glob("*.md")}
    row = re.search(r"\| VGG, no norm, Fashion: θ₀ \|.*", texts["valley"])
    texts["valley"] = texts["valley"].replace(row[0], row[0].replace("+", "−"))
    assert [claim for claim in unsound(Pages(texts)) if "initial weights" in claim]


def test_cells_are_read_as_they_are_written():
    from benchmarks.claims.sources import Pages, ends, number

    rows = "| x | one | two | one |\n| - | -: | -: | -: |\n| r | −0.4 [−0.6, +0.1] | ≥ 5 | 7 |\n"
    see = Pages({"page": f"<!-- a -->\n{rows}<!-- /a -->"})
    assert see.table("page", "a") == {"r": {"one": "−0.4 [−0.6, +0.1]", "two": "≥ 5"}}
    assert (number(see.cell("page", "a", "r", "one")), ends("−0.4 [−0.6, +0.1]")) == (-0.4, (-0.6, 0.1))
    assert (number("≥ 5"), number("2.8e-05 ± 2e-05")) == (5.0, 2.8e-05)


def test_pictures_are_what_the_json_makes():
    from benchmarks import results

    assert {path.name for path in results.pictures()} == {path.name for path in (ROOT / "docs/pictures").glob("*.svg")}
    for path, text in results.pictures().items():
        assert path.read_text() == text, f"{path.name} is stale: run `make results`"
        assert len(text.encode()) < 300 * 2**10


def test_ratios_and_differences_by_hand():
    from benchmarks.predicted_pairs import Pairs
    from benchmarks.predicted_tables import judged

    known = {
        "what": "",
        "by": "",
        "against": "",
        "steps": (),
        "predicted": (1.0, 2.0, 4.0),
        "measured": (1.0, 3.0, 4.1),
    }
    assert judged(Pairs(unit="s", **known)) == ["1.02 [1.00, 1.50]×", "2 of 3", "1.00", "3"]
    assert judged(Pairs(unit="nat", ratio=False, **known)) == ["+0.10 [+0.00, +1.00] nat", "–", "1.00", "3"]


def test_every_file_of_results_is_made_by_one_step_and_named_by_a_page():
    from benchmarks.steps import STEPS

    made = [name for step in STEPS for name in step.writes]
    there = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert len(made) == len(set(made))
    assert there <= set(made)
    page = (ROOT / "docs" / "results.md").read_text()
    assert [name for name in made if f"`{name}`" not in page] == []
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_every_step_runs_a_module_that_is_there():
    from benchmarks.steps import STEPS

    for step in STEPS:
        for line in step.commands:
            module = line.split()[2]
            path = ROOT / module.replace(".", "/")
            assert line.startswith("python -m benchmarks."), line
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), line


# ---- running steps


def step(name: str, code: str, *, hours: float = 0.001, **changes):
    """A step whose command is a line of Python and which writes ``NAME.json``."""
    from benchmarks.steps import Step

    return Step(name=name, commands=(f'python -c "{code}"',), hours=hours, writes=(f"{name}.json",), page="", **changes)


def write(name: str, text: str) -> str:
    """Python that appends to a file of results, and to the list of what ran."""
    return f"open('results/{name}.json', 'a').write('{text}'); open('ran', 'a').write('{name} ')"


@pytest.fixture
def bench(tmp_path):
    from benchmarks.rerun import Bench

    (tmp_path / "results").mkdir()
    return lambda: Bench(results=tmp_path / "results", folder=tmp_path / "state", root=tmp_path)


def test_a_step_that_fails_is_named_and_the_rest_go_on(bench, tmp_path):
    from benchmarks.rerun import run_all

    results = tmp_path / "results"
    (results / "b.json").write_text("old")
    said = io.StringIO()
    bad = write("b", "half") + "; exit(3)"
    steps = [step("a", write("a", "1")), step("b", bad), step("c", write("c", "3"))]
    assert run_all(steps, bench(), file=said) == 1
    assert "failed: b:" in said.getvalue()
    assert "status 3" in said.getvalue()
    assert {path.name: path.read_text() for path in results.iterdir()} == {
        "a.json": "1",
        "b.json": "old",
        "c.json": "3",
    }
    state = json.loads((tmp_path / "state" / "state.json").read_text())
    assert set(state["done"]) == {"a", "c"}
    assert {"commit", "seconds", "time"} <= set(state["done"]["a"])

    steps[1] = step("b", write("b", " and the rest"))  # goes on from the half, not from the old file
    assert run_all(steps, bench(), file=said) == 0
    assert (results / "b.json").read_text() == "half and the rest"
    assert (tmp_path / "ran").read_text().split() == ["a", "b", "c", "b"]


def test_a_run_that_was_killed_leaves_whole_results(bench, tmp_path):
    """As after SIGKILL in the middle of a step: what it had is kept, the old file is back, and it goes on."""
    from benchmarks.rerun import run_all

    old, new = tmp_path / "results" / "a.json", write("a", " two")
    old.write_text("old")
    first = bench()
    first._put_aside(step("a", new))
    assert not old.exists()
    old.write_text("one")  # what the killed command had written
    again = bench()
    assert old.read_text() == "old"
    assert again.state["running"] is None
    assert run_all([step("a", new)], again, file=io.StringIO()) == 0
    assert old.read_text() == "one two"


def test_forgotten_steps_start_from_nothing(bench, tmp_path):
    from benchmarks.rerun import run_all

    only = step("a", write("a", "x"))
    assert run_all([only], bench(), file=io.StringIO()) == 0
    assert run_all([only], bench(), file=io.StringIO()) == 0  # done: nothing runs
    again = bench()
    again.forget([only])
    assert run_all([only], again, file=io.StringIO()) == 0
    assert (tmp_path / "results" / "a.json").read_text() == "x"
    assert (tmp_path / "ran").read_text().split() == ["a", "a"]


def test_a_step_that_writes_nothing_has_failed(bench):
    from benchmarks.rerun import run_all

    said = io.StringIO()
    assert run_all([step("a", "pass")], bench(), file=said) == 1
    assert "did not write a.json" in said.getvalue()


def test_what_a_machine_lacks_is_said_and_left_out(bench):
    from benchmarks.rerun import listing, run_all
    from benchmarks.steps import Need

    need = Need(name="a telescope", there=lambda: False, get="buy one")
    only, said = step("a", write("a", "x"), hours=1.5, needs=(need,)), io.StringIO()
    assert run_all([only], bench(), file=said) == 1
    assert "left out: a needs a telescope: buy one" in said.getvalue()
    text = "\n".join(listing([only], bench()))
    assert "about 1.5 h" in text
    assert "a telescope (not here)" in text
    assert "writes a.json" in text


def test_names_and_patterns_choose_steps(capsys):
    from benchmarks.rerun import chosen
    from benchmarks.steps import STEPS

    assert chosen([]) == list(STEPS)
    assert [one.name for one in chosen(["step_time"])] == ["step_time"]
    assert {one.name.split("_")[0] for one in chosen(["valley*"])} == {"valley"}
    with pytest.raises(SystemExit) as error:
        chosen(["step_tme"])
    assert error.value.code == 2
    assert "did you mean step_time" in capsys.readouterr().err
