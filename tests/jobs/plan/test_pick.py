"""The pick follows its stated rule, on prices made by hand."""

from __future__ import annotations

import pytest

from sparing.jobs.lm.adapters import Lora as Adapters
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.step import FitStep, Method
from sparing.jobs.plan.candidates import ADAPTERS, REFERENCE, ROUNDED, STAND_IN, UNSETTLED, Candidate, candidates
from sparing.jobs.plan.device import Verdict, judge
from sparing.jobs.plan.price import Price
from sparing.jobs.plan.settings import Lisa, Lora, Settings
from sparing.layersample import LayerSampling
from sparing.layersample.price.predict import Full
from sparing.layersample.price.shape import Shape
from sparing.memory import Profile


def candidate(label: str, *, checkpointing: bool = False, tier: int = UNSETTLED, method: Method = Full()) -> Candidate:  # noqa: B008
    return Candidate(label=label, step=FitStep(method=method, checkpointing=checkpointing), tier=tier)


def price(peak: int, flops: int | None = 1, seconds: float | None = None) -> Price:
    return Price(bytes=Profile(params=peak), trainable=1, flops=flops, seconds=seconds)


def picked(verdicts: list[Verdict]) -> Verdict | None:
    return next((verdict for verdict in verdicts if verdict.picked), None)


FULL, AGAIN = candidate("full", tier=REFERENCE), candidate("full", checkpointing=True, tier=REFERENCE)
EIGHT = candidate("full, adamw-8bit", tier=STAND_IN)
LISA, LORA = candidate("LISA", method=LayerSampling()), candidate("LoRA", method=Adapters(), tier=ADAPTERS)
SAMPLED = candidate("LISA, embedding frozen", method=LayerSampling(embed=False))
QLORA = candidate("QLoRA", method=Adapters(), tier=ROUNDED)


def test_full_is_taken_where_it_fits_even_if_adapters_cost_less():
    verdicts = judge({FULL: price(90, 5), LISA: price(10, 3), LORA: price(20, 2), QLORA: price(5, 2)}, memory=100)
    assert picked(verdicts).candidate is FULL
    assert [verdict.why for verdict in verdicts] == [
        "the pick: the reference, and it fits; 10 B to spare",
        *["full fits, and is what this stands in for"] * 3,
    ]


def test_full_that_recomputes_comes_before_what_stands_in_for_it():
    verdicts = judge({FULL: price(101, 5), AGAIN: price(90, 6), EIGHT: price(50, 5), LISA: price(10, 3)}, memory=100)
    assert picked(verdicts).candidate is AGAIN


def test_eight_bit_moments_come_before_fewer_blocks():
    verdicts = judge({FULL: price(101, 5), EIGHT: price(90, 5), LISA: price(10, 3)}, memory=100)
    assert picked(verdicts).why == "the pick: full fine-tuning, with 8-bit moments; 10 B to spare"


def test_where_full_does_not_fit_adapters_come_before_layers():
    verdicts = judge({FULL: price(101, 9), LORA: price(99, 5), LISA: price(50, 3)}, memory=100)
    assert [verdict.why for verdict in verdicts] == [
        "1 B too much",
        "the pick: LoRA, ahead of layers where both were measured; 1 B to spare",
        "LoRA fits, and led where both were measured",
    ]
    assert picked(judge({LORA: price(101, 5), LISA: price(50, 3)}, memory=100)).candidate is LISA


def test_among_layers_cost_decides_and_rounded_weights_come_last():
    slow = candidate("LISA, many", method=LayerSampling(), checkpointing=True)
    prices = {FULL: price(101, 9), SAMPLED: price(99, 5), LISA: price(100, 3), slow: price(9, 2), QLORA: price(5, 1)}
    verdicts = judge(prices, memory=100)
    assert picked(verdicts).candidate is LISA
    assert [verdict.fits for verdict in verdicts] == [False, True, True, True, True]
    assert [verdict.why for verdict in verdicts] == [
        "1 B too much",
        "1.67× the operations",
        "the pick: fewest operations of those that fit; 0 B to spare",
        "computes activations again",
        "rounds frozen weights",
    ]


def test_with_the_speed_of_a_card_the_shortest_step_is_taken():
    slow = candidate("LISA, many", method=LayerSampling(), checkpointing=True)
    verdicts = judge({SAMPLED: price(90, 8, 2.0), slow: price(80, 9, 1.0)}, memory=100)
    assert picked(verdicts).candidate is slow
    assert [verdict.why for verdict in verdicts] == [
        "2.00× the time", "the pick: shortest step of those that fit; 20 B to spare",
    ]  # fmt: skip


def test_among_equal_operations_bytes_decide():
    verdicts = judge({SAMPLED: price(90, 3), LISA: price(80, 3)}, memory=100)
    assert picked(verdicts).candidate is LISA
    assert verdicts[0].why == "more bytes"


def test_what_has_no_price_is_shown_and_never_picked():
    verdicts = judge({FULL: Price(why="not predicted: a reason"), LISA: price(10, 3)}, memory=100)
    assert picked(verdicts).candidate is LISA
    assert (verdicts[0].fits, verdicts[0].why) == (False, "not predicted: a reason")


def test_among_equals_the_one_that_does_not_recompute_wins():
    verdicts = judge({AGAIN: price(50, 6), FULL: price(90, 5)}, memory=100)
    assert picked(verdicts).candidate is FULL
    assert verdicts[0].why == "fits without, which is faster"


def test_nothing_fits_then_nothing_is_picked():
    verdicts = judge({candidate("a"): price(200, 1)}, memory=100)
    assert picked(verdicts) is None
    assert verdicts[0].why == "100 B too much"


def test_candidates_cover_every_method_with_and_without_checkpointing(tmp_path):
    settings = Settings(model=tmp_path, lisa=Lisa(active=(2, 99)), lora=Lora(ranks=(8,)))
    shape = Shape(layers=4, width=8, ffn=8, heads=1, kv_heads=1, head_dim=8, vocab=16, tied=True)
    ways = list(candidates(settings, Source(shape, "auto")))
    # full with four optimizers, LISA with and without embedding and rounded, of 2 and of 99 blocks, which are refused,
    # BAdam, LoRA and rounded
    assert len(ways) == 2 * (4 + 2 * 3 + 1 + 2)
    frozen = [way.step.method for way in ways if "frozen" in way.label]
    assert all(isinstance(way, LayerSampling) and not way.embed and not way.head for way in frozen)
    assert {way.step.weights for way in ways if way.label.startswith("Q")} == {"nf4"}


@pytest.mark.parametrize("bad", [{"memory": "24G"}, {"batch": 0}])
def test_impossible_settings_are_refused(bad, tmp_path):
    with pytest.raises(ValueError, match="got"):
        Settings(model=tmp_path, **bad)


def test_impossible_candidates_are_refused():
    with pytest.raises(ValueError, match=r"lisa\.active: got 0"):
        Lisa(active=(0,))
    with pytest.raises(ValueError, match=r"lora\.ranks: got -1"):
        Lora(ranks=(-1,))
