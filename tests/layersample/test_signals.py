"""Importance signals: the running average, and bounds that hold for true weight gradients, with equality where due."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparing.errors import UserError
from sparing.layersample.signals import gram_norm, norm_bound, root_mean_square, token_bound, updated

nan = torch.nan


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def true_gradient(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Weight gradient that autograd finds when ``deltas`` flows into a linear map's output."""
    layer = nn.Linear(inputs.shape[-1], deltas.shape[-1], bias=False, dtype=torch.float64)
    layer(inputs).backward(deltas)
    assert layer.weight.grad is not None
    return layer.weight.grad


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 7), st.integers(1, 7), st.integers(0, 1000))
def test_both_bounds_hold_and_the_token_bound_is_the_tighter(
    batch: int, length: int, d: int, e: int, seed: int
) -> None:
    x, delta = gaussian(batch, length, d, seed=seed), gaussian(batch, length, e, seed=seed + 1)
    truth = float(true_gradient(x, delta).norm())
    tolerance = 1 + 1e-12  # rounding of sums of at most some hundred float64 terms
    assert truth <= float(token_bound(x, delta)) * tolerance
    assert float(token_bound(x, delta)) <= float(norm_bound(x, delta)) * tolerance


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 7), st.integers(1, 7), st.integers(0, 1000))
def test_the_gram_norm_is_the_norm_of_the_true_gradient(batch: int, length: int, d: int, e: int, seed: int) -> None:
    x, delta = gaussian(batch, length, d, seed=seed), gaussian(batch, length, e, seed=seed + 1)
    truth = true_gradient(x, delta).norm()
    # the root of a sum of products loses half the digits if terms cancel; relative to the bound, 1e-7 at worst
    torch.testing.assert_close(gram_norm(x, delta), truth, rtol=1e-9, atol=1e-7 * float(norm_bound(x, delta)))


def test_the_norm_bound_is_met_by_one_direction_with_one_profile_over_tokens() -> None:
    profile, u, v = gaussian(3, 5, 1), gaussian(7, seed=1), gaussian(4, seed=2)
    x, delta = profile * u, 2.5 * profile * v
    torch.testing.assert_close(norm_bound(x, delta), true_gradient(x, delta).norm(), rtol=1e-13, atol=0)


def test_the_token_bound_is_met_by_one_direction_whatever_the_profiles() -> None:
    c, d = gaussian(6, 1).abs(), gaussian(6, 1, seed=3).abs()
    x, delta = c * gaussian(7, seed=1), d * gaussian(4, seed=2)
    truth = true_gradient(x, delta).norm()
    torch.testing.assert_close(token_bound(x, delta), truth, rtol=1e-13, atol=0)
    assert float(norm_bound(x, delta)) > 1.01 * float(truth)


def test_a_single_token_meets_every_bound() -> None:
    x, delta = gaussian(1, 7), gaussian(1, 4, seed=1)
    truth = true_gradient(x, delta).norm()
    for bound in (norm_bound, token_bound, gram_norm):
        torch.testing.assert_close(bound(x, delta), truth, rtol=1e-13, atol=0)


def test_the_bound_holds_inside_a_real_model_for_frozen_maps_too() -> None:
    """Hooks on a two-block transformer: the bound of a frozen block against the gradient it has when thawed."""
    import zoo

    model = zoo.llama(layers=2)
    seen: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def watch(name: str):
        def hook(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            deltas: list[Tensor] = []
            output.register_hook(deltas.append)
            seen[name] = (inputs[0].detach(), deltas)

        return hook

    maps = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n}
    for name, module in maps.items():
        module.register_forward_hook(watch(name))
    batch = zoo.tokens()
    model(**batch).loss.backward()
    truths = {name: module.weight.grad.norm() for name, module in maps.items()}
    for layer in model.model.layers:
        layer.requires_grad_(False)
    seen.clear()
    model(**batch).loss.backward()  # the embedding trains, so δ still reaches every block
    assert len(seen) == len(truths) == 14
    for name, (x, (delta,)) in seen.items():
        assert (
            float(truths[name])
            <= float(token_bound(x, delta)) * (1 + 1e-12)
            <= float(norm_bound(x, delta)) * (1 + 1e-11)
        )
        torch.testing.assert_close(gram_norm(x, delta), truths[name], rtol=1e-8, atol=0)


def test_running_scores_follow_the_closed_form() -> None:
    """With a constant observation o from s: s·β^n + o·(1 − β^n)."""
    scores = torch.tensor([3.0, 1.0], dtype=torch.float64)
    seen = torch.tensor([5.0, 1.0], dtype=torch.float64)
    for _ in range(7):
        scores = updated(scores, seen, 0.8)
    assert scores.tolist() == pytest.approx([3.0 * 0.8**7 + 5.0 * (1 - 0.8**7), 1.0])


def test_only_visited_blocks_move_and_a_first_look_counts_whole() -> None:
    after = updated(torch.tensor([1.0, 2.0, nan, nan]), torch.tensor([3.0, nan, 4.0, nan]), 0.5)
    torch.testing.assert_close(after, torch.tensor([2.0, 2.0, 4.0, nan]), equal_nan=True)
    first = torch.tensor([nan, 2.0])
    torch.testing.assert_close(updated(None, first, 0.9), first, equal_nan=True)


def test_a_decay_of_zero_forgets_and_a_decay_of_one_is_refused() -> None:
    assert updated(torch.tensor([1.0]), torch.tensor([2.0]), 0.0).tolist() == [2.0]
    for decay in (1.0, -0.1, math.nan):
        with pytest.raises(UserError, match="decay"):
            updated(None, torch.ones(1), decay)


def test_a_block_cut_in_two_equal_halves_scores_like_each_half() -> None:
    squares, sizes = torch.tensor([8.0, 4.0, 0.0]), torch.tensor([8, 4, 0])
    assert root_mean_square(squares, sizes).tolist() == [1.0, 1.0, 0.0]
