"""Families whose layers and logits keep their sizes over width and density: what mup's numbers are for.

``benchmarks/scaling_families.py`` has trained them all; here its rows are read, and a few are checked at small widths.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from idioms.scaling.cells import CHECKED, REFUSED
from idioms.scaling.families import FAMILIES
from sparing.scaling.check.coordinate import coordinate_check

ROOT = Path(__file__).parents[3]
ROWS = json.loads((ROOT / "benchmarks" / "results" / "scaling_families.json").read_text())


@pytest.fixture(autouse=True)
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import scaling_families

    yield scaling_families
    for name in [name for name in sys.modules if name.split(".")[0] == "benchmarks"]:
        del sys.modules[name]


@pytest.mark.parametrize("axis", ["width", "density"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda name: f"{CHECKED}-{name}")
def test_the_benchmark_finds_no_size_that_goes_with_width_or_density(family: str, axis: str):
    """And it can see one: without scaling, sizes go with a power of at least a half."""
    row = ROWS["rows"][f"{family}, {axis}"]
    if family in REFUSED:
        assert row["outcome"] == "refused"
        assert REFUSED[family] in row["line"]
        return
    assert (row["outcome"], row["failures"]) == ("passes", [])
    assert max(abs(one["slope"]) for one in row["largest"].values()) <= 0.25
    assert row["control"]["outcome"] == "fails"
    assert row["control"]["slope"] is None or abs(row["control"]["slope"]) >= 0.5


def test_the_rows_are_of_the_settings_in_the_code(benchmark):
    settings = {axis: asdict(extent) for axis, extent in benchmark.AXES.items()}
    assert ROWS["settings"] == json.loads(json.dumps(settings))
    assert set(ROWS["rows"]) == {f"{family}, {axis}" for family in FAMILIES for axis in settings}


@pytest.mark.parametrize("family", ["GPT-2", "DeBERTa-v2", "ViT"])
def test_sizes_do_not_go_with_width(family: str, benchmark):
    """Heads of 16; two octaves, two seeds: enough to tell 0 from a half, not more."""
    found = coordinate_check(
        lambda width: FAMILIES[family](width, 2 * width, width // 16), (64, 256), (1,), batch=benchmark.batch(family),
        seeds=(0, 1), lr=2**-13, steps=3,
    )  # fmt: skip
    assert found.passed, [str(one) for one in found.failures]
