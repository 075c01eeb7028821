"""Pictures of a check, from rows that are a formula."""

from __future__ import annotations

from sparing.scaling.check.plot import MOST, figure, figures
from sparing.scaling.check.slopes import Slope, slopes


def check(modules: int) -> tuple[str, list[dict], tuple[Slope, ...]]:
    """Module k goes with density to the power k/10; no module's input has a gradient."""
    rows = [
        {"module": f"layer {k}", "role": "hidden", "width": 64, "density": density, "live": 64, "step": 0, "seed": 0,
         "loss": 1.0, "forward": density ** (k / 10), "gradient": None, "update": 1.0}
        for k in range(modules) for density in (1.0, 0.5, 0.25)
    ]  # fmt: skip
    return "SP", rows, slopes(rows, limit=0.05, loose=0.1)


def test_the_title_tells_the_steepest_slope():
    assert figure(*check(4), "forward").title == "SP: outputs go with density to the power ±0.30 at most"


def test_of_many_layers_the_steepest_are_drawn_and_the_rest_is_said():
    found = figure(*check(MOST + 3), "forward")
    assert "layer 9" in found.alt
    assert "layer 2" not in found.alt
    assert f"The {MOST} steepest of {MOST + 3} layers" in found.caption


def test_a_statistic_that_nobody_has_is_not_drawn():
    assert figure(*check(2), "gradient") is None
    assert len(figures(*check(2))) == 2
