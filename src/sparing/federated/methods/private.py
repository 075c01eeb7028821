"""Client-level differential privacy around a method: updates of bounded length, and noise on their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from sparing.errors import require
from sparing.federated.accounting import epsilon
from sparing.federated.methods.around import Around
from sparing.federated.methods.feddyn import FedDyn
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.interface import Method, State, Update, Vector
from sparing.federated.methods.lora import Merging
from sparing.federated.server.robust import Mean
from sparing.federated.settings import Schedule
from sparing.seeds import stream

_OWN = "private"  # the part of the server's state that is not the method's
_COUNT_SHARE = 20  # the noise of the count of short updates is per_round/20, as its authors have it


@dataclass(frozen=True, slots=True)
class Private(Around):
    """A method whose models reveal little about any one client: (ε, δ) for each client's whole data.

    Every update x − g is clipped to a norm of at most C over all its parameters; the server adds N(0, (zC)²) to each
    element of the sum and divides by ``per_round``, never by how many answered. A client that fails counts as an update
    of zero. Running statistics of clients never enter the model, and outliers among clients are not excluded, because
    that would depend on the others' data. ε covers the global models, not what a simulation measures of clients for its
    record. The generator is Mersenne Twister and the noise is in floating point: neither protects against an attacker
    who can read the low bits.

    Source: McMahan et al. 2018 (arXiv:1710.06963), Algorithm 1; the adaptive norm is that of Andrew et al. 2021
    (arXiv:1905.03871), Algorithm 1.

    Example:
        >>> from sparing.federated.methods.fedavg import FedAvg
        >>> Private(FedAvg(), noise=1.0, clip=0.5, per_round=10).name
        'private-fedavg'
    """

    method: Method
    """The method made private: FedAvg, FedProx, MOON, FedPAN, FedSign, FedDyn, with the plain mean and any
    optimizer."""
    _: KW_ONLY

    noise: float
    """Noise multiplier z, ≥ 0: standard deviation of the noise on the sum, in units of the clipping norm. 0 gives no
    privacy and serves as a control."""

    clip: float
    """Clipping norm C, > 0, in units of the weights; with ``quantile`` that of the first round."""

    per_round: int
    """Clients of a round n (count), with Poisson sampling their expected number: ``Schedule.participants``."""

    quantile: float | None = None
    """Share of updates that should be shorter than C, in (0, 1): C then follows the updates, and a part of the noise
    goes to the count of short ones. None keeps C."""

    clip_rate: float = 0.2
    """Rate of log C in ``quantile``, > 0."""

    at_clients: bool = False
    """Each client clips and adds noise of variance (zC)²/n itself; the sum has the server's noise if n answer, and less
    if fewer do. It hides nothing from the server unless updates are summed before it sees them."""

    seed: int = 0
    """Seed of the noise and of the draw of clients. Whoever knows it can subtract the noise: outside of simulations
    pass ``secrets.randbits(128)``, keep it with the checkpoint, which holds it too, and with ``at_clients`` use a
    different one for each client."""

    def __post_init__(self) -> None:
        need, method = require, self.method
        need(0 <= self.noise < math.inf, "Private.noise", self.noise, "it scales the noise", "pass a number >= 0")
        need(0 < self.clip < math.inf, "Private.clip", self.clip, "no client could move the model", "pass a norm > 0")
        need(self.per_round >= 1, "Private.per_round", self.per_round, "the sum is divided by it", "pass 1 or more")
        why, do = "products of single clients' factors would enter base weights without noise", "pass FFALoRA()"
        need(not isinstance(method, Merging), "Private.method", method.name, why, do)
        why, do = "updates would be divided by their steps, and clipped ones have none", "pass FedAvg()"
        need(not isinstance(method, FedNova), "Private.method", method.name, why, do)
        sized = isinstance(method, FedDyn) and method.weights == "size"
        why, do = "each client's penalty would depend on the rows of all", 'pass FedDyn(weights="uniform")'
        need(not sized, "Private.method", 'FedDyn(weights="size")', why, do)
        combine = getattr(method, "combine", None)
        why = "noise is measured for a sum of updates, which no other rule is"
        need(combine == Mean(), "Private.method", f"{method.name} with {combine}", why, "pass combine=Mean()")
        share = self.quantile
        if share is None:
            return
        need(0 < share < 1, "Private.quantile", share, "it is a share of the updates", "pass 0 < q < 1")
        need(self.clip_rate > 0, "Private.clip_rate", self.clip_rate, "the norm would not follow", "pass a rate > 0")
        why = "clients would need a norm that only the server follows"
        need(not self.at_clients, "Private.quantile", "with at_clients=True", why, "pass quantile=None")
        spread, do = self.per_round / _COUNT_SHARE, "draw more clients, or pass quantile=None"
        why = f"the count of short updates takes a part of it, and {self.per_round} clients leave {2 * spread:g}"
        need(self.noise < 2 * spread, "Private.noise", self.noise, why, do)

    @property
    def name(self) -> str:
        """Name for tables and files."""
        return f"private-{self.method.name}"

    def check(self, schedule: Schedule) -> None:
        """Refuse what the method refuses, weights by rows, and drawn blocks."""
        self.method.check(schedule)
        why = "a client of many rows could move the model further than the norm"
        require(schedule.weights == "uniform", "Schedule.weights", "size", why, 'pass weights="uniform"')
        why = "the sum of each block would be divided by clients that did not send it"
        require(schedule.blocks is None, "Schedule.blocks", schedule.blocks, why, "pass blocks=None")
        why = "each client adds its part of the noise, so the noise of a round would show how many were drawn"
        fixed = schedule.sampling != "poisson" or not self.at_clients
        require(fixed, "Private.at_clients", 'with sampling="poisson"', why, 'pass sampling="fixed"')

    def check_run(self, schedule: Schedule, clients: int, *, normed: bool, extras: Sequence[str], huge: bool) -> None:
        """Refuse a run whose ε would be wrong: other counts, vectors besides the model, statistics, outlier rules."""
        drawn = schedule.participants(clients)
        why = "ε counts on a draw of who takes part, and to be among the first is none"
        require(not schedule.spare, "Schedule.spare", schedule.spare, why, "pass spare=0")
        why, do = f"a round draws {drawn} of {clients} clients", f"pass per_round={drawn}"
        require(self.per_round == drawn, "Private.per_round", self.per_round, why, do)
        why = f"{', '.join(sorted(extras))} would travel beside the model, without noise"
        require(not extras, "Private.method", self.method.name, why, "pass FedAvg(), FedProx() or FedDyn()")
        why, do = "running statistics of clients have no noise", 'pass batch_norm="recalibrate", or "local"'
        require(not normed or schedule.batch_norm != "average", "Schedule.batch_norm", '"average"', why, do)
        why = "who is left out depends on all clients' data, which no ε counts"
        require(not huge, "Guard.huge", "with Private", why, "pass guard=None, or Guard(huge=None)")

    def epsilon(
        self, schedule: Schedule, clients: int, *, delta: float | None = None, answered: Sequence[int] | None = None
    ) -> float:
        """Return what the models of a run reveal about a client; needs `pip install 'sparing[privacy]'`.

        Args:
            schedule: Rounds, participation and sampling.
            clients: All of them (count), K.
            delta: Probability δ with which ε may fail, in (0, 1); None is K^−1.1.
            answered: Clients that answered in each round made; None takes all rounds of the schedule. Failing clients
                leave ε as it is, except with ``at_clients``, where their share of the noise is missing.

        Returns:
            ε, ≥ 0; infinite without noise.
        """
        levels = [self.noise] * schedule.rounds if answered is None else [self.noise] * len(answered)
        if self.at_clients and answered is not None:
            levels = [self.noise * math.sqrt(min(count / self.per_round, 1.0)) for count in answered]
            # A round without answers has neither noise nor a client in it.
            levels = [level for level, count in zip(levels, answered, strict=True) if count]
        delta = clients**-1.1 if delta is None else delta
        return epsilon(levels, clients=clients, drawn=self.per_round, sampling=schedule.sampling, delta=delta)

    def send(self, sent: Vector, params: Vector, number: int, client: int) -> Vector:
        """Return what a client sends in a round (0 is the first): its model, or with ``at_clients`` g + clipped + N."""
        if not self.at_clients:
            return params
        moves, _ = clipped(sent, params, self.clip)
        source = stream(self.seed, "federated", "privacy", number, client)
        spread = self.noise * self.clip / math.sqrt(self.per_round)
        return _moved(sent, {name: move + spread * _normal(move, source) for name, move in moves.items()})

    def server_state(self, params: Vector) -> State:
        """Return that of the method, the clipping norm, and the rounds made."""
        own = {"clip": torch.tensor(self.clip, dtype=torch.float64), "rounds": torch.zeros((), dtype=torch.int64)}
        return {**self.method.server_state(params), _OWN: own}

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Let the method step on the private mean; every round has noise of its own, by ``seed`` and its number."""
        own = server_state[_OWN]
        bound, made = float(own["clip"]), int(own["rounds"])
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in global_params.items()}
        short = 0
        for update in sorted(updates, key=lambda update: update.client):
            moves, length = clipped(global_params, update.params, math.inf if self.at_clients else bound)
            short += length <= bound
            for name, move in moves.items():
                total[name] += move
        source = stream(self.seed, "federated", "privacy", made)
        if not self.at_clients:
            for value in total.values():
                value.add_(_normal(value, source), alpha=self.sum_noise * bound)
        mean = _moved(global_params, {name: value / self.per_round for name, value in total.items()})
        inner = {name: vector for name, vector in server_state.items() if name != _OWN}
        params, state, extras = self.step_on_mean(global_params, mean, self.per_round, inner, clients)
        after = {"clip": self._next_clip(own["clip"], short, len(updates), source), "rounds": own["rounds"] + 1}
        return params, {**state, _OWN: after}, extras

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """Return the buffers as they were: those of clients have no noise."""
        return dict(global_buffers)

    @property
    def sum_noise(self) -> float:
        """Multiplier of the noise on the sum: z, with ``quantile`` (z⁻² − (2 σ_b)⁻²)^−½, σ_b = n/20 of the count."""
        if self.quantile is None or self.noise == 0:
            return self.noise
        return float((self.noise**-2 - (2 * self.per_round / _COUNT_SHARE) ** -2) ** -0.5)

    def _next_clip(self, clip: Tensor, short: int, answered: int, source: torch.Generator) -> Tensor:
        """C exp(−η (b − q)), b the noisy share of updates that were shorter than C."""
        if self.quantile is None:
            return clip
        # Centred, so that one client moves the count by 1/2; without noise in the sum there is none in the count.
        spread = self.per_round / _COUNT_SHARE if self.noise else 0.0
        count = short - answered / 2 + spread * float(torch.randn((), generator=source, dtype=torch.float64))
        share = min(max(0.5 + count / self.per_round, 0.0), 1.0)
        return clip * math.exp(-self.clip_rate * (share - self.quantile))


def draw_seed(method: Method, seed: int) -> int:
    """Return the seed of who is drawn: the clients know the run's, and a private draw is not for them to know."""
    return method.seed if isinstance(method, Private) else seed


def clipped(base: Vector, params: Vector, bound: float) -> tuple[Vector, float]:
    """Return x − g in float64, shortened to at most ``bound`` over all tensors, and its length before."""
    moves = {name: value.double() - base[name].double() for name, value in params.items()}
    length = math.sqrt(math.fsum(float((move * move).sum()) for move in moves.values()))
    if length > bound:
        moves = {name: move * (bound / length) for name, move in moves.items()}
    return moves, length


def _normal(like: Tensor, source: torch.Generator) -> Tensor:
    # drawn on the host, so that the noise is the same on every device
    return torch.randn(like.shape, generator=source, dtype=torch.float64).to(like.device)


def _moved(base: Vector, moves: Vector) -> Vector:
    return {name: (base[name].double() + move).to(base[name].dtype) for name, move in moves.items()}
