"""Judging: accuracy counted by hand, nets that are the same for every method, training as torch does it."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from sparing.jobs.condense.course import begun
from sparing.jobs.condense.evaluate import accuracy, fresh_net, judged
from sparing.jobs.condense.net import initial, logits, penalty
from sparing.seeds import stream


def test_accuracy_counts(material) -> None:
    shape = begun_shape(material)
    weights = initial(shape, stream(0, "x"))
    images, labels = material.test
    expected = (logits(weights, images.float() / 255).argmax(1) == labels).sum().item() / len(labels)
    assert accuracy(weights, material.test) == 100 * expected


def begun_shape(material):
    from sparing.jobs.condense import Condense

    return begun(Condense(width=4), material).shape


def test_a_fresh_net_is_trained_as_torch_does_it(small, material) -> None:
    course = begun(small, material)
    weights = {name: w.requires_grad_() for name, w in initial(course.shape, stream(0, "condense", "judge", 3)).items()}
    optimizer = torch.optim.SGD(weights.values(), lr=small.eval_lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=small.eval_steps)
    for _ in range(small.eval_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(weights, course.images), course.labels) + small.penalty * penalty(weights)
        loss.backward()
        optimizer.step()
        schedule.step()
    found = fresh_net(course, course.images, 3)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-4, atol=1e-6)  # float32, five steps


def test_nets_are_the_same_for_every_seed_and_method(small, material) -> None:
    course = begun(small, material)
    other = begun(dataclasses.replace(small, seed=9, method="reverse"), material)
    assert judged(course, course.images, nets=3) == judged(other, course.images, nets=3)
    assert judged(course, course.images, nets=3)[1:] == judged(course, course.images, nets=2, first=1)


def test_rates_are_chosen_on_images_that_are_not_the_test(small, material, monkeypatch) -> None:
    images, labels = material.test
    spoilt = dataclasses.replace(material, test=(images, 1 - labels))
    chosen = dataclasses.replace(small, judge="held-out")
    image = begun(chosen, material).images
    assert judged(begun(chosen, spoilt), image, nets=2) == judged(begun(chosen, material), image, nets=2)
    test = [judged(begun(small, part), image, nets=2) for part in (material, spoilt)]
    assert [a + b for a, b in zip(*test, strict=True)] == [100, 100]


def test_a_look_is_on_the_first_images(small, material) -> None:
    course = begun(small, material)
    first = dataclasses.replace(material, test=tuple(part[:6] for part in material.test))
    assert judged(course, course.images, nets=2, most=6) == judged(begun(small, first), course.images, nets=2)
