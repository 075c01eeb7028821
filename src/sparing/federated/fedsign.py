"""FedSign: a force along the signs of the global model, frozen at the start of the round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.federated.methods.fedavg import FedAvg, GradientTerm
from sparing.federated.methods.interface import Sent, State, Term, Vector
from sparing.federated.methods.lora import refuse_signs
from sparing.federated.settings import Schedule

Reduction = Literal["tensor_mean", "sum", "mean"]
"""How the sum over elements is weighed: γ/T, the sum in each of T tensors and the mean over them; γ; or γ/(n T), the
mean over the n elements of each tensor and over tensors."""

RMS_SHARE = 0.5
"""Temperature of ``"scale-aware"``, as a share of a tensor's root mean square."""


@dataclass(frozen=True, slots=True)
class FedSign(FedAvg):
    """Clients minimise L(θ) − Σ_j c_j σ(s_j θ_j / τ_j) with s = sign(g) of the model they received, 0 where it is 0.

    The force on an element is c/τ · s q (1 − q), q = σ(s θ/τ): nearly constant for |θ| < τ, so it pushes outwards along
    the sign rather than penalising a change of sign; ``force`` says how strongly. Equation 1 leaves the reduction open.
    Only γ/T makes the paper's grid of γ sensible: with γ/(n T) FedSign is hardly distinguishable from FedAvg. Server
    and bytes are those of FedAvg.

    Source: Li et al. 2024 (arXiv:2405.12489), Equation 1 and Algorithm 1.

    Example:
        >>> FedSign(gamma=0.1).force({"w": torch.ones(3), "b": torch.zeros(1)})  # 0.1 / (4 · 2)
        0.0125
    """

    gamma: float = 0.01
    """Strength γ, ≥ 0; the paper's grid is 0.001, 0.01, 0.1."""

    reduction: Reduction = "tensor_mean"
    """How the sum over elements is weighted."""

    temperature: float | Literal["scale-aware"] = 1.0
    """τ, > 0, in units of the weights; "scale-aware" takes half the root mean square r of each tensor of g, and r c
    for c, so that the force on every tensor is the same whatever its scale. Where r is 0 there is no force."""

    only: tuple[str, ...] | None = None
    """Parameters that the force acts on, by name or path of a module above them; None is all. T counts these."""

    def __post_init__(self) -> None:
        check_force(self.name, self.gamma, self.reduction)
        tau = self.temperature
        holds = tau == "scale-aware" or (not isinstance(tau, str) and 0 < tau < math.inf)
        do = 'pass a number > 0, or "scale-aware"'
        require(holds, f"{type(self).__name__}.temperature", repr(tau), "weights are divided by it", do)

    def check(self, schedule: Schedule) -> None:
        """Refuse AdamW."""
        refuse_adamw(self.name, schedule)

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return the model itself; refuse one with LoRA, whose factors may turn their signs together."""
        refuse_signs(model, self.name)
        return model

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the force along the signs of what was sent, −c/τ · s q (1 − q) with q = σ(s θ/τ)."""
        # Signs and scales are those at the start of the round: signs that follow the client would be ``OwnSign``.
        forces = self._forces(sent.params)
        signs = {name: torch.sign(sent.params[name]) for name in forces}

        def add(name: str, theta: Tensor, grad: Tensor) -> None:
            if name in forces:
                (c, tau), s = forces[name], signs[name]
                q = torch.sigmoid(s * theta / tau)
                grad.sub_(s * q * (1 - q), alpha=c / tau)

        return GradientTerm(add)

    def force(self, params: Vector) -> float:
        """Return the mean over all elements of c/(4 τ), the force at θ = 0 where the sign is not 0, as a gradient."""
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


def refuse_adamw(method: str, schedule: Schedule) -> None:
    """Refuse an optimizer under which γ would not be the strength that it says."""
    why = f"AdamW rescales every element, so that the force of {method} is no longer γ's: where the loss has no slope, "
    why += "any force moves a weight by the whole rate"
    require(schedule.optimizer == "sgd", "Schedule.optimizer", schedule.optimizer, why, 'pass optimizer="sgd"')


def check_force(method: str, gamma: float, reduction: str) -> None:
    """Refuse γ < 0, infinite or NaN, and an unknown reduction."""
    require(0 <= gamma < math.inf, f"{method} gamma", gamma, "it is a strength", "pass gamma >= 0, such as 0.01")
    known = ", ".join(get_args(Reduction))
    holds = reduction in get_args(Reduction)
    require(holds, f"{method} reduction", repr(reduction), "no such reduction", f"pass one of {known}")
