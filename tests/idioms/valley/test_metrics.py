"""Every way a metric can get better × everything that says which side or model is better, against closed forms.

The cost of a model of one weight w is c(w) = 0.3 (w² − w³/2); a metric that falls is 0.1 + c, one that rises 0.9 − c.
On the grid ±½, ±1 the means of λ² and |λ|³ are .625 and .5625, so N = .3 (.625 + .28125) and P = .3 (.625 − .28125).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from idioms.valley.cells import CELLS, METRICS, PAGE_METRICS, PAGES, SUMMARIES
from sparing.errors import UserError
from sparing.jobs.scan import Settings
from sparing.jobs.scan.figures import noise_figure
from sparing.jobs.scan.job import run
from sparing.jobs.scan.page import answer
from sparing.valley.directions.config import Given
from sparing.valley.merging.soup import soup
from sparing.valley.scans.curve import Curve
from sparing.valley.scans.interpolate import interpolate
from sparing.valley.scans.scan import scan
from sparing.valley.scans.steer import steer

AT = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
N, P = 0.3 * (0.625 + 0.28125), 0.3 * (0.625 - 0.28125)
EXACT = {"rel": 1e-9, "abs": 1e-12}  # float64 sums of a few terms


def scalar(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(value)
    return model


def cost(w):
    return 0.3 * (w**2 - w**3 / 2)


def seen(worse, way):
    """What the metric shows where a model costs so much; of those of which nobody says, as if it fell."""
    return 0.9 - worse if way == "higher" else 0.1 + worse


def measure(subject: str, of=cost):
    name, _, way = METRICS[subject]
    return lambda model: {name: seen(of(model.weight.item()), way)}


def walked(subject: str, of=cost):
    direction = Given({"weight": torch.ones(1, 1)}, norm="raw", name="line")
    model = scalar()
    model.weight.data.fill_(0.0)
    return scan(model, measure(subject, of), direction, points=5, better=METRICS[subject][1])


def drawn(subject: str) -> tuple[Curve, np.ndarray]:
    """Three draws whose cubic parts differ."""
    name, said, way = METRICS[subject]
    slopes = np.array([0.4, 0.5, 0.6])
    worse = 0.3 * (AT**2 - slopes[:, None] * AT**3)
    ones = np.ones(3)
    known = {"consistency": ones, "weighted_consistency": ones, "cosine": ones, "distance": ones, "theta_norm": 1.0}
    curve = Curve(
        direction="line", lambdas=AT, width=1.0, values={name: seen(worse, way)}, statistics="none", seed=0,
        better=said, **known,
    )  # fmt: skip
    return curve, slopes


def asymmetry_index(subject, name):
    found = walked(subject).asymmetry[name]
    assert (found.value, found.minimum) == (pytest.approx((N - P) / (N + P), **EXACT), True)


def interval_of_the_index(subject, name):
    """N + P is the same in all draws, so that the index is linear in the slopes and its interval Student's of them."""
    curve, slopes = drawn(subject)
    ends = np.array(stats.ttest_1samp(slopes, 0.0).confidence_interval(0.95)) * 0.5625 / 0.625
    assert curve.asymmetry[name].interval == pytest.approx(ends, rel=1e-7)  # scipy's quantile, and roots of rounding


def rise_of_both_sides(subject, name):
    branch = walked(subject).branches[name]
    assert (branch.rise_minus, branch.rise_plus) == (pytest.approx(N, **EXACT), pytest.approx(P, **EXACT))
    way = METRICS[subject][2]
    assert (branch.minus, branch.plus) == (pytest.approx(seen(N, way)), pytest.approx(seen(P, way)))


def half_widths(subject, name):
    """Between 0 and ½ the line rises by c(±½) = .3 (¼ ± 1/16): half-way up it is .25 wide."""
    found = walked(subject)
    for at, sign in enumerate((1, -1)):
        assert found.half_widths(name, 0.15 * (0.25 + sign / 16))[at] == pytest.approx(0.25, **EXACT)


def odd_and_even_parts(subject, name):
    found = walked(subject).odd_even(name)
    assert found.odd.tolist() == pytest.approx([-0.15 * 0.125, -0.15], **EXACT)
    assert found.even.tolist() == pytest.approx([0.3 * 0.25, 0.3], **EXACT)


def log_ratio(subject, name):
    walked(subject).asymmetry[name]
    (row,) = walked(subject).summary()
    assert row["log_ratio"] == pytest.approx(math.log(N / P), **EXACT)


def title_of_a_curve(subject, name):
    title, way = drawn(subject)[0].plot(name).title, METRICS[subject][2]
    assert title.endswith(f"flatter on the + side: {seen(N, way):.3g} on −, {seen(P, way):.3g} on +")


def not_a_minimum(subject, name):
    """c = −.3 w: better on +, worse on −; and −.3 w² is better on both, with an index of 0 of no meaning."""
    slope, peak = (walked(subject, of).asymmetry[name] for of in (lambda w: -0.3 * w, lambda w: -0.1 * (w**2)))
    assert (slope.value, slope.falls, slope.minimum) == (1.0, "+", False)
    assert (peak.falls, "not a minimum" in f"{peak}") == ("both", True)
    assert "not a minimum, better on the + side" in walked(subject, lambda w: -0.3 * w).plot(name).title


def line(subject):
    """From −1 to 1: c is .45 and .15 at the ends, 0 in the middle; 1 − w² instead has a barrier of 1."""
    return (
        interpolate(
            scalar(-1.0), scalar(1.0), measure(subject, of), lambdas=[0, 0.25, 0.5, 1], better=METRICS[subject][1]
        )
        for of in (cost, lambda w: 0.1 * (1 - w * w))
    )


def gap_of_an_average(subject, name):
    valley, hill = line(subject)
    assert (valley.gap[name], hill.gap[name]) == (pytest.approx(-0.3, **EXACT), pytest.approx(0.1, **EXACT))


def barrier(subject, name):
    valley, hill = line(subject)
    assert (valley.barrier[name], hill.barrier[name]) == (pytest.approx(0, abs=1e-12), pytest.approx(0.1, **EXACT))


def title_of_a_line(subject, name):
    valley, hill = line(subject)
    assert f"The average is 0.3 better in {name}" in valley.plot(name).title
    assert f"The average is 0.1 worse in {name}" in hill.plot(name).title


def greedy_soup(subject, name):
    """|w − 1.6|/10: alone 2.4, .6, 4.6, .4 tenths; 2 is best, with 1 it is better, with 4 or −3 worse."""
    models = [scalar(value) for value in (4.0, 1.0, -3.0, 2.0)]
    evaluate = measure(subject, lambda w: abs(w - 1.6) / 10)
    found = soup(models, "greedy", evaluate=evaluate, better=METRICS[subject][1])
    assert (found.members, found.state["weight"].item()) == ((3, 1), 1.5)


def steering(subject, name):
    """From w = 1 along itself, cost (w − 1.2)²: the step of .2 is best, and gains .04."""
    evaluate, test = (measure(subject, lambda w: (w - 1.2) ** 2) for _ in range(2))
    found = steer(
        scalar(1.0), evaluate, test=test, along="self", steps=(-0.2, 0.2), metric=name, better=METRICS[subject][1]
    )
    assert (found.path.step, found.path.gain[name]) == (0.2, pytest.approx(0.04, **EXACT))


CHECKS = {name.replace("_", " ").replace("half widths", "half-widths"): check for name, check in {
    check.__name__: check for check in (
        asymmetry_index, interval_of_the_index, rise_of_both_sides, half_widths, odd_and_even_parts, log_ratio,
        title_of_a_curve, not_a_minimum, gap_of_an_average, barrier, title_of_a_line, greedy_soup, steering,
    )
}.items()}  # fmt: skip


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.idiom in SUMMARIES], ids=lambda cell: cell.name)
def test_summary(cell):
    check, name = CHECKS[cell.idiom], METRICS[cell.subject][0]
    if cell.outcome == "equal":
        check(cell.subject, name)
        return
    with pytest.raises(UserError, match=r"metric 'margin': got a name that does not tell .* pass better=\{'margin'"):
        check(cell.subject, name)


ENTRY = """
import torch
from torch import nn


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(40, dtype=torch.float64))


def evaluate(model):
    # worse only where weights shrink: 1 − mean w, cut at 0
    worse = max(0.0, 1 - float(model.weight.detach().mean()))
    return {NAME: SIGN * 0.2 * worse + 0.5, "extra": 7.0}


def make():
    return One(), evaluate
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A scan for each metric, run when first asked for."""
    done = {}

    def made(subject):
        if subject not in done:
            folder = tmp_path_factory.mktemp("entry")
            name, said, way = METRICS[subject]
            told = f"\nevaluate.better = {said!r}\n" if said else ""
            text = ENTRY.replace("NAME", repr(name)).replace("SIGN", "-1" if way == "higher" else "1") + told
            module = f"idiom_entry_{len(done)}"
            (folder / f"{module}.py").write_text(text)
            sys.path.insert(0, str(folder))
            try:
                done[subject] = run(Settings(
                    model=f"{module}:make", out=folder / "run", points=3, draws=4, noises=("positive-uniform",),
                    parts=("noises",),
                ))  # fmt: skip
            finally:
                sys.path.remove(str(folder))
        return done[subject]

    return made


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.idiom in PAGES], ids=lambda cell: cell.name)
def test_page(cell, pages):
    """Worse only on −, in every draw: index 1, its interval a point; the noise is positive, as the weights are."""
    name = METRICS[cell.subject][0]
    assert cell.subject in PAGE_METRICS
    if cell.outcome == "refused":
        with pytest.raises(UserError, match="does not tell whether lower or higher is better"):
            pages(cell.subject)
        return
    record = pages(cell.subject)
    if cell.idiom == "scan page":
        text = answer(record)
        assert f"asymmetry index of the {name} is **1.00**" in text
        assert "higher is better" in (Path(record.settings["out"]) / "report.html").read_text()
    else:
        assert noise_figure(record, name).title == (
            f"With the weights' signs, the {name} falls less where weights grow: 1 of 1 noises"
        )
