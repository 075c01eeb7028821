"""FedProx: a spring between a client's model and the global one."""

from __future__ import annotations

from dataclasses import dataclass

from sparing.errors import require
from sparing.federated.methods.fedavg import FedAvg, GradientTerm
from sparing.federated.methods.interface import Sent, State, Term


@dataclass(frozen=True, slots=True)
class FedProx(FedAvg):
    """Clients minimise L(x) + (μ/2) ‖x − g‖²: the norm squared, over all trainable parameters.

    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (arXiv:1812.06127), Algorithm 2.
    """

    mu: float = 0.01
    """Strength of the proximal term μ, ≥ 0; the usual grid is 0.001, 0.01, 0.1, 1."""

    def __post_init__(self) -> None:
        require(self.mu >= 0, "FedProx.mu", self.mu, "clients would be pushed away", "pass mu >= 0, such as 0.01")

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the proximal term around g, whose gradient is μ (x − g)."""
        return GradientTerm(lambda name, x, grad: grad.add_(x - sent.params[name], alpha=self.mu))
