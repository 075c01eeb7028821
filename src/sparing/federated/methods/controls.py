"""Controls for FedSign: a push that ignores the global model, a penalty on sign flips alone, and matched norms.

If FedSign's gain is alignment, the first should not have it, the second should, and it should outlast the third.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor, nn

from sparing.errors import require
from sparing.federated.fedsign import FedSign, Reduction, check_force, refuse_adamw, strengths
from sparing.federated.methods.around import Around
from sparing.federated.methods.fedavg import FedAvg, GradientTerm
from sparing.federated.methods.interface import Sent, State, Term, Update, Vector
from sparing.federated.methods.lora import refuse_signs
from sparing.federated.settings import Schedule


@dataclass(frozen=True, slots=True)
class OwnSign(FedSign):
    """FedSign with the sign of the client's own weight at each step in place of the global one: a push outwards.

    The force is c/τ · sign(θ) q (1 − q), q = σ(|θ|/τ), the gradient of −c σ(|θ|/τ).
    """

    @property
    def name(self) -> str:
        """Name for tables and files."""
        return "own-sign"

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the push outwards; only strengths and temperatures come from what was sent."""
        forces = self._forces(sent.params)

        def add(name: str, theta: Tensor, grad: Tensor) -> None:
            if name in forces:
                c, tau = forces[name]
                q = torch.sigmoid(theta.abs() / tau)
                grad.sub_(torch.sign(theta) * q * (1 - q), alpha=c / tau)

        return GradientTerm(add)


@dataclass(frozen=True, slots=True)
class Hinge(FedAvg):
    """Clients minimise L(θ) + Σ_j c_j max(0, −s_j θ_j), s = sign(g): a weight feels c only where its sign is flipped.

    Its force on a flipped weight is four times FedSign's at θ = 0 with the same γ and τ = 1.
    """

    gamma: float = 0.01  # strength γ ≥ 0
    reduction: Reduction = "tensor_mean"
    only: tuple[str, ...] | None = None  # names or paths of modules above them; None is all

    def __post_init__(self) -> None:
        check_force("hinge", self.gamma, self.reduction)

    def check(self, schedule: Schedule) -> None:
        """Refuse AdamW."""
        refuse_adamw(self.name, schedule)

    def adapt(self, model: nn.Module) -> nn.Module:
        """Return the model itself; refuse one with LoRA."""
        refuse_signs(model, self.name)
        return model

    def begin(self, sent: Sent, state: State) -> Term:
        """Return the penalty on flips of what was sent: its gradient is −c s where s θ < 0."""
        strength = strengths(sent.params, self.gamma, self.reduction, self.only)
        signs = {name: torch.sign(sent.params[name]) for name in strength}

        def add(name: str, theta: Tensor, grad: Tensor) -> None:
            if name in signs:
                grad.sub_(signs[name] * (signs[name] * theta < 0), alpha=strength[name])

        return GradientTerm(add)

    def force(self, params: Vector) -> float:
        """Return the mean over all elements of the force on an element that is flipped, in units of the gradient."""
        strength = strengths(params, self.gamma, self.reduction, self.only)
        total = sum(c * params[name].numel() for name, c in strength.items())
        return total / sum(value.numel() for value in params.values())


@dataclass(frozen=True, slots=True)
class NormMatched(Around):
    """Any method, each tensor of whose global model is scaled after every round to a norm measured in another run.

    FedSign at the norms of a FedAvg run has the signs without the growth; FedAvg at those of a FedSign run has the
    growth without the signs. Running statistics fit the weights before they were scaled: with batch norm pass
    ``Schedule(batch_norm="recalibrate")``. Drift-correcting methods lose their fixed point.
    """

    # ``tensor_norms`` after each round of the other run; names that are missing stay
    norms: Sequence[Mapping[str, float]] = field(repr=False)
    _: KW_ONLY

    label: str = "norm-matched"  # goes before the method's name

    def __repr__(self) -> str:
        # a checkpoint knows its method by these words; of a longer run the first norms are the same
        known = hashlib.sha256(repr(sorted(dict(self.norms[0]).items())).encode()).hexdigest() if self.norms else ""
        return f"NormMatched({self.method!r}, norms={known[:16]!r}, label={self.label!r})"

    @property
    def name(self) -> str:
        """Name for tables and files."""
        return f"{self.label}-{self.method.name}"

    def check(self, schedule: Schedule) -> None:
        """Refuse what the method refuses, and fewer norms than rounds."""
        self.method.check(schedule)
        self._require_round(schedule.rounds)

    def server_state(self, params: Vector) -> State:
        """Return that of the method, and the rounds made."""
        return {**self.method.server_state(params), "matched": {"rounds": torch.zeros((), dtype=torch.float64)}}

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Aggregate as the method does, and scale every tensor to its norm of this round."""
        inner = {name: vector for name, vector in server_state.items() if name != "matched"}
        params, state, extras = self.method.aggregate(global_params, updates, inner, clients)
        # The round is counted in the state, so a resumed run finds its norms.
        made = server_state["matched"]["rounds"] + 1
        self._require_round(int(made))
        wanted = self.norms[int(made) - 1]
        scaled = {name: scaled_to(value, wanted[name]) if name in wanted else value for name, value in params.items()}
        return scaled, {**state, "matched": {"rounds": made}}, extras

    def _require_round(self, rounds: int) -> None:
        why, do = f"the run has {rounds} rounds and each needs its norms", "record the other run for as many rounds"
        require(rounds <= len(self.norms), "NormMatched.norms", f"those of {len(self.norms)} rounds", why, do)


def tensor_norms(params: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Euclidean norm of each tensor, summed in float64: one entry of ``NormMatched.norms``."""
    return {name: float(torch.linalg.vector_norm(value.detach().double())) for name, value in params.items()}


def scaled_to(value: Tensor, norm: float) -> Tensor:
    """Return the tensor scaled to another Euclidean norm; zeros stay zeros, for they have no direction."""
    length = float(torch.linalg.vector_norm(value.double()))
    return value * (norm / length) if length > 0 else value
