"""Settings of federated training: how long, who takes part, how a client trains, and at which rate in which round."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from sparing.errors import require
from sparing.seeds import stream

Decay = Literal["none", "cosine"]
"""What the learning rate does after the warm-up: stay, or fall along half a cosine to zero after the last round."""

BatchNorm = Literal["average", "local", "recalibrate"]
"""What happens to running statistics: the server averages them; each client keeps its own, and its own affine
weights with them; or the server estimates them anew on rows of its own."""

Optimizer = Literal["sgd", "adamw"]
"""How a client steps on its gradients."""

Weights = Literal["uniform", "size"]
"""How much a client counts in the mean: all the same, or by its number of rows."""

Sampling = Literal["fixed", "poisson"]
"""How the clients of a round are drawn: a fixed number without replacement, or each for itself by a coin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Rounds, participation and local training; the same for every method.

    Example:
        >>> Schedule(rounds=2, participation=0.5).participants(5)
        3

    Source: Li et al. 2024 (arXiv:2405.12489), Algorithm 1, where T is ``rounds``, Q ``participation``, E
    ``local_epochs`` and B ``batch_size``; the means are uniform.
    """

    rounds: int = 100
    """Rounds of sending, training and averaging (count), T."""

    participation: float = 0.1
    """Share of the clients that train in a round, in (0, 1], Q; max(⌊Q·K⌉, 1) of K clients, halves rounded up."""

    sampling: Sampling = "fixed"
    """How the clients of a round are drawn; with "poisson" their number varies around Q·K, and may be zero."""

    spare: float = 0.0
    """Share of extra clients that are asked, ≥ 0: a round closes once as many have answered as are asked without them.
    This favours clients that answer fast."""

    local_epochs: int = 5
    """Passes over its own rows that a client makes in a round (count), E."""

    batch_size: int = 64
    """Rows of a client's step (count), B."""

    optimizer: Optimizer = "sgd"
    """How a client steps on its gradients: as torch's SGD or AdamW; its moments start at zero in every round.
    AdamW wants a smaller rate, such as 0.001 to 0.01."""

    lr: float = 0.03
    """Learning rate of the clients' optimizer; ``rate_at`` gives that of a round."""

    momentum: float = 0.9
    """Momentum of the clients' SGD, or β₁ of AdamW, in [0, 1)."""

    beta2: float = 0.999
    """β₂ of AdamW, in [0, 1)."""

    eps: float = 1e-8
    """ε of AdamW, added to the root of the mean square, > 0. At 1e-8 a gradient of 1e-7 moves a weight by the whole
    rate, rounding and all: with a larger one, runs on several engines agree to more digits."""

    weight_decay: float = 0.0
    """λ ≥ 0: SGD adds λθ to the gradient; AdamW shrinks θ by the rate times λ in each step."""

    clip: float | None = None
    """Largest norm of a client's gradient, the method's term included, > 0; None does not clip."""

    warmup_rounds: int = 0
    """Rounds of linear warm-up (count): round r = 0, 1, … has (r + 1)/warmup_rounds of the rate; 0 is none."""

    decay: Decay = "none"
    """What the learning rate does after the warm-up."""

    least_steps: int = 0
    """Smallest number of local steps of a client (count); one with few rows then continues into further epochs."""

    batch_norm: BatchNorm = "average"
    """What happens to running statistics. With ``"local"`` a client keeps its own affine weights too, which SCAFFOLD
    and FedDyn go on correcting as all others, and the server's model has statistics that no client uses."""

    weights: Weights = "uniform"
    """How much a client counts in the mean."""

    blocks: int | None = None
    """Body blocks that each client draws, trains and sends (count); None is all. Everything outside body blocks is
    always trained and sent."""

    drop_last_single: bool = True
    """Leave out a last batch of one row, from which batch norm has no variance, where an epoch has others."""

    def __post_init__(self) -> None:
        _check(self)

    def asked(self, clients: int) -> int:
        """Return how many of ``clients`` (K) are asked in a round: those that train, and the spare ones, rounded up."""
        # 10 · 1.1 is 11, not 11 + 2e-15.
        return min(math.ceil(self.participants(clients) * (1 + self.spare) - 1e-9), clients)

    def participants(self, clients: int) -> int:
        """Return how many of ``clients`` (K) train in a round: max(⌊Q·K⌉, 1)."""
        require(clients >= 1, "clients", clients, "somebody must train", "pass at least one client")
        # Not round(), which takes halves to the even number.
        return max(math.floor(self.participation * clients + 0.5), 1)


def rate_at(schedule: Schedule, number: int) -> float:
    """Return the learning rate of a round, 0 for the first: linear warm-up, then constant or half a cosine.

    Example:
        >>> schedule = Schedule(rounds=4, lr=0.4, warmup_rounds=2, decay="cosine")
        >>> [round(rate_at(schedule, r), 3) for r in range(4)]
        [0.2, 0.4, 0.4, 0.2]
    """
    require(number >= 0, "round", number, "the first round is 0", "pass number >= 0")
    if number < schedule.warmup_rounds:
        return schedule.lr * (number + 1) / schedule.warmup_rounds
    if schedule.decay == "none":
        return schedule.lr
    span = schedule.rounds - schedule.warmup_rounds
    # A run that is prolonged beyond its schedule stays at the end of the cosine instead of climbing again.
    return schedule.lr * 0.5 * (1 + math.cos(math.pi * min((number - schedule.warmup_rounds) / max(span, 1), 1.0)))


def sample_clients(
    schedule: Schedule, clients: int, number: int, seed: int, share: float | None = None, purpose: str = "drawn"
) -> tuple[int, ...]:
    """Return who is asked in a round (0 is the first), sorted; with Poisson sampling there may be nobody."""
    # Nothing but the arguments decides, so every method and every engine sees the same clients.
    count = schedule.asked(clients)
    if share is not None:
        count = replace(schedule, participation=share).participants(clients)
    if schedule.sampling == "poisson" and share is None:
        coins = torch.rand(clients, generator=stream(seed, "federated", purpose, number), dtype=torch.float64)
        # The rate that the accountant is told, also where Q·K is no integer.
        return tuple((coins < count / clients).nonzero().flatten().tolist())
    order = torch.randperm(clients, generator=stream(seed, "federated", purpose, number))
    return tuple(sorted(order[:count].tolist()))


def _check(schedule: Schedule) -> None:
    counts = {"rounds": 1, "local_epochs": 1, "batch_size": 1, "warmup_rounds": 0, "least_steps": 0}
    if schedule.blocks is not None:
        counts["blocks"] = 0
    for name, least in counts.items():
        value = getattr(schedule, name)
        # True is an integer to Python.
        holds = isinstance(value, int) and not isinstance(value, bool) and value >= least
        require(holds, f"Schedule.{name}", value, "it is a count", f"pass an integer >= {least}")
    share = schedule.participation
    require(0 < share <= 1, "Schedule.participation", share, "it is a share of the clients", "pass 0 < share <= 1")
    for name in ("lr", "eps", "clip"):
        value = getattr(schedule, name)
        holds = (value is None and name == "clip") or (value is not None and 0 < value < math.inf)
        require(holds, f"Schedule.{name}", value, "it scales a step", "pass a finite number > 0")
    spare = schedule.spare
    require(0 <= spare < math.inf, "Schedule.spare", spare, "it is a share of clients", "pass a finite number >= 0")
    fixed = not spare or schedule.sampling == "fixed"
    why = "a round has no number of clients that would be enough"
    require(fixed, "Schedule.spare", f'{spare} with sampling="poisson"', why, "pass spare=0")
    for name in ("momentum", "beta2"):
        beta = getattr(schedule, name)
        require(0 <= beta < 1, f"Schedule.{name}", beta, "a mean of all steps must forget", "pass 0 <= β < 1")
    for name in ("beta2", "eps"):
        value, unset = getattr(schedule, name), Schedule.__dataclass_fields__[name].default
        fits = schedule.optimizer == "adamw" or value == unset
        require(fits, f"Schedule.{name}", f'{value} with optimizer="sgd"', "SGD has none", 'pass optimizer="adamw"')
    decay = schedule.weight_decay
    require(0 <= decay < math.inf, "Schedule.weight_decay", decay, "it shrinks weights", "pass a finite number >= 0")
    choices = {
        "optimizer": Optimizer, "decay": Decay, "batch_norm": BatchNorm, "weights": Weights, "sampling": Sampling,
    }  # fmt: skip
    for name, known in choices.items():
        value, names = getattr(schedule, name), get_args(known)
        require(value in names, f"Schedule.{name}", repr(value), "no such choice", f"pass one of {', '.join(names)}")
