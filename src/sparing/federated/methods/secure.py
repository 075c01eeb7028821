"""Secure aggregation around a method: the server learns the sum of the updates, and no single one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparing.errors import require
from sparing.federated.methods.around import Around
from sparing.federated.methods.fednova import FedNova
from sparing.federated.methods.interface import Method, State, Update, Vector
from sparing.federated.methods.lora import Merging
from sparing.federated.methods.private import Private
from sparing.federated.secure.exchange import Leaves
from sparing.federated.secure.protocol import Stage, threshold_of
from sparing.federated.secure.ring import Ring
from sparing.federated.server.robust import Mean
from sparing.federated.settings import Schedule
from sparing.seeds import stream

SUMMED = -2
"""Number of the update that stands for all that were summed."""


@dataclass(frozen=True, slots=True)
class SecureSum(Around):
    """A method whose server sees masked integers of each client, and of a round only their sum; the mean is uniform.

    Every update x − g is rounded to multiples of ``step``, whose sum is exact. A client with an element beyond
    ``bound`` sends nothing and is named. Clients may leave at any time; a round in which too few stay to unmask it
    ends the run, and reveals nothing. The server is taken to follow the protocol unless clients sign. What a
    simulation measures of clients for its record is seen by whoever runs it. Needs `pip install 'sparing[secure]'`.

    Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", CCS.

    Example:
        >>> from sparing.federated.methods.fedavg import FedAvg
        >>> SecureSum(FedAvg()).name
        'secure-fedavg'
    """

    method: Method
    """What is summed: FedAvg, FedProx, MOON, FedPAN, FedSign, FedDyn, with the plain mean and any optimizer."""
    _: KW_ONLY

    bound: float = 8.0
    """Largest size of an element of an update, > 0, in units of the weights."""

    step: float = 2.0**-20
    """What elements are rounded to multiples of, > 0, in units of the weights."""

    bits: int = 32
    """Bits that travel for each element (count), a multiple of 8 from 16 to 64: a sum that could need more is
    refused."""

    threshold: float = 0.5
    """Share of the clients asked, in [0, 1), of which more must stay to the end; as many that collude with the server
    could unmask a client."""

    signed: bool = False
    """Whether clients sign their keys, and who took part as they were told, so that a server that lies to them gets
    nothing. A simulation makes the keys; on Flower every ``client_app`` gets a ``secure.signing.Signer``. It holds
    while fewer than 2t − n clients collude with the server, where t of the n asked must stay to the end."""

    dropout: float = 0.0
    """In simulations the share of clients, in [0, 1), that leaves before each of the exchanges (4, or 5 if signed)."""

    seed: int = 0
    """Of who leaves."""

    def __post_init__(self) -> None:
        assert self.ring
        for name in ("threshold", "dropout"):
            share = getattr(self, name)
            require(0 <= share < 1, f"SecureSum.{name}", share, "it is a share of the clients", "pass 0 <= share < 1")
        enough = not self.signed or self.threshold >= 0.5
        why, do = "two different lists could each have enough signatures", "pass threshold=0.5 or more"
        require(enough, "SecureSum.threshold", f"{self.threshold} with signed=True", why, do)
        why, do = "its noise would be rounded before it is summed, which no ε counts", "pass the method alone"
        require(not isinstance(self.method, Private), "SecureSum.method", self.method.name, why, do)
        why, do = "it needs the product of every single client's factors", "pass FFALoRA()"
        require(not isinstance(self.method, Merging), "SecureSum.method", self.method.name, why, do)
        why, do = "every single update is divided by its steps", "pass FedAvg()"
        require(not isinstance(self.method, FedNova), "SecureSum.method", self.method.name, why, do)
        combine = getattr(self.method, "combine", None)
        why = "the server sees a sum, and every other rule needs single updates"
        require(combine == Mean(), "SecureSum.method", f"{self.method.name} with {combine}", why, "pass combine=Mean()")

    @property
    def ring(self) -> Ring:
        """The integers that travel."""
        return Ring(bits=self.bits, bound=self.bound, step=self.step)

    @property
    def name(self) -> str:
        """Name for tables and files."""
        return f"secure-{self.method.name}"

    def check(self, schedule: Schedule) -> None:
        """Refuse what the method refuses, weights by rows, and drawn blocks."""
        self.method.check(schedule)
        why = "every update counts once in the sum"
        require(schedule.weights == "uniform", "Schedule.weights", "size", why, 'pass weights="uniform"')
        counted = not self.signed or schedule.sampling == "fixed"
        why = "a client that signs has to know how many were asked"
        require(counted, "Schedule.sampling", "poisson with signed=True", why, 'pass sampling="fixed"')
        why = "the server would not know how many summed each block"
        require(schedule.blocks is None, "Schedule.blocks", schedule.blocks, why, "pass blocks=None")

    def check_run(self, schedule: Schedule, clients: int, *, normed: bool, extras: Sequence[str], huge: bool) -> None:
        """Refuse sums that could wrap around, and what would travel beside the sum or look at single updates."""
        self.ring.check(clients if schedule.sampling == "poisson" else schedule.asked(clients))
        asked, needed = schedule.asked(clients), schedule.participants(clients)
        takes = threshold_of(self.threshold, asked)
        why = f"a round that asks {asked} clients closes at {needed}, and it takes {takes} to unmask their sum"
        do = "pass a lower threshold=, or a smaller spare="
        require(not schedule.spare or takes <= needed, "Schedule.spare", schedule.spare, why, do)
        why = f"{', '.join(sorted(extras))} would travel beside the model, unmasked"
        require(not extras, "SecureSum.method", self.method.name, why, "pass FedAvg(), FedProx() or FedDyn()")
        why, do = "running statistics of clients would travel unmasked", 'pass batch_norm="recalibrate", or "local"'
        require(not normed or schedule.batch_norm != "average", "Schedule.batch_norm", '"average"', why, do)
        why = "the server sees no single update"
        require(not huge, "Guard.huge", "with SecureSum", why, "pass guard=None, or Guard(huge=None, heavy=None)")

    def aggregate(
        self, global_params: Vector, updates: Sequence[Update], server_state: State, clients: int
    ) -> tuple[Vector, State, State]:
        """Let the method step on the mean that ``summed`` made of the masked sum."""
        only = [update.client for update in updates] == [SUMMED]
        why, do = "the server has no single updates", "run it by simulate or Flower, which sum them"
        require(only, "SecureSum", f"{len(updates)} updates", why, do)
        return self.step_on_mean(global_params, updates[0].params, int(updates[0].weight), server_state, clients)

    def buffers(self, global_buffers: Vector, updates: Sequence[Update]) -> Vector:
        """Return the buffers as they were: those of clients are not in the sum."""
        return dict(global_buffers)

    def leaves(self, number: int) -> Leaves:
        """Return who leaves before which exchange of a round (0 is the first)."""

        def gone(stage: Stage, client: int) -> bool:
            source = stream(self.seed, "federated", "dropout", number, stage.value, client)
            return bool(torch.rand((), generator=source, dtype=torch.float64) < self.dropout)

        return gone


def moves_of(base: Vector, params: Vector) -> NDArray[np.float64]:
    """Return x − g of all elements, in the order of ``base``."""
    flat = torch.cat([(params[name].double() - value.double()).flatten() for name, value in base.items()])
    moves: NDArray[np.float64] = flat.cpu().numpy()
    return moves


def summed(base: Vector, moves: NDArray[np.float64], clients: int) -> Update:
    """Return the one update that stands for a sum of ``clients`` moves: g + their mean."""
    pieces = torch.split(torch.from_numpy(moves / clients), [value.numel() for value in base.values()])
    params = {
        name: (value.double() + piece.view(value.shape).to(value.device)).to(value.dtype)
        for (name, value), piece in zip(base.items(), pieces, strict=True)
    }
    return Update(SUMMED, params, float(clients))
