"""MNIST-1D made in code: ten short signals, moved, stretched, sheared and hidden in noise.

It is as easy for a linear model as a hard set is (about a third right) and parts perceptrons from convolutional nets,
at a hundredth of MNIST's cost. Nothing is downloaded.

Source: Greydanus & Kobak 2024, "Scaling Down Deep Learning with MNIST-1D" (arXiv:2011.14439), §2 and Table 1; the ten
signals are those of the authors' package ``mnist1d`` (Apache-2.0). The code is our own and draws from streams of its
own, so rows are of the same distribution as theirs, not the same rows.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from sparing.seeds import stream

# Heights of the digits 0 to 9, drawn from left to right; each begins and ends at 5.
SIGNALS: Final = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)

LENGTH: Final = 40  # points of a row (count)

_PADDING: Final = (36, 60)  # fewest and most points of silence after a signal
_SHIFT: Final = 48  # points that a row is turned round by, at most one less
_SCALE, _SHEAR, _ROUGH, _GRAIN = 0.4, 0.75, 0.25, 0.02
_SMOOTH: Final = 2.0  # standard deviation, in points, of the Gaussian that makes noise neighbourly


def make(rows: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw MNIST-1D: signals float32 (n, 40), standardized over all of them; digits int64 (n,), a tenth each.

    Example:
        >>> signals, digits = make(200, seed=0)
        >>> tuple(signals.shape), torch.bincount(digits).tolist() == [20] * 10
        ((200, 40), True)
    """
    each = rows // len(SIGNALS)
    digits = torch.arange(len(SIGNALS)).repeat_interleave(each)
    source = stream(seed, "mnist-1d")
    raw = torch.tensor(SIGNALS, dtype=torch.float64)
    # Unit spread, from 0 to 0, at a sixth of their height.
    raw = (raw - raw[:, :1]) / raw.std(1, correction=0, keepdim=True) / 6
    signals = _transformed(raw[digits], source)
    signals = (signals - signals.mean()) / signals.std(correction=0)
    order = torch.randperm(len(digits), generator=source)
    return signals[order].float(), digits[order]


def _transformed(signals: Tensor, source: torch.Generator) -> Tensor:
    """Pad, stretch, scale, shift, hide in noise, shear and subsample; shape (n, 12) -> (n, 40)."""
    count, short = signals.shape
    # The order of the draws below is part of the data set: moving one changes every row.
    points = short + _PADDING[1]

    def uniform() -> Tensor:
        return torch.rand(count, 1, generator=source, dtype=torch.float64)

    silence = torch.floor(_PADDING[0] + uniform() * (_PADDING[1] - _PADDING[0] + 1))
    places = torch.arange(points) * (short + silence - 1) / (points - 1)  # where each point lies in the padded signal
    rows = _at(torch.nn.functional.pad(signals, (0, _PADDING[1])), places)
    rows = rows * (1 + _SCALE * (uniform() - 0.5))
    shift = torch.randint(_SHIFT, (count, 1), generator=source)
    shifted = (torch.arange(points) - shift) % points
    rows, has_signal = rows.gather(1, shifted), (places < short).gather(1, shifted)
    rough, grain = torch.randn(2, count, points, generator=source, dtype=torch.float64)
    # As in the original, correlated noise fills only the silence; fine noise lies over everything.
    rows = torch.where(has_signal, rows, _smooth(_ROUGH * rough)) + _GRAIN * grain
    rows = rows - _SHEAR * (uniform() - 0.5) * torch.linspace(-0.5, 0.5, points, dtype=torch.float64)
    return _at(rows, torch.linspace(0, points - 1, LENGTH, dtype=torch.float64).expand(count, -1))


def _at(rows: Tensor, places: Tensor) -> Tensor:
    """Values between points, linearly."""
    left = places.floor().long().clamp_max(rows.shape[1] - 2)
    share = places - left
    return rows.gather(1, left) * (1 - share) + rows.gather(1, left + 1) * share


def _smooth(noise: Tensor) -> Tensor:
    """Convolve with a Gaussian cut at four deviations; rows are mirrored at their ends, end points included twice."""
    reach = round(4 * _SMOOTH)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1, dtype=torch.float64) / _SMOOTH) ** 2)
    mirrored = torch.cat([noise[:, :reach].flip(1), noise, noise[:, -reach:].flip(1)], 1)
    smooth: Tensor = torch.nn.functional.conv1d(mirrored[:, None], (weights / weights.sum())[None, None])
    return smooth[:, 0]
