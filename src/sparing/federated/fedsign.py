"""FedSign: a force along the signs of the global model, frozen at the start of the round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sparing.errors import require
from sparing.federated.fedavg import FedAvg, NoTerm
from sparing.federated.methods import Sent, State, Term, Vector

Reduction = Literal["tensor_mean", "sum", "mean"]
"""How the sum over elements is weighed: γ/T, the sum in each of T tensors and the mean over them; γ; or γ/(n T), the
mean over the n elements of each tensor and over tensors."""

RMS_SHARE = 0.5
"""Temperature of ``"scale-aware"``, as a share of a tensor's root mean square."""


@dataclass(frozen=True, slots=True)
class FedSign(FedAvg):
    """Clients minimise L(θ) − Σ_j c_j σ(s_j θ_j / τ_j) with s = sign(g) of the model they received, 0 where it is 0.

    What pushes an element is c/τ · s q (1 − q), q = σ(s θ/τ): nearly constant for |θ| < τ, so it is a push outwards
    along the sign rather than a penalty on crossing zero; ``force`` says how strong. Equation 1 leaves the reduction
    open. Only γ/T makes the paper's grid of γ sensible: with γ/(n T) FedSign is FedAvg to the eye. Server and bytes
    are those of FedAvg.

    Source: Li et al. 2024 (arXiv:2405.12489), Equation 1 and Algorithm 1.

    Example:
        >>> FedSign(gamma=0.1).force({"w": torch.ones(3), "b": torch.zeros(1)})  # 0.1 / (4 · 2)
        0.0125
    """

    gamma: float = 0.01
    """Strength γ, ≥ 0; the paper's grid is 0.001, 0.01, 0.1."""

    reduction: Reduction = "tensor_mean"
    """How the sum over elements is weighed."""

    temperature: float | Literal["scale-aware"] = 1.0
    """τ, > 0, in units of the weights; "scale-aware" takes half the root mean square r of each tensor of g, and r c
    for c, so that every tensor feels the same force whatever its scale. Where r is 0 there is no force."""

    only: tuple[str, ...] | None = None
    """Parameters that feel the force, by name or path of a module above them; None is all. T counts these."""

    def __post_init__(self) -> None:
        check_force(self.name, self.gamma, self.reduction)
        tau = self.temperature
        holds = tau == "scale-aware" or (not isinstance(tau, str) and 0 < tau < math.inf)
        do = 'pass a number > 0, or "scale-aware"'
        require(holds, f"{type(self).__name__}.temperature", repr(tau), "weights are divided by it", do)

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the force along the signs of what was sent."""
        # Signs and scales are those at the start of the round: signs that follow the client would be ``OwnSign``.
        forces = {name: (torch.sign(sent.params[name]), c, tau) for name, (c, tau) in self._forces(sent.params).items()}
        return _SignForce(forces)

    def force(self, params: Vector) -> float:
        """Return the mean over all elements of the force on an element at θ = 0 whose sign is not 0: c/(4 τ).

        Args:
            params: The model; γ/(n T) depends on its sizes, and "scale-aware" on its values.

        Returns:
            In units of the gradient; elements of tensors that feel none count as 0.
        """
        forces = self._forces(params)
        total = sum(c / (4 * tau) * params[name].numel() for name, (c, tau) in forces.items())
        return total / sum(value.numel() for value in params.values())

    def _forces(self, params: Vector) -> dict[str, tuple[float, float]]:
        """Return c and τ of each tensor that feels a force."""
        strength = strengths(params, self.gamma, self.reduction, self.only)
        if self.temperature != "scale-aware":
            return {name: (c, self.temperature) for name, c in strength.items()}
        # A tensor of zeros has no scale, so it feels no force.
        scales = {name: float(params[name].double().square().mean().sqrt()) for name in strength}
        return {name: (c * scales[name], RMS_SHARE * scales[name]) for name, c in strength.items() if scales[name] > 0}


@dataclass(frozen=True, slots=True, eq=False)
class _SignForce(NoTerm):
    """−c/τ · s q (1 − q), q = σ(s θ/τ)."""

    forces: dict[str, tuple[Tensor, float, float]]

    def add_(self, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], lr: float) -> None:
        for name, grad in grads.items():
            if name in self.forces:
                sign, c, tau = self.forces[name]
                q = torch.sigmoid(sign * params[name] / tau)
                grad.sub_(sign * q * (1 - q), alpha=c / tau)


def strengths(params: Vector, gamma: float, reduction: Reduction, only: tuple[str, ...] | None) -> dict[str, float]:
    """Return the factor c of the sum over each tensor's elements, for the T tensors that feel a force."""
    names = [
        name for name in params if only is None or any(name == part or name.startswith(f"{part}.") for part in only)
    ]
    why, do = "no trainable parameter has that name or path", f"pass names such as {next(iter(params), '')!r}"
    require(bool(names), "only", only, why, do)
    if reduction == "sum":
        return dict.fromkeys(names, gamma)
    if reduction == "tensor_mean":
        return dict.fromkeys(names, gamma / len(names))
    return {name: gamma / (max(params[name].numel(), 1) * len(names)) for name in names}


def check_force(method: str, gamma: float, reduction: str) -> None:
    """Refuse γ < 0, infinite or NaN, and an unknown reduction."""
    require(0 <= gamma < math.inf, f"{method} gamma", gamma, "it is a strength", "pass gamma >= 0, such as 0.01")
    known = ", ".join(get_args(Reduction))
    holds = reduction in get_args(Reduction)
    require(holds, f"{method} reduction", repr(reduction), "no such reduction", f"pass one of {known}")
