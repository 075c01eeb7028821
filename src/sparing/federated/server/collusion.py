"""Clients that attack together and know what the honest ones of the round send; for tests and studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from sparing.errors import require
from sparing.federated.client.train import Client
from sparing.federated.methods.interface import Update, Vector
from sparing.federated.server.faults import Sabotage

CollusionKind = Literal["alie", "inner", "sybil"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collusion:
    """A share of the clients that all send one and the same update, made from the honest ones of the round.

    ``simulate(tamper=Collusion(kind="alie", share=0.2))``. Parameters, floating buffers and vectors beside the model
    are attacked alike. The attackers of a seed are those of ``Sabotage``.
    """

    kind: CollusionKind
    """"alie": a little is enough, mean − z · standard deviation of each element, z as large as hides among the
    honest (Baruch et al. 2019, arXiv:1902.06156). "inner": −``scale`` times the honest mean update (inner product
    manipulation, Xie et al. 2020, arXiv:1903.03936). "sybil": all copy the first attacker's update, turned round and
    ``scale`` long."""

    share: float
    """Of the clients, in [0, 1]; each is drawn independently."""

    scale: float = 1.0
    """Length of the attack in "inner" and "sybil", > 0; in "alie" a factor of z."""

    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, "Collusion.share", self.share, "it is a share of clients", "pass 0 <= share <= 1")
        require(self.scale > 0, "Collusion.scale", self.scale, "the attack would be none", "pass scale > 0")

    def is_hostile(self, client: int) -> bool:
        """Say whether a client is one of them."""
        return Sabotage(kind="flip", share=self.share, seed=self.seed).is_hostile(client)

    def attack(self, updates: Sequence[Update], params: Vector, buffers: Vector) -> list[Update]:
        """Return what all clients of a round send, in their order; nobody attacks where nobody is honest."""
        honest = [update for update in updates if not self.is_hostile(update.client)]
        hostile = [update for update in updates if self.is_hostile(update.client)]
        if not honest or not hostile:
            return list(updates)
        z = self.scale * hidden_deviations(len(updates), len(hostile))
        first = min(hostile, key=lambda update: update.client)

        def made(vectors: Sequence[Vector], own: Vector, base: Vector | None) -> Vector:
            sends = {
                name: self._element([one[name] for one in vectors if name in one] or [value], value,
                                    torch.zeros_like(value) if base is None else base[name], z)
                for name, value in own.items()
            }  # fmt: skip
            # A variance below zero would give them away.
            return {
                name: value.clamp_min(0) if name.endswith("running_var") else value for name, value in sends.items()
            }

        forged = replace(
            first,
            params=made([one.params for one in honest], first.params, params),
            buffers=made([one.buffers for one in honest], first.buffers, buffers),
            extras={
                key: made([one.extras[key] for one in honest], vector, None) for key, vector in first.extras.items()
            },
        )
        return [
            replace(forged, client=one.client, weight=one.weight) if self.is_hostile(one.client) else one
            for one in updates
        ]

    def _element(self, honest: Sequence[Tensor], own: Tensor, base: Tensor, z: float) -> Tensor:
        """What the attackers send for one tensor."""
        if not own.is_floating_point():
            return own
        rows = torch.stack([value.double() for value in honest])
        start = base.double()
        if self.kind == "alie":
            found = rows.mean(0) - z * rows.std(0, correction=0)
        elif self.kind == "inner":
            found = start - self.scale * (rows.mean(0) - start)
        else:
            found = start - self.scale * (own.double() - start)
        return found.to(own.dtype)


def hidden_deviations(clients: int, hostile: int) -> float:
    """Return z of "a little is enough": so many honest clients lie further out that the attackers seem a majority.

    Example:
        >>> round(hidden_deviations(50, 24), 2)  # the paper: 26 of 50 needed, two honest ones to win over
        1.43
    """
    needed = clients // 2 + 1 - hostile
    share = (clients - hostile - needed) / (clients - hostile)
    # Where attackers already are the majority, or are too few to hide, the normal quantile has no value.
    return NormalDist().inv_cdf(min(max(share, 0.5), 0.9999))


def flip_labels(clients: Sequence[Client], attack: Collusion | Sabotage, classes: int) -> list[Client]:
    """Return the clients with the labels y of the hostile ones turned into classes − 1 − y."""
    return [
        Client(one.inputs, classes - 1 - one.targets) if attack.is_hostile(at) else one
        for at, one in enumerate(clients)
    ]


def plant_backdoor(
    clients: Sequence[Client], attack: Collusion | Sabotage, *, target: int, elements: int = 4, value: float = 3.0
) -> list[Client]:
    """Return the clients with half of the hostile ones' rows marked and labelled ``target``.

    The mark sets the last ``elements`` of a row to ``value``; ``marked`` makes such rows to measure the attack by.
    """
    made = []
    for at, one in enumerate(clients):
        half = len(one) // 2
        if attack.is_hostile(at) and half:
            inputs = torch.cat([marked(one.inputs[:half], elements, value), one.inputs[half:]])
            one = Client(inputs, torch.cat([torch.full_like(one.targets[:half], target), one.targets[half:]]))
        made.append(one)
    return made


def marked(inputs: Tensor, elements: int = 4, value: float = 3.0) -> Tensor:
    """Return rows whose last ``elements`` are ``value``, shape as ``inputs``."""
    rows = inputs.flatten(1).clone()
    rows[:, -elements:] = value
    return rows.view_as(inputs)
