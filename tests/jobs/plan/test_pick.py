"""The pick follows its stated rule, on prices made by hand."""

from __future__ import annotations

import pytest

from sparing.jobs.plan.candidates import Candidate, candidates
from sparing.jobs.plan.pick import judge, picked
from sparing.jobs.plan.price import Price
from sparing.jobs.plan.settings import Settings
from sparing.layersample import LayerSampling
from sparing.layersample.predict import Full
from sparing.memory import Profile


def candidate(label: str, *, checkpointing: bool = False) -> Candidate:
    return Candidate(label=label, method=Full(), checkpointing=checkpointing)


def price(peak: int, trainable: int, speed: float | None = 1.0) -> Price:
    return Price(bytes=Profile(params=peak), trainable=trainable, speed=speed, coverage=1.0)


def test_the_most_parameters_at_once_win_among_those_that_fit():
    large, middle, small = candidate("large"), candidate("middle"), candidate("small")
    verdicts = judge({large: price(101, 9), middle: price(100, 5), small: price(10, 3)}, memory=100)
    assert picked(verdicts).candidate is middle
    assert [verdict.fits for verdict in verdicts] == [False, True, True]
    assert [verdict.why for verdict in verdicts] == [
        "1 B too much",
        "the pick; 0 B to spare",
        "trains 1.7× fewer at once",
    ]


def test_among_equals_the_one_that_does_not_recompute_wins():
    plain, again = candidate("a"), candidate("a", checkpointing=True)
    verdicts = judge({again: price(50, 5, 0.8), plain: price(90, 5, 1.0)}, memory=100)
    assert picked(verdicts).candidate is plain
    assert verdicts[0].why == "fits without, which is faster"


def test_nothing_fits_then_nothing_is_picked():
    verdicts = judge({candidate("a"): price(200, 1)}, memory=100)
    assert picked(verdicts) is None
    assert verdicts[0].why == "100 B too much"


def test_candidates_cover_every_method_with_and_without_checkpointing(tmp_path):
    settings = Settings(model=tmp_path, active=(2, 99), ranks=(8,))
    ways = list(candidates(settings, layers=4, tied=True))
    assert len(ways) == 2 * (1 + 2 + 1)  # full, LISA with and without embedding, LoRA; 99 blocks there are not
    frozen = [way.method for way in ways if "frozen" in way.label]
    assert all(isinstance(way, LayerSampling) and not way.embed and not way.head for way in frozen)


@pytest.mark.parametrize("bad", [{"memory": "24G"}, {"batch": 0}, {"active": (0,)}, {"ranks": (-1,)}])
def test_impossible_settings_are_refused(bad, tmp_path):
    with pytest.raises(ValueError, match="got"):
        Settings(model=tmp_path, **bad)
