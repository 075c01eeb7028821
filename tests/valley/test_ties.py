"""TIES by hand: trimmed, elected and averaged on paper, then compared."""

from __future__ import annotations

import math

import pytest
import torch

from refusals import refused
from sparing.errors import UserError
from sparing.seeds import stream
from sparing.valley.merging import method as slices
from sparing.valley.merging import ties
from sparing.valley.merging.merge import merge
from sparing.valley.merging.method import slices_of
from sparing.valley.merging.ties import Ties, elect, threshold, trim


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def delta(method: Ties, parts: list[torch.Tensor]) -> torch.Tensor:
    """What the method adds to a base."""
    return method.tensor("w", parts, torch.zeros_like(parts[0]))


BASE = vector(1, 1, 1, 1, 1)
# Task vectors; keep = 0.6 keeps the three largest magnitudes of five:
#   τ1 = [ 4, -1,  3,  2,  0.5]  ->  [ 4, 0,  3, 2, 0]
#   τ2 = [-2,  5,  1, -3, -0.5]  ->  [-2, 5,  0, -3, 0]
#   τ3 = [-1, -4,  2,  0,  3  ]  ->  [ 0, -4, 2, 0, 3]
# sums  [2, 1, 5, -1, 3]         ->  signs [+, +, +, −, +]
# means of those with the sign       [4, 5, (3+2)/2, −3, 3]
TASKS = [vector(4, -1, 3, 2, 0.5), vector(-2, 5, 1, -3, -0.5), vector(-1, -4, 2, 0, 3)]
MERGED = vector(4, 5, 2.5, -3, 3)


def test_hand_computed_merge():
    models = [BASE + task for task in TASKS]
    found = Ties(keep=0.6).tensor("w", models, BASE)
    torch.testing.assert_close(found, BASE + MERGED, rtol=0, atol=0)  # small integers and halves are exact
    torch.testing.assert_close(Ties(keep=0.6, scale=0.5).tensor("w", models, BASE), BASE + MERGED / 2, rtol=0, atol=0)


def test_hand_computed_weights():
    """Weights 1, 3, 1: sums [4−6, 15−4, 3+2, 2−9, 3] = [−2, 11, 5, −7, 3]; means of the same sign, all from one model
    but the third: (3 + 2) / 2."""
    found = delta(Ties(keep=0.6, weights=(1, 3, 1)), TASKS)
    torch.testing.assert_close(found, vector(-2, 5, 2.5, -3, 3), rtol=0, atol=0)
    found = delta(Ties(keep=1.0, weights=(1, 3, 1)), [vector(2), vector(4), vector(-1)])
    torch.testing.assert_close(found, vector(14 / 4), rtol=0, atol=0)  # (2 + 12) / (1 + 3)


def test_no_trimming_keeps_all():
    """Sums [1, 0, 6, −1, 3]; the second is a tie: no sign, so the base stays, or plus, so that 5 stays."""
    none = delta(Ties(keep=1.0), TASKS)
    torch.testing.assert_close(none, vector(4, 0, 2, -3, 1.75), rtol=0, atol=0)
    plus = delta(Ties(keep=1.0, tied="plus"), TASKS)
    torch.testing.assert_close(plus, vector(4, 5, 2, -3, 1.75), rtol=0, atol=0)


def test_whole_model_trimming_differs_and_is_exact():
    """Over [4, 1 | 3, 0.1] the larger half is {4, 3}; by tensor it would be {4} and {3} of one element each; with
    [4, 3 | 1, 0.1] the whole model keeps the first tensor and nothing of the second."""
    base = {"x": vector(0, 0), "y": vector(0, 0)}
    model = {"x": vector(4, 3), "y": vector(1, 0.1)}
    whole = merge([model], base=base, method=Ties(keep=0.5, across="model"))
    assert [whole["x"].tolist(), whole["y"].tolist()] == [[4, 3], [0, 0]]
    each = merge([model], base=base, method=Ties(keep=0.5))
    assert [each["x"].tolist(), each["y"].tolist()] == [[4, 0], [1, 0]]


def test_whole_model_trimming_leaves_statistics_out():
    base = {"w": vector(0, 0), "bn.running_mean": vector(0)}
    model = {"w": vector(1, 0.1), "bn.running_mean": vector(100)}
    found = merge([model], base=base, method=Ties(keep=0.5, across="model"))
    assert [found["w"].tolist(), found["bn.running_mean"].tolist()] == [[1, 0], [100]]


def test_whole_model_trimming_compares_dtypes():
    """The larger half of [4, 1 | 3, 0.1], where one tensor is in float64 and the other in bfloat16."""
    base = {"x": vector(0, 0), "y": vector(0, 0).bfloat16()}
    model = {"x": vector(4, 1), "y": vector(3, 0.1).bfloat16()}
    found = merge([model], base=base, method=Ties(keep=0.5, across="model"))
    assert [found["x"].tolist(), found["y"].tolist()] == [[4, 0], [3, 0]]


def test_one_tensor_does_not_tell_the_whole_model():
    refused("one tensor does not tell the largest changes", Ties(across="model").tensor, "w", [BASE], BASE)


@pytest.mark.parametrize(("keep", "left"), [(0.2, 2), (0.29, 2), (0.3, 3), (1e-9, 1), (0.99, 9)])
def test_share_kept_is_rounded_down_but_never_to_nothing(keep: float, left: int):
    values = torch.arange(1, 11, dtype=torch.float64)
    assert int((trim(values, keep) != 0).sum()) == left
    assert threshold(slices_of(values), keep) == 11 - left


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("few", [0, 50, 1 << 20])
@pytest.mark.parametrize("keep", [1e-9, 0.1, 0.2, 0.5, 0.999])
def test_thresholds_are_those_of_sorting(
    dtype: torch.dtype, keep: float, few: int, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    """Over many orders of magnitude, with equal ones, zeros, neighbours that differ in one bit, and extremes.

    With ``few`` = 0 to the last bit; with 50 and more the last ones are read into memory.
    """
    monkeypatch.setattr(slices, "SLICE", 97)
    monkeypatch.setattr(ties, "_FEW", few)
    generator = stream(0, "test-ties", "threshold")
    many = torch.randn(3000, generator=generator, dtype=dtype) * torch.exp(
        20 * torch.randn(3000, generator=generator, dtype=dtype)
    )
    limits = torch.finfo(dtype)
    close = torch.full((500,), 1.0, dtype=dtype).nextafter(torch.tensor(2.0, dtype=dtype))
    edges = torch.tensor([limits.max, -limits.max, limits.tiny, limits.tiny / 2, 0.0, -0.0, 1.0], dtype=dtype)
    for values in (many, torch.cat([many, close, -close, torch.ones(501, dtype=dtype), edges]), edges[:1]):
        kept = max(1, math.floor(keep * len(values)))
        assert threshold(slices_of(values), keep) == values.abs().sort(descending=True).values[kept - 1].item()


@pytest.mark.parametrize("length", [3, 1000])
def test_no_rank_is_above_all(length: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slices, "SLICE", 97)
    assert ties.largest(slices_of(torch.ones(length)), lambda count: 0) == math.inf
    assert not ties.trimmed(torch.full((3,), torch.finfo(torch.float32).max), math.inf).any()


def test_all_and_nothing_have_no_threshold():
    assert threshold(slices_of(vector(3, 2)), 1.0) == 0
    assert threshold(slices_of(torch.zeros(0)), 0.5) == 0


def test_share_kept_is_not_lost_to_binary_fractions():
    """0.29 · 100 is 28.999999999999996."""
    assert threshold(slices_of(torch.arange(1, 101, dtype=torch.float64)), 0.29) == 72


def test_equal_magnitudes_stay_together_whatever_their_order():
    values = vector(1, -1, 1, 0.5)
    assert trim(values, 0.25).tolist() == [1, -1, 1, 0]
    order = torch.tensor([3, 2, 0, 1])
    torch.testing.assert_close(trim(values, 0.25)[order], trim(values[order], 0.25), rtol=0, atol=0)


def test_merging_is_the_same_under_a_permutation_of_elements_and_of_models():
    draws = torch.randn(4, 30, generator=stream(0, "test-ties"), dtype=torch.float64)
    order = torch.randperm(30, generator=stream(0, "test-ties", "order"))
    method = Ties(keep=0.3)
    found = delta(method, list(draws))
    torch.testing.assert_close(delta(method, list(draws[:, order])), found[order], rtol=0, atol=0)
    torch.testing.assert_close(delta(method, list(draws.flip(0))), found, rtol=1e-14, atol=0)  # sums in turn


def test_one_model_untrimmed_is_itself():
    model = vector(3, 0, -1, 2, 5)
    torch.testing.assert_close(Ties(keep=1.0).tensor("w", [model], BASE), model, rtol=0, atol=0)


def test_election_of_zeros():
    nothing = [torch.zeros(2), torch.zeros(2)]
    assert elect(nothing, [1.0, 1.0]).tolist() == [0, 0]
    assert elect(nothing, [1.0, 1.0], "plus").tolist() == [1, 1]
    assert delta(Ties(tied="plus"), nothing).tolist() == [0, 0]


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.1, float("nan")])
def test_shares_out_of_range_are_refused(keep: float):
    refused("keep: got", Ties, keep=keep)


def test_other_settings_are_refused():
    refused("scale", Ties, scale=float("inf"))
    with pytest.raises(UserError, match="there is no such rule"):
        Ties(across="layer")  # type: ignore[arg-type]
    refused("finite weights", Ties, weights=(1.0, float("nan")))
    refused("weights: got 1 of them; 2 models", Ties(weights=(1.0,)).tensor, "w", [BASE, BASE], BASE)
    refused("base at 'w': got none", Ties().tensor, "w", [BASE])
