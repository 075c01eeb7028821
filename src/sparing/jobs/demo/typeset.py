"""Digits set in the plotting library's own typefaces, turned and shifted: where handwriting cannot be fetched."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparing.jobs.condense.inputs import Inputs, Pair
from sparing.seeds import stream

SIDE = 28  # height and width, as MNIST's (pixels)

FAMILIES = ("DejaVu Sans", "DejaVu Serif", "DejaVu Sans Mono")
FACES = tuple(itertools.product(FAMILIES, ("normal", "bold"), ("normal", "italic")))
RISE = 2.7 / SIDE
"""How far a digit stands above the middle of its line, which leaves room for descenders (share of the side)."""


def glyphs() -> Tensor:
    """Every digit in every typeface: white on black, 0 to 1, (faces, 10, 28, 28)."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(10 * SIDE / 72, len(FACES) * SIDE / 72), dpi=72)
    canvas: Any = FigureCanvasAgg(sheet)
    for row, (family, weight, style) in enumerate(FACES):
        face: dict[str, Any] = {"family": family, "weight": weight, "style": style}
        for digit in range(10):
            x, y = (digit + 0.5) / 10, 1 - (row + 0.5 + RISE) / len(FACES)
            sheet.text(x, y, str(digit), size=24, ha="center", va="center", **face)
    canvas.draw()
    ink = 1 - torch.from_numpy(np.array(canvas.buffer_rgba())[..., 0]).float() / 255
    return ink.view(len(FACES), SIDE, 10, SIDE).permute(0, 2, 1, 3).contiguous()


def draw_digits(count: int, generator: torch.Generator) -> Pair:
    """Digits in random typefaces, turned by up to 0.3 rad, scaled by 0.8 to 1.2, shifted by up to 3 pixels."""
    faces, labels = (torch.randint(most, (count,), generator=generator) for most in (len(FACES), 10))
    turn, scale, right, down = (2 * torch.rand(4, count, generator=generator) - 1).unbind()
    angle, size = 0.3 * turn, 1 / (1 + 0.2 * scale)
    # three pixels, in a grid whose coordinates run from −1 to 1
    shift = 2 * 3 / SIDE
    top = torch.stack([size * angle.cos(), -size * angle.sin(), shift * right], 1)
    low = torch.stack([size * angle.sin(), size * angle.cos(), shift * down], 1)
    grid = F.affine_grid(torch.stack([top, low], 1), [count, 1, SIDE, SIDE], align_corners=False)
    images = F.grid_sample(glyphs()[faces, labels][:, None], grid, align_corners=False)
    return (255 * images.clamp(0, 1)).round().to(torch.uint8), labels


def typeset_digits() -> Inputs:
    """A data set of typeset digits: 6,000 to learn from, 1,000 held out, 2,000 for the test."""
    sizes = (("train", 6000), ("held", 1000), ("test", 2000))
    train, held_out, test = (draw_digits(count, stream(0, "typeset", part)) for part, count in sizes)
    classes = tuple(map(str, range(10)))
    return Inputs(name="typeset digits", train=train, held_out=held_out, test=test, classes=classes)
