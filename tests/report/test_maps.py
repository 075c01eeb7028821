"""Maps show every cell once, say what is not measured, and centre signed values at zero."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparing.errors import UserError
from sparing.report.maps import _runs
from sparing.report.plots import Axis, heatmap

ROWS = [[1, 1, 0, 1], [0, 0, 1, 0]]


@given(hnp.arrays(np.int8, st.integers(1, 30), elements=st.integers(0, 1)))
def test_runs_cover_the_ones_and_nothing_else(row) -> None:
    """Compared cell by cell with the row itself."""
    edges = np.cumsum([0.0, *np.linspace(0.5, 2, len(row))]).tolist()
    spans = _runs(row.tolist(), edges)
    centres = [(start + end) / 2 for start, end in itertools.pairwise(edges)]
    painted = [any(start < centre < start + length for start, length in spans) for centre in centres]
    assert painted == row.astype(bool).tolist()
    assert sum(length for _, length in spans) == pytest.approx(sum(np.diff(edges)[row.astype(bool)]))
    ends = [start + length for start, length in spans]
    assert all(later > end for end, (later, _) in zip(ends, spans[1:], strict=False))  # merged where they meet


def test_a_switch_map_names_its_states_and_counts(drawn) -> None:
    figure = heatmap(ROWS, title="T", x="step", y="layer", x_edges=[0, 20, 40, 60, 80])
    assert figure.alt == "Map of 2 rows (layer) by 4 columns (step): trained in 50.0 % of the cells."
    axes = drawn(figure).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["trained", "frozen"]
    assert axes.get_xlim() == (0, 80)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]


def test_shades_hold_the_values_and_gaps_stay_open(drawn) -> None:
    values = [[0.5 * 2**30, math.nan], [2**31, 2**30]]
    figure = heatmap(values, title="T", x="step", y="layer", kind="sequential", value=Axis("size", "B"), caption="C.")
    mesh = drawn(figure).axes.collections[0]
    shown = np.ma.filled(mesh.get_array().astype(float), np.nan)
    np.testing.assert_allclose(shown, [[0.5, math.nan], [2, 1]])
    assert figure.caption == "C. Hatched: not measured."
    assert figure.alt.endswith("size from 512 MiB to 2.00 GiB.")


def test_a_signed_map_is_white_at_zero(drawn) -> None:
    mesh = drawn(heatmap([[-1.0, 3.0]], title="T", x="x", y="y", kind="signed")).axes.collections[0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (-3, 3)
    white = mesh.cmap(mesh.norm(0.0))
    assert min(white) >= 0.99  # 256 steps: zero lies within half a step of white
    low, high = mesh.cmap(0.0), mesh.cmap(1.0)
    assert low[2] > low[0]  # blue
    assert high[0] > high[2]  # vermilion


def test_many_rows_are_named_sparsely(drawn) -> None:
    axes = drawn(heatmap([[0, 1]] * 80, title="T", x="x", y="layer")).axes
    assert 20 <= len(axes.get_yticks()) <= 32


@pytest.mark.parametrize("values", [[], [[]], [[1, 2], [1]]])
def test_a_ragged_map_is_refused(values) -> None:
    with pytest.raises(UserError, match="heat map"):
        heatmap(values, title="T", x="x", y="y")


def test_a_map_without_numbers_says_so() -> None:
    figure = heatmap([[math.nan]], title="T", x="x", y="y", kind="sequential")
    assert figure.alt.endswith("nothing measured.")
    assert "<svg" in figure.svg_light
