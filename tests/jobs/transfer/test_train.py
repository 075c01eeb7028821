"""One run: what is paired, what the schedule is, and what the rules do to it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sparing.blocks import named_parameters
from sparing.jobs.transfer import Transfer
from sparing.jobs.transfer.inputs import characters, digits, gather
from sparing.jobs.transfer.settings import Cell, Updates
from sparing.jobs.transfer.train import factor, prepare, reference_norm, summary, train

pytest.importorskip("sklearn")

SMALL = Transfer(
    widths=(32,),
    base_width=16,
    layers=2,
    steps=20,
    batch=32,
    densities=(1.0, 0.25),
    mask_updates=Updates(every=4),
    coordinates=False,
)
TEXT = "the quick brown fox jumps over the lazy dog and runs away. " * 30


def test_the_rate_rises_and_falls_in_straight_lines():
    settings = Transfer(steps=100, warmup_share=0.1, final_share=0.1)
    shares = [factor(step, settings) for step in range(100)]
    assert shares[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert shares[10] == 1.0
    assert shares[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert shares[-1] == pytest.approx(0.1 + 0.9 / 90)


def test_weights_are_paired_and_masks_nested_over_rules_and_densities():
    inputs = digits()
    dense, _ = prepare(SMALL, inputs, Cell("sp", 32, 1.0, -7.0, 3))
    half, more = prepare(SMALL, inputs, Cell("sp", 32, 0.5, -7.0, 3))
    quarter, less = prepare(SMALL, inputs, Cell("supar", 32, 0.25, -7.0, 3))
    for name, mask in less.items():
        assert bool((mask <= more[name]).all())
        live = named_parameters(quarter)[name][mask]
        torch.testing.assert_close(live, 2 * named_parameters(dense)[name][mask])  # √(1/ρ): fan-in init has the width
        assert torch.equal(named_parameters(half)[name][mask], named_parameters(dense)[name][mask])
    other, _ = prepare(SMALL, inputs, Cell("sp", 32, 1.0, -7.0, 4))
    assert not torch.equal(named_parameters(other)["head.weight"], named_parameters(dense)["head.weight"])


def test_batches_belong_to_the_seed():
    inputs = digits()
    assert torch.equal(inputs.draws(5, 8, 0), inputs.draws(5, 8, 0))
    assert not torch.equal(inputs.draws(5, 8, 0), inputs.draws(5, 8, 1))


def test_a_run_repeats_to_the_bit_and_learns():
    inputs, cell = digits(), Cell("supar", 32, 0.25, -6.0, 0)
    first, second = (train(SMALL, inputs, cell) for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert first["loss"] < first["start"] - 0.3
    assert first["live"] == 0.25


def test_the_initial_scale_is_that_of_hidden_weights():
    swept = dataclasses.replace(SMALL, axis="std", log2_rates=(-7.0,))
    inputs = digits()
    one, two = (prepare(swept, inputs, Cell("mup", 32, 1.0, x, 0))[0] for x in (0.0, 1.0))
    for name, weight in named_parameters(one).items():
        scale = 2 if name.startswith("hidden") else 1
        torch.testing.assert_close(named_parameters(two)[name], scale * weight)


@pytest.mark.parametrize("dynamic", ["rigl", "set", "gmp"])
@pytest.mark.parametrize("scale", ["none", "density", "energy", "spectral"])
def test_masks_that_change_end_at_the_density(dynamic, scale):
    settings = dataclasses.replace(SMALL, dynamic=dynamic, follow=scale)
    found = train(settings, digits(), Cell("supar", 32, 0.25, -7.0, 0))
    assert found["live"] == pytest.approx(0.25, abs=0.01)
    assert math.isfinite(found["loss"])


def test_the_spectral_reference_is_the_norm_of_a_sign_step():
    """Adam's step has entries near 1: its norm lies between √(d_in + d_out)-like noise and the coherent d."""
    assert 16**0.5 < reference_norm(dataclasses.replace(SMALL, follow="spectral")) < 16


def test_a_text_is_held_out_at_its_end():
    found = characters(TEXT, 8)
    assert len(found.train) == len(TEXT) * 9 // 10
    letters = sorted(set(TEXT))
    rest = TEXT[len(TEXT) * 9 // 10 :]
    windows = ["".join(letters[at] for at in row) for row in found.held_out.tolist()]
    assert all(window in rest for window in windows)
    assert found.outputs == len(letters)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_language_models_learn_characters(model):
    settings = Transfer(
        family=model, widths=(64,), base_width=32, layers=1, steps=20, batch=4, length=16, coordinates=False
    )
    found = train(settings, gather(settings), Cell("supar", 64, 0.25, -6.0, 0))
    assert found["start"] == pytest.approx(math.log(gather(settings).outputs), abs=0.3)
    assert found["loss"] < found["start"] - 0.3


@pytest.mark.parametrize(
    ("losses", "steps", "diverged", "loss"),
    [
        ([3.0] + [1.0] * 19, 20, False, 1.0),
        ([3.0] + [1.0] * 17 + [2.0, 4.0], 20, False, 3.0),
        ([1.0] + [1.2] * 19, 20, True, 1.2),
        ([1.0, math.inf], 20, True, None),
        ([1.0, 2.0], 20, True, None),
    ],
)
def test_divergence_is_a_loss_that_is_no_number_or_ends_above_its_start(losses, steps, diverged, loss):
    found = summary(losses, 0.5, steps)
    assert (found["diverged"], found["loss"]) == (diverged, pytest.approx(loss) if loss else None)
