"""Timing of layers: what is timed is what is trained; nothing here looks at the clock."""

from __future__ import annotations

import pytest
import torch

from sparing.errors import UserError
from sparing.scaling.sparse import timing
from sparing.scaling.sparse.layers import SparseLinear
from sparing.scaling.sparse.timing import Seconds, even_mask, interleave, time_layer


@pytest.mark.parametrize(("density", "live"), [(1.0, 32), (0.5, 16), (1 / 32, 1), (1e-6, 1)])
def test_even_masks_have_equal_rows(density, live):
    mask = even_mask(7, 32, density)
    assert mask.shape == (7, 32)
    assert mask.sum(1).tolist() == [live] * 7


def test_runs_take_turns_and_the_first_round_does_not_count():
    calls = []
    taken = interleave([lambda: calls.append("a"), lambda: calls.append("b")], rounds=3)
    assert calls == ["a", "b"] * 4
    assert [len(seconds) for seconds in taken] == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_forms_are_timed(dtype):
    seconds = time_layer(24, 16, 0.25, 8, dtype=dtype, rounds=2)
    assert isinstance(seconds, Seconds)
    assert 0 < seconds.dense < float("inf")
    assert 0 < seconds.sparse < float("inf")


def test_arms_do_the_same_work():
    """Both passes leave the same gradients: recorded before they are dropped."""
    mask = even_mask(6, 8, 0.5)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    weight = (torch.arange(48.0, dtype=torch.float64).view(6, 8) * mask).requires_grad_()
    layer = SparseLinear(weight, mask)
    seen = {}
    for name, parameter in (("dense", weight), ("sparse", layer.weight)):
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    timing.masked_dense(x, weight, mask)()
    timing.sparse(x, layer)()
    torch.testing.assert_close(seen["sparse"], layer.gather(seen["dense"]), rtol=1e-12, atol=1e-12)
    assert x.grad is None
    assert weight.grad is None
    assert layer.weight.grad is None


def test_sparse_seconds_are_infinite_where_it_cannot_run():
    assert time_layer(24, 16, 0.25, 8, dtype=torch.float16, rounds=1).sparse == float("inf")


def test_timing_works_where_gradients_are_off_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    with torch.no_grad():
        time_layer(8, 8, 0.5, 4, rounds=1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("bad", [{"density": 0.0}, {"density": 1.5}, {"tokens": 0}, {"d_in": 0}])
def test_bad_sizes_are_refused(bad):
    with pytest.raises(UserError):
        time_layer(**({"d_in": 8, "d_out": 8, "density": 0.5, "tokens": 4} | bad))
