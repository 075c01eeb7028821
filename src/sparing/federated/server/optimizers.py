"""What the server does with the combined model: take it over, or treat its step from the last one as a gradient."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparing.errors import require
from sparing.federated.methods.interface import State, Vector


class Server(Protocol):
    """A server optimizer: Δ = combined − g is its step, −Δ its gradient. Buffers are not part of it."""

    def state(self, params: Vector) -> State:
        """Return the state before the first round, empty for servers without state."""

    def step(self, center: Vector, combined: Vector, state: State) -> tuple[Vector, State]:
        """Return the next global model, in new tensors of the dtypes of ``center``, and the next state."""


@dataclass(frozen=True, slots=True)
class Replace:
    """g ← g + η Δ; with η = 1 the combined model itself."""

    lr: float = 1.0  # server learning rate η > 0

    def __post_init__(self) -> None:
        _require_rate("Replace", self.lr)

    def state(self, params: Vector) -> State:
        """Return no state."""
        return {}

    def step(self, center: Vector, combined: Vector, state: State) -> tuple[Vector, State]:
        """Return g + η Δ."""
        # g + 1 · Δ would round; the combined model stays exact.
        if self.lr == 1:
            return combined, state
        return {name: value + self.lr * (combined[name] - value) for name, value in center.items()}, state


@dataclass(frozen=True, slots=True)
class FedAvgM:
    """v ← β v + Δ, g ← g + η v.

    Source: Hsu et al. 2019 (arXiv:1909.06335), §4.3, where Δ has the opposite sign.
    """

    lr: float = 1.0  # server learning rate η > 0
    _: KW_ONLY

    momentum: float = 0.9  # β, in [0, 1)

    def __post_init__(self) -> None:
        _require_rate("FedAvgM", self.lr)
        _require_share("FedAvgM.momentum", self.momentum)

    def state(self, params: Vector) -> State:
        """Return v = 0."""
        return {"velocity": {name: torch.zeros_like(value) for name, value in params.items()}}

    def step(self, center: Vector, combined: Vector, state: State) -> tuple[Vector, State]:
        """Return g + η v and v."""
        old = state["velocity"]
        velocity = {name: self.momentum * old[name] + (combined[name] - value) for name, value in center.items()}
        return {name: value + self.lr * velocity[name] for name, value in center.items()}, {"velocity": velocity}


@dataclass(frozen=True, slots=True)
class FedAdam:
    """m ← β₁ m + (1 − β₁) Δ, v ← β₂ v + (1 − β₂) Δ², g ← g + η m / (√v + τ), without correction of the start.

    Source: Reddi et al. 2021 (arXiv:2003.00295), Algorithm 2; v starts at τ², the least that it allows.
    """

    lr: float = 0.01  # server learning rate η > 0
    _: KW_ONLY

    beta1: float = 0.9  # decay of the mean of Δ, in [0, 1)
    beta2: float = 0.99  # decay of the mean of Δ², in [0, 1)
    tau: float = 1e-3  # adaptivity τ > 0: elements whose steps are far below it move as in plain averaging

    def __post_init__(self) -> None:
        name = type(self).__name__
        _require_rate(name, self.lr)
        _require_share(f"{name}.beta1", self.beta1)
        _require_share(f"{name}.beta2", self.beta2)
        require(self.tau > 0, f"{name}.tau", self.tau, "it keeps the division finite", "pass tau > 0, such as 1e-3")

    def state(self, params: Vector) -> State:
        """Return m = 0 and v = τ²."""
        # v starts at τ², the least that the paper allows.
        return {
            "mean": {name: torch.zeros_like(value) for name, value in params.items()},
            "square": {name: torch.full_like(value, self.tau**2) for name, value in params.items()},
        }

    def step(self, center: Vector, combined: Vector, state: State) -> tuple[Vector, State]:
        """Return g + η m / (√v + τ), m and v."""
        moved, means, squares = {}, {}, {}
        for name, value in center.items():
            step = combined[name] - value
            means[name] = self.beta1 * state["mean"][name] + (1 - self.beta1) * step
            squares[name] = self._next_square(state["square"][name], step * step)
            moved[name] = value + self.lr * means[name] / (squares[name].sqrt() + self.tau)
        return moved, {"mean": means, "square": squares}

    def _next_square(self, old: Tensor, square: Tensor) -> Tensor:
        """Return the next v of the last one and Δ²."""
        return self.beta2 * old + (1 - self.beta2) * square


@dataclass(frozen=True, slots=True)
class FedYogi(FedAdam):
    """FedAdam with v ← v − (1 − β₂) Δ² sign(v − Δ²): v grows as fast, and falls more slowly where Δ becomes small.

    Source: Reddi et al. 2021 (arXiv:2003.00295), Algorithm 2.
    """

    def _next_square(self, old: Tensor, square: Tensor) -> Tensor:
        """Return the next v; it stays positive, for it falls by at most a share of itself."""
        return old - (1 - self.beta2) * square * torch.sign(old - square)


def _require_rate(what: str, lr: float) -> None:
    require(lr > 0, f"{what}.lr", lr, "the model would not move, or away from the clients", "pass lr > 0")


def _require_share(what: str, value: float) -> None:
    require(0 <= value < 1, what, value, "a running mean needs a decay below 1", "pass a number in [0, 1)")
