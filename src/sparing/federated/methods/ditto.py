"""Ditto: beside the global model every client trains one of its own, on a spring to the global one."""

from __future__ import annotations

from dataclasses import dataclass

from sparing.errors import require
from sparing.federated.methods.around import Around
from sparing.federated.methods.fedavg import FedAvg, GradientTerm
from sparing.federated.methods.interface import Method, Sent, State, Term, Vector


@dataclass(frozen=True, slots=True)
class Ditto(FedAvg):
    """The global model is FedAvg's; client k also minimises L_k(v) + (λ/2) ‖v − g‖² over a model v of its own.

    v starts as the initial model and stays with the client. In every round of the client it makes as many steps as x
    does, from where it was, by the same schedule, and in an order of rows of its own; g is what the client received.
    So a round costs FedAvg's bytes and twice its steps, of which the record counts x's. Batch norm of v is v's own.
    With λ = 0 a client is on its own.

    Source: Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization" (arXiv:2012.04221),
    Algorithm 1 with FedAvg as the solver of the global model.
    """

    lam: float = 0.1
    """Strength of the spring λ, ≥ 0; the usual grid is 0.05, 0.1, 0.2, 1, 2."""

    def __post_init__(self) -> None:
        require(self.lam >= 0, "Ditto.lam", self.lam, "clients would be pushed away", "pass lam >= 0, such as 0.1")

    def client_state(self, params: Vector) -> State:
        """Return the initial model as v; its buffers are those of the model received first."""
        return {"personal": dict(params)}

    def personal(self, state: State, sent: Sent) -> tuple[Vector, Vector]:
        """Return parameters and buffers of a client's own model, from its state and what it last received."""
        return state["personal"], {**sent.buffers, **state.get("personal_buffers", {})}

    def spring(self, sent: Sent) -> Term:
        """Return the term of v, whose gradient is λ (v − g)."""
        return GradientTerm(lambda name, v, grad: grad.add_(v - sent.params[name], alpha=self.lam))

    def kept(self, state: State, params: Vector, buffers: Vector) -> State:
        """Return a client's state with its own model after a round; refuse one that diverged."""
        bad = next((name for name, value in params.items() if not bool(value.isfinite().all())), None)
        why, do = "its own model diverged, while the global one may be well", "lower Schedule.lr or Ditto.lam"
        require(bad is None, "Ditto", f"numbers that are not finite in {bad}", why, do)
        return {**state, "personal": params, **({"personal_buffers": buffers} if buffers else {})}


def ditto_of(method: Method) -> Ditto | None:
    """Return the Ditto that a method is, or is wrapped around."""
    while isinstance(method, Around):
        method = method.method
    return method if isinstance(method, Ditto) else None
