"""No number in the results is typed by hand: the tables are what the committed JSON makes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tables_are_made_from_the_committed_json():
    from benchmarks.results import pages

    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name} is stale: run `make results`"


def test_results_name_how_they_were_made():
    """Each file of results carries the command and the versions."""
    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        text = path.read_text()
        assert '"command"' in text, path.name
        assert '"torch"' in text, path.name


def test_goals_on_sparse_nets_have_the_numbers_of_their_files():
    """These rows of the overview are written by hand."""
    from benchmarks.scaling_transfer.tables import SPARSE, drift, seen_there
    from benchmarks.scaling_updates import RESULT

    from sparing.report import Record

    page = (ROOT / "docs" / "results.md").read_text()
    cells = [f"{drift(seen_there(), 'sp', density)[0]:+.1f} at {density}" for density in SPARSE]
    assert f"| {', '.join(cells)} | met |" in page
    rows = Record.read(RESULT).table("updates")
    share = {(row["method"], row["d"]): f"{row['share']:.2f}" for row in rows if row["density"] == "1/16"}
    small, large = ([share[method, d] for method in ("rigl", "set")] for d in (256, 512))
    told = f"{small[0]} (RigL) and {small[1]} (SET) at width 256, {large[0]} and {large[1]} at 512"
    assert f"≤ 0.2 of masked dense at ρ = 1/16 | {told} | met |" in page
    assert max(map(float, share.values())) <= 0.2


def test_goals_on_plans_have_the_numbers_of_their_page():
    """Written by hand as well; the tables that they are taken from are made from files."""
    page, sharding = ((ROOT / "docs" / name).read_text() for name in ("results.md", "results/sharding.md"))

    def cell(mark: str, row: str, column: int) -> str:
        table = sharding.split(f"<!-- {mark} -->")[1].split(f"<!-- /{mark} -->")[0]
        (found,) = (line for line in table.splitlines() if line.startswith(f"| {row} |"))
        return found.strip("| ").split(" | ")[column]

    def rounded(text: str, digits: int) -> str:
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.{digits}f}", text)

    ratio, wider = (
        cell(mark, "the planner over the rule, paired", 3).replace("×", "")
        for mark in ("capped-probed", "capped-engines")
    )
    probed = "and probed costs of a message, a pass and a step"
    cells, plans = (rounded(cell("sizes-probed", probed, column).split(" [")[0], 0) for column in (2, 3))
    arms = ("NNG int8", "NNG", "NNG int4", "NNI every 8", "NNI every 32 int8")
    eight, exact, four, every8, every32 = (cell("lowbit", arm, 2).split(" [")[0] for arm in arms)
    least, most = map(float, cell("lowbit-loss", "exact", 1).split("[")[1].rstrip("]").split(", "))
    int8, int4 = (cell("lowbit-loss", arm, 2) for arm in ("int8", "int4"))
    off = [cell("published", "the worst is off by", column) for column in (5, 2)]
    for told in (
        f"| clear pairs of plans 99 % right | {cell('pairs-probed', 'the simulator', 1).split(' [')[0]} (",
        f"| {cell('capped-probed', 'the planner', 1).split(' [')[0]}; {ratio} (",
        f"; {cell('capped-engines', 'the planner', 1).split(' [')[0]}; {wider} (six wider",
        f"| {cells} of eight cells, {plans} of plans (",
        f"| {eight} s (exact wires {exact} s, four bits {four} s) |",
        f"| int8 {int8} nat, int4 {int4} (span {most - least:.3f}) |",
        f"| {every8} s, {rounded(cell('local-loss', 'H 8', 2), 3)} nat; "
        f"{every32} s, {rounded(cell('local-loss', 'H 32, int8', 2), 3)} |",
        f"| {off[0]}, with two numbers and a switch fitted; {off[1]} with two levels, all hidden |",
    ):
        assert told in page, told
