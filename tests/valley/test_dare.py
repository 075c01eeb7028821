"""DARE by hand where its draw is known, and by its mean and variance where it is not."""

from __future__ import annotations

import math

import pytest
import torch

from refusals import refused
from sparing.seeds import stream
from sparing.valley.merging import method as slices
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.linear import TaskArithmetic
from sparing.valley.merging.merge import merge
from sparing.valley.merging.method import join_slices, slices_of
from sparing.valley.merging.ties import Ties


def thinned(method: Dare, name: str, model: int, delta: torch.Tensor) -> torch.Tensor:
    """What is left of a task vector."""
    return join_slices(method.thinned(name, model, slices_of(delta))(), delta)


def test_known_draw_by_hand():
    """Kept where the stream's uniform draw is at least p; kept elements are doubled at p = ½; λ = 1."""
    base, a, b = torch.full((6,), 10.0), torch.full((6,), 11.0), torch.full((6,), 13.0)
    kept = [torch.rand(6, generator=stream(7, "valley", "dare", "w", at)) >= 0.5 for at in (0, 1)]
    assert 0 < int(kept[0].sum()) < 6  # the draw tells kept from dropped
    expected = [10.0 + 2 * 1 * int(x) + 2 * 3 * int(y) for x, y in zip(*kept, strict=True)]
    assert Dare(0.5, then=TaskArithmetic(1.0), seed=7).tensor("w", [a, b], base).tolist() == expected


def test_nothing_dropped_is_plain_arithmetic():
    base, a = torch.zeros(5), torch.arange(5.0)
    for then in (TaskArithmetic(0.4), Ties(keep=0.4)):
        torch.testing.assert_close(Dare(0.0, then=then).tensor("w", [a], base), then.tensor("w", [a], base))


@pytest.mark.parametrize("drop", [0.4, 0.9])
def test_mean_and_variance_of_an_element(drop: float):
    """200,000 draws of τ = 2: mean τ, variance τ² p / (1 − p), within 5 standard errors of each."""
    n, tau = 200_000, 2.0
    found = thinned(Dare(drop), "w", 0, torch.full((n,), tau)).double()
    variance = tau**2 * drop / (1 - drop)
    assert abs(found.mean() - tau) < 5 * math.sqrt(variance / n)
    # Fourth central moment of the two-point law: values 0 and τ / (1 − p); at p = ½ it vanishes
    high = tau / (1 - drop)
    fourth = drop * tau**4 + (1 - drop) * (high - tau) ** 4
    assert abs(found.var() - variance) < 5 * math.sqrt((fourth - variance**2) / n)


def test_models_tensors_and_seeds_draw_apart_and_order_does_not_matter():
    base = {"x": torch.zeros(64), "y": torch.zeros(64)}
    model = {"x": torch.ones(64), "y": torch.ones(64)}
    method = Dare(0.5, then=TaskArithmetic(1.0))
    found = merge([model], base=base, method=method)
    assert not torch.equal(found["x"], found["y"])
    turned = merge([dict(reversed(model.items()))], base=base, method=method)
    assert all(torch.equal(found[name], turned[name]) for name in found)
    assert not torch.equal(found["x"], Dare(0.5, then=method.then, seed=1).tensor("x", [model["x"]], base["x"]))
    assert not torch.equal(thinned(method, "x", 0, model["x"]), thinned(method, "x", 1, model["x"]))


def test_signs_are_elected_among_what_was_kept():
    """With TIES behind, an element dropped in one model is decided by the other."""
    base, a, b = torch.zeros(100), torch.full((100,), 1.0), torch.full((100,), -3.0)
    method = Dare(0.5, then=Ties(keep=1.0))
    mine, theirs = thinned(method, "w", 0, a), thinned(method, "w", 1, b)
    expected = [-6.0 if y else (2.0 if x else 0.0) for x, y in zip(mine.tolist(), theirs.tolist(), strict=True)]
    assert method.tensor("w", [a, b], base).tolist() == expected
    assert {-6.0, 2.0, 0.0} == set(expected)


def test_dtypes_share_a_draw():
    tau = torch.ones(50)
    assert torch.equal(thinned(Dare(0.5), "w", 0, tau).double(), thinned(Dare(0.5), "w", 0, tau.double()))


@pytest.mark.parametrize("length", [1, 3, 17, 1000])
def test_the_draw_does_not_depend_on_the_cut(length: int, monkeypatch: pytest.MonkeyPatch):
    """The same numbers from one generator, slice after slice, and again at the next reading."""
    monkeypatch.setattr(slices, "SLICE", length)
    kept = torch.rand(2003, generator=stream(3, "valley", "dare", "w", 1)) >= 0.3
    source = Dare(0.3, seed=3).thinned("w", 1, slices_of(torch.ones(2003)))
    for _ in range(2):
        assert torch.equal(torch.cat(list(source())) > 0, kept)


@pytest.mark.parametrize("drop", [1.0, -0.1, float("nan")])
def test_probabilities_out_of_range_are_refused(drop: float):
    refused("drop: got", Dare, drop)


def test_trimming_the_whole_model_behind_a_draw_is_refused():
    refused("all draws at once", Dare, then=Ties(across="model"))
