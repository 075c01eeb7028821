"""How large a block's gradient is, also where it is not computed: arithmetic on tensors, without hooks.

The weight gradient of a linear map is ``G = Σ_t δ_t x_tᵀ``, x_t the input and δ_t the gradient of the output at token
t. Both pass through frozen maps too, so ‖G‖ can be bounded, or found, without forming G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.errors import UserError


def updated(scores: Tensor | None, seen: Tensor, decay: float) -> Tensor:
    """Move running scores towards what an interval showed; NaN is not seen yet.

    Example:
        >>> updated(torch.tensor([1.0, torch.nan, 3.0]), torch.tensor([2.0, 5.0, torch.nan]), 0.5)
        tensor([1.5000, 5.0000, 3.0000])

    Source: the running average over visited blocks of MISA (arXiv:2511.00056).
    """
    if not 0.0 <= decay < 1.0:
        raise UserError("decay", got=decay, why="1 would never learn", do="pass a number in [0, 1)")
    if scores is None:
        return seen
    # a first look counts whole; a block that was not seen keeps its score
    mixed = torch.where(scores.isnan(), seen, decay * scores + (1 - decay) * seen)
    return torch.where(seen.isnan(), scores, mixed)


def root_mean_square(squares: Tensor, sizes: Tensor) -> Tensor:
    """Scale squared gradient norms by the number of parameters, so that large and small blocks compare.

    Source: the mean gradient norm of GRASS (arXiv:2604.07808).
    """
    return (squares / sizes.clamp_min(1)).sqrt()


def norm_bound(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Bound ``‖G‖_F ≤ ‖x‖·‖δ‖``, by Cauchy and Schwarz: two norms, whatever the shapes.

    Equality holds if every ``x_t = c_t·u`` and ``δ_t = a·c_t·v``: one direction each, with equal profiles over tokens.
    """
    return _norm(inputs) * _norm(deltas)


def token_bound(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Bound ``‖G‖_F ≤ Σ_t ‖x_t‖·‖δ_t‖``, never above :func:`norm_bound` and as cheap.

    Equality holds if ``x_t = c_t·u`` and ``δ_t = d_t·v`` with ``c_t·d_t ≥ 0``.
    """
    return (_norm(inputs, dim=-1) * _norm(deltas, dim=-1)).sum()


def _norm(values: Tensor, dim: int | None = None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=dim)
    return norm


def gram_norm(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Find ``‖G‖_F`` itself without forming G: ``‖G‖² = Σ_{s,t} (x_s·x_t)(δ_s·δ_t)``.

    Costs tokens²·(in + out) instead of tokens·in·out, so it pays for few tokens and wide maps.

    Source: the "ghost norm" of Goodfellow 2015 (arXiv:1510.01799) and Li et al. 2022 (arXiv:2110.05679).
    """
    x, delta = inputs.flatten(end_dim=-2), deltas.flatten(end_dim=-2)
    return ((x @ x.T) * (delta @ delta.T)).sum().clamp_min(0).sqrt()
