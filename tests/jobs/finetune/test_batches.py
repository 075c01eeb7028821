"""Order of rows: each pass a permutation, windows cut from passes laid end to end."""

from __future__ import annotations

import pytest
import torch

from sparing.jobs.finetune.batches import order, steps_of, window


def test_a_pass_is_a_permutation_and_passes_differ() -> None:
    passes = [order(40, seed=1, epoch=e) for e in range(3)]
    assert all(torch.equal(p.sort().values, torch.arange(40)) for p in passes)
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0], order(40, seed=2, epoch=0))


@pytest.mark.parametrize(("rows", "batch", "accumulate"), [(10, 2, 2), (7, 3, 1), (3, 2, 4), (1, 1, 1), (5, 1, 2)])
def test_windows_are_the_passes_laid_end_to_end(rows: int, batch: int, accumulate: int) -> None:
    size = batch * accumulate
    windows = [window(s, rows=rows, batch=batch, accumulate=accumulate, seed=5) for s in range(9)]

    assert all(w.shape == (accumulate, batch) for w in windows)
    endless = torch.cat([order(rows, seed=5, epoch=e) for e in range(9 * size // rows + 1)])
    assert torch.equal(torch.cat([w.flatten() for w in windows]), endless[: 9 * size])


def test_the_same_rows_whatever_the_accumulation() -> None:
    """Two micro-batches of three are one of six: what equality of the two runs rests on."""
    for step in range(5):
        split = window(step, rows=11, batch=3, accumulate=2, seed=0)
        whole = window(step, rows=11, batch=6, accumulate=1, seed=0)
        assert torch.equal(split.flatten(), whole.flatten())


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.0, 5), (0.1, 1), (0.5, 2)])
def test_epochs_become_steps(epochs: float, steps: int) -> None:
    """10 rows in windows of 4: 2.5 steps a pass, rounded up."""
    assert steps_of(epochs, rows=10, batch=2, accumulate=2) == steps


def test_rounding_does_not_add_a_step() -> None:
    # 0.1 * 30 is 3.0000000000000004 in float64; three steps are meant.
    assert steps_of(0.1, rows=30, batch=1, accumulate=1) == 3
