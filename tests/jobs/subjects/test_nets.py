"""Nets of the scans: what they compute, where their weights come from, and how they are trained."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparing.jobs.subjects.images import inputs_of
from sparing.jobs.subjects.nets import Residual, ResNet, Training, Vgg, initialize, rate_at, train
from sparing.seeds import stream


@pytest.mark.parametrize("build", [Vgg, ResNet])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32)])
def test_images_of_both_kinds_become_ten_logits(build, norm, channels, side):
    model = initialize(lambda: build(channels, norm=norm), seed=0).eval()

    assert model(torch.ones(2, channels, side, side)).shape == (2, 10)
    norms = [type(each).__name__ for each in model.modules() if "Norm" in type(each).__name__]
    assert set(norms) == {"batch": {"BatchNorm2d"}, "group": {"GroupNorm"}, "none": set()}[norm]


def test_vgg_is_the_chain_it_says_it_is():
    model = initialize(lambda: Vgg(3), seed=1).double().eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = dict(model.named_parameters())

    x = images
    for index in range(4):
        x = functional.conv2d(x, weights[f"layers.{index}.conv.weight"], padding=1) / math.sqrt(1 + 1e-5)  # fresh norm
        x = x.clamp(min=0)
        if index < 3:
            x = x.unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    expected = x.mean((2, 3)) @ weights["head.weight"].T

    # float64; sums over at most 288 products in another order
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-12)


def test_a_residual_block_whose_branch_is_zero_hands_on_every_second_pixel():
    block = Residual(2, 3, norm="none", stride=2)
    for each in block.parameters():
        nn.init.zeros_(each)
    x = torch.arange(-16.0, 16.0).view(1, 2, 4, 4)

    expected = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.0, 2.0], [8.0, 10.0]], [[0.0, 0.0], [0.0, 0.0]]])

    assert block(x)[0].equal(expected)


def test_initial_weights_are_normal_with_the_variance_of_their_fan_in_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    model = initialize(lambda: Vgg(3, widths=(64, 128, 64, 64)), seed=3)

    assert torch.random.get_rng_state().equal(before)
    conv = model.layers[1].conv.weight
    # 73,728 draws: the relative standard error of a deviation is 1 / sqrt(2n) = 0.0026; five of them
    assert conv.std().item() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.013)
    assert model.head.weight.std().item() == pytest.approx(math.sqrt(1 / 64), rel=0.14)  # 640 draws
    assert not model.head.bias.any()
    assert model.layers[0].norm.weight.eq(1).all()
    assert initialize(lambda: Vgg(3, widths=(64, 128, 64, 64)), seed=3).layers[1].conv.weight.equal(conv)
    assert not initialize(lambda: Vgg(3, widths=(64, 128, 64, 64)), seed=4).layers[1].conv.weight.equal(conv)


def test_weights_of_norms_start_as_asked_and_the_rest_is_the_same():
    nets = {scale: initialize(lambda: Vgg(1), seed=0, scale=scale) for scale in ("ones", "uniform", "normal")}
    weights = {scale: net.layers[3].norm.weight for scale, net in nets.items()}

    assert weights["ones"].eq(1).all()
    assert 0 <= weights["uniform"].min() < 0.3  # 64 draws
    assert 0.7 < weights["uniform"].max() < 1
    assert weights["normal"].min() < 0 < weights["normal"].max() < 0.5  # five deviations
    for net in nets.values():
        assert net.layers[3].conv.weight.equal(nets["ones"].layers[3].conv.weight)


def test_inputs_have_mean_zero_and_deviation_one_in_each_channel_of_the_images_they_are_like():
    images = torch.randint(0, 256, (20, 4, 4, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    inputs, (mean, deviation) = inputs_of(images), (images[..., 2].double().mean(), images[..., 2].double().std())

    assert inputs.shape == (20, 3, 4, 4)
    expected = (images[:5, :, :, 2].double() - mean) / deviation
    # float32 sums over 320 pixels
    torch.testing.assert_close(inputs_of(images[:5], like=images)[:, 2].double(), expected, rtol=0, atol=1e-5)
    assert inputs_of(images[..., 0]).shape == (20, 1, 4, 4)


@pytest.mark.parametrize(("done", "expected"), [(0.0, 0.0), (0.1, 0.5), (0.2, 1.0), (0.6, 0.5), (1.0, 0.0)])
def test_the_rate_rises_in_a_line_and_falls_in_a_cosine(done, expected):
    assert rate_at(done, warmup=0.2) == pytest.approx(expected, abs=1e-12)


def test_training_is_heavy_ball_descent_with_decay_on_batches_in_the_order_of_the_seed():
    """Against the recursion written out, with the gradient of softmax regression in closed form, in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(11, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 4, (11,), generator=generator)
    model = nn.Linear(3, 4, bias=False).double()
    w = model.weight.detach().clone()
    settings = Training(epochs=2, batch=4, rate=0.3, momentum=0.9, weight_decay=0.1, warmup=0.25)

    velocity, done = torch.zeros_like(w), 0
    for epoch in range(2):
        order = torch.randperm(11, generator=stream(5, "order", epoch))
        for rows in (order[:4], order[4:8]):  # three rows are left over
            x, share = inputs[rows], [0.0, 1.0, 0.75, 0.25][done]  # (1 + cos(π t)) / 2 at t = 0, 1/3, 2/3
            p = (x @ w.T).softmax(1) - functional.one_hot(targets[rows], 4)
            velocity = 0.9 * velocity + p.T @ x / 4 + 0.1 * w
            w, done = w - 0.3 * share * velocity, done + 1

    seen = []
    train(model, inputs, targets, settings, seed=5, after_epoch=lambda n, net: seen.append((n, net.training)))

    torch.testing.assert_close(model.weight.detach(), w, rtol=0, atol=1e-12)  # float64 rounding
    assert seen == [(1, False), (2, False)]
    assert not model.training


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    generator = torch.Generator().manual_seed(0)
    images, classes = torch.randn(32, 1, 8, 8, generator=generator), torch.randint(0, 10, (32,), generator=generator)

    def weights(seed: int) -> torch.Tensor:
        model = initialize(lambda: Vgg(1, widths=(8, 8)), seed=0)
        return train(model, images, classes, Training(epochs=1, batch=8), seed=seed).head.weight

    assert weights(0).equal(weights(0))
    assert not weights(0).equal(weights(1))


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}, {"rate": 0.0}])
def test_settings_that_cannot_train_are_refused(wrong):
    with pytest.raises(ValueError, match="Training needs epochs >= 1"):
        Training(**wrong)


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ValueError, match="need at least 64 rows for one batch, got 3"):
        train(nn.Linear(2, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), Training(), seed=0)
