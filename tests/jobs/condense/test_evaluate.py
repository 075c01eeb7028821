"""Judging: accuracy counted by hand, nets that are the same for every method, training as torch does it."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from sparing.jobs.condense.evaluate import accuracies, accuracy, fresh_net
from sparing.jobs.condense.net import init_weights, logits, penalty
from sparing.jobs.condense.state import start
from sparing.seeds import stream


def test_accuracy_counts(inputs) -> None:
    shape = begun_shape(inputs)
    weights = init_weights(shape, stream(0, "x"))
    images, labels = inputs.test
    expected = (logits(weights, images.float() / 255).argmax(1) == labels).sum().item() / len(labels)
    assert accuracy(weights, inputs.test) == 100 * expected


def begun_shape(inputs):
    from sparing.jobs.condense import Condense

    return start(Condense(width=4), inputs).shape


def test_a_fresh_net_is_trained_as_torch_does_it(small, inputs) -> None:
    state = start(small, inputs)
    weights = {
        name: w.requires_grad_() for name, w in init_weights(state.shape, stream(0, "condense", "judge", 3)).items()
    }
    optimizer = torch.optim.SGD(weights.values(), lr=small.eval_lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=small.eval_steps)
    for _ in range(small.eval_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(weights, state.images), state.labels) + small.penalty * penalty(weights)
        loss.backward()
        optimizer.step()
        schedule.step()
    found = fresh_net(state, state.images, 3)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-4, atol=1e-6)  # float32, five steps


def test_nets_are_the_same_for_every_seed_and_method(small, inputs) -> None:
    state = start(small, inputs)
    other = start(dataclasses.replace(small, seed=9, method="reverse"), inputs)
    assert accuracies(state, state.images, nets=3) == accuracies(other, state.images, nets=3)
    assert accuracies(state, state.images, nets=3)[1:] == accuracies(state, state.images, nets=2, first=1)


def test_rates_are_chosen_on_images_that_are_not_the_test(small, inputs, monkeypatch) -> None:
    images, labels = inputs.test
    spoilt = dataclasses.replace(inputs, test=(images, 1 - labels))
    chosen = dataclasses.replace(small, judge="held-out")
    image = start(chosen, inputs).images
    assert accuracies(start(chosen, spoilt), image, nets=2) == accuracies(start(chosen, inputs), image, nets=2)
    test = [accuracies(start(small, part), image, nets=2) for part in (inputs, spoilt)]
    assert [a + b for a, b in zip(*test, strict=True)] == [100, 100]


def test_a_look_is_on_the_first_images(small, inputs) -> None:
    state = start(small, inputs)
    first = dataclasses.replace(inputs, test=tuple(part[:6] for part in inputs.test))
    assert accuracies(state, state.images, nets=2, most=6) == accuracies(start(small, first), state.images, nets=2)
