"""The pick follows its stated rule, on prices made by hand."""

from __future__ import annotations

import pytest

from sparing.jobs.plan.device import Verdict, judge
from sparing.jobs.plan.price import Candidate, Price, candidates
from sparing.jobs.plan.settings import Lisa, Lora, Settings
from sparing.layersample import LayerSampling
from sparing.layersample.price.activations import LoRA
from sparing.layersample.price.predict import Full, Method
from sparing.memory import Profile


def candidate(label: str, *, checkpointing: bool = False, method: Method = Full()) -> Candidate:  # noqa: B008
    return Candidate(label=label, method=method, checkpointing=checkpointing)


def price(peak: int, trainable: int, speed: float | None = 1.0) -> Price:
    return Price(bytes=Profile(params=peak), trainable=trainable, speed=speed, coverage=1.0)


def picked(verdicts: list[Verdict]) -> Verdict | None:
    return next((verdict for verdict in verdicts if verdict.picked), None)


FULL, AGAIN = candidate("full"), candidate("full", checkpointing=True)
LISA, LORA = candidate("LISA", method=LayerSampling()), candidate("LoRA", method=LoRA())


def test_full_is_taken_where_it_fits_even_if_adapters_are_more():
    verdicts = judge({FULL: price(90, 5), LISA: price(10, 3, 2.0), LORA: price(20, 20, 1.2)}, memory=100)
    assert picked(verdicts).candidate is FULL
    assert [verdict.why for verdict in verdicts] == [
        "the pick: the reference, and it fits; 10 B to spare",
        "full fits, and is what this stands in for",
        "full fits, and is what this stands in for",
    ]


def test_full_that_recomputes_comes_before_what_stands_in_for_it():
    verdicts = judge({FULL: price(101, 5), AGAIN: price(90, 5, 0.8), LISA: price(10, 3, 2.0)}, memory=100)
    assert picked(verdicts).candidate is AGAIN


def test_where_full_does_not_fit_cost_decides_not_the_number_that_trains():
    slow = candidate("LISA, checkpointing", method=LayerSampling(), checkpointing=True)
    prices = {FULL: price(101, 9), LORA: price(99, 8, 1.2), LISA: price(100, 3, 2.0), slow: price(9, 3, 3.0)}
    verdicts = judge(prices, memory=100)
    assert picked(verdicts).candidate is LISA
    assert [verdict.fits for verdict in verdicts] == [False, True, True, True]
    assert [verdict.why for verdict in verdicts] == [
        "1 B too much",
        "1.67× the operations",
        "the pick: fewest operations of those that fit, as full does not; 0 B to spare",
        "computes activations again",
    ]


def test_without_operations_bytes_decide():
    verdicts = judge({LORA: price(90, 8, None), LISA: price(80, 3, None)}, memory=100)
    assert picked(verdicts).candidate is LISA
    assert verdicts[0].why == "more bytes"


def test_what_has_no_price_is_shown_and_never_picked():
    verdicts = judge({FULL: Price(why="not predicted: a reason"), LISA: price(10, 3)}, memory=100)
    assert picked(verdicts).candidate is LISA
    assert (verdicts[0].fits, verdicts[0].why) == (False, "not predicted: a reason")


def test_among_equals_the_one_that_does_not_recompute_wins():
    verdicts = judge({AGAIN: price(50, 5, 0.8), FULL: price(90, 5, 1.0)}, memory=100)
    assert picked(verdicts).candidate is FULL
    assert verdicts[0].why == "fits without, which is faster"


def test_nothing_fits_then_nothing_is_picked():
    verdicts = judge({candidate("a"): price(200, 1)}, memory=100)
    assert picked(verdicts) is None
    assert verdicts[0].why == "100 B too much"


def test_candidates_cover_every_method_with_and_without_checkpointing(tmp_path):
    settings = Settings(model=tmp_path, lisa=Lisa(active=(2, 99)), lora=Lora(ranks=(8,)))
    ways = list(candidates(settings, layers=4, tied=True))
    assert len(ways) == 2 * (1 + 2 + 1)  # full, LISA with and without embedding, LoRA; 99 blocks there are not
    frozen = [way.method for way in ways if "frozen" in way.label]
    assert all(isinstance(way, LayerSampling) and not way.embed and not way.head for way in frozen)


@pytest.mark.parametrize("bad", [{"memory": "24G"}, {"batch": 0}])
def test_impossible_settings_are_refused(bad, tmp_path):
    with pytest.raises(ValueError, match="got"):
        Settings(model=tmp_path, **bad)


def test_impossible_candidates_are_refused():
    with pytest.raises(ValueError, match=r"lisa\.active: got 0"):
        Lisa(active=(0,))
    with pytest.raises(ValueError, match=r"lora\.ranks: got -1"):
        Lora(ranks=(-1,))
