"""The softmax classifier in closed form: traces, slope and curvature along a step of its weights, without a Hessian.

For one row x with logits W x, p = softmax(W x) and label y, with the cross entropy −log p_y:

    gradient (K, D)    −(1{c = y} − p_c) x_d
    Hessian (KD, KD)   (diag p − p pᵀ) ⊗ x xᵀ
    its trace          Σ_c p_c (1 − p_c) · ‖x‖²
    along a step E     Σ_c p_c s_c² − (Σ_c p_c s_c)²,   s = E x

Everything is the mean over rows; memory is O(N K), where the Hessian of the digits would have 640² entries a row.

Source: Li et al. 2024 (arXiv:2405.12489), Listing 2, Figure 29 and Appendix D. The listing has three defects that are
not repeated here. It contracts gradient and Hessian with the moved weights W + λE where the text says the step E. It
takes sign(0) = −1, which moves the coefficients that are exactly zero because their pixel is blank in every image
(4.7 % on the digits); ``consistent_step`` does not. And it builds the Hessian, which no result needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.errors import UserError, require


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxPoint:
    """The loss at W and how it changes along a step E; each the mean over rows, in float64."""

    loss: float  # cross entropy (nat)
    error: float  # share of rows whose largest logit is not the label's
    trace_p: float  # Σ_c p_c (1 − p_c), the trace of diag p − p pᵀ (dimensionless)
    trace: float  # trace of the Hessian (nat per squared unit of weight)
    slope: float  # ⟨E, g⟩, the first derivative of the loss along E (nat per unit step)
    curvature: float  # EᵀHE, the second derivative of the loss along E (nat per squared unit step)


def softmax_point(weights: Tensor, inputs: Tensor, targets: Tensor, step: Tensor) -> SoftmaxPoint:
    """Evaluate the closed forms at W (K, D), along the step E (K, D), on inputs (N, D) and labels (N,)."""
    _check(weights, inputs, targets, step)
    x, w, e = inputs.double(), weights.double(), step.double()
    logits, moved = x @ w.T, x @ e.T
    log_p = torch.log_softmax(logits, -1)
    p = log_p.exp()
    label = targets.long()[:, None]
    mean = (p * moved).sum(-1)
    # Σ p (s − s̄)² is Σ p s² − s̄² without cancelling two large numbers
    curvature = (p * (moved - mean[:, None]).square()).sum(-1)
    trace_p = (p * (1 - p)).sum(-1)
    return SoftmaxPoint(
        loss=-log_p.gather(1, label).mean().item(),
        error=(logits.argmax(-1) != targets).double().mean().item(),
        trace_p=trace_p.mean().item(),
        trace=(trace_p * x.square().sum(-1)).mean().item(),
        slope=(mean - moved.gather(1, label)[:, 0]).mean().item(),
        curvature=curvature.mean().item(),
    )


def softmax_scan(weights: Tensor, inputs: Tensor, targets: Tensor, step: Tensor, lambdas: Tensor) -> list[SoftmaxPoint]:
    """Evaluate the closed forms at W + λE for every λ, each time along E."""
    w, e = weights.double(), step.double()
    return [softmax_point(w + float(at) * e, inputs, targets, e) for at in lambdas]


def consistent_step(magnitudes: Tensor, weights: Tensor) -> Tensor:
    """Return |E| with the signs of the weights; a weight that is exactly zero does not move."""
    return magnitudes.abs() * torch.sign(weights)


def _check(weights: Tensor, inputs: Tensor, targets: Tensor, step: Tensor) -> None:
    if weights.ndim != 2 or inputs.ndim != 2 or inputs.shape[1] != weights.shape[1] or step.shape != weights.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (weights, inputs, step))
        why = "weights and step are (K, D), inputs (N, D)"
        raise UserError("softmax", got=f"shapes {shapes}", why=why, do="pass the weights as (classes, features)")
    rows = len(inputs)
    why = "every row needs one label"
    require(targets.shape == (rows,) and rows > 0, "targets", f"shape {tuple(targets.shape)}", why, f"pass ({rows},)")
    fits = bool(((targets >= 0) & (targets < len(weights))).all()) and not targets.is_floating_point()
    got = f"{targets.dtype} from {targets.min().item()} to {targets.max().item()}"
    require(fits, "targets", got, "labels number the rows of the weights", f"use integers 0 … {len(weights) - 1}")
