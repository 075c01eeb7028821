"""Images as a model expects them."""

from __future__ import annotations

import torch

from sparing.jobs.subjects.images import ImageFormat, digits, prepared


def test_resizing_and_channels():
    images = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert prepared(images, ImageFormat(16, 3)).shape == (2, 3, 16, 16)
    grey = prepared(images, ImageFormat(None, 1))
    torch.testing.assert_close(grey[:, 0], images.float().mean(-1) / 255)


def test_digits_are_cut_into_disjoint_parts():
    train, test = digits()
    assert len(train[1]) + len(test[1]) == 1797
    seen = {image.numpy().tobytes() for image in train[0]}
    assert sum(image.numpy().tobytes() in seen for image in test[0]) == 0
