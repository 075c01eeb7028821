"""No number in the results is typed by hand: the tables are what the committed JSON makes."""

from __future__ import annotations

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
