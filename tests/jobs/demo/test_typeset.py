"""Typeset digits: legible, in their place, and a data set like the handwritten one."""

from __future__ import annotations

import torch

from sparing.jobs.demo.typeset import FACES, SIDE, draw_digits, glyphs, typeset_digits
from sparing.seeds import stream


def test_every_digit_in_every_face_has_ink_and_a_margin() -> None:
    found = glyphs()
    assert found.shape == (len(FACES), 10, SIDE, SIDE)
    assert 0 <= found.min() < found.max() <= 1
    ink = found.sum((2, 3))
    assert ink.min() > 20
    assert found[..., [0, -1], :].amax() == 0
    lit = found.amax((0, 1, 3)).nonzero().flatten()  # rows that any digit reaches
    assert abs(float(lit[0]) + float(lit[-1]) - (SIDE - 1)) <= 2  # the same margin above and below, to two pixels


def test_digits_of_a_kind_are_alike_and_others_are_not() -> None:
    found = torch.nn.functional.normalize(glyphs().flatten(2), dim=2)
    alike = torch.einsum("afp,bfp->abf", found, found).mean()
    different = torch.einsum("afp,bgp->abfg", found, found).mean()
    assert alike > different + 0.1


def test_a_draw_belongs_to_its_generator_and_keeps_labels() -> None:
    images, labels = draw_digits(60, stream(0, "x"))
    again, _ = draw_digits(60, stream(0, "x"))
    assert torch.equal(images, again)
    assert images.shape == (60, 1, SIDE, SIDE)
    assert images.dtype == torch.uint8
    assert set(labels.tolist()) == set(range(10))
    shape = glyphs().mean(0)
    likeness = torch.einsum("nij,cij->nc", images[:, 0].float(), shape / shape.flatten(1).norm(dim=1)[:, None, None])
    # turned and shifted digits match their own kind far more often than the one in ten of chance
    assert (likeness.argmax(1) == labels).float().mean() > 0.3


def test_it_serves_as_a_data_set() -> None:
    found = typeset_digits()
    assert (found.channels, found.side, len(found.classes)) == (1, 28, 10)
    assert not torch.equal(found.train[0][:100], found.test[0][:100])
