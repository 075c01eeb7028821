"""Clients that fail or attack: how they are found, named and left out, and how tests and studies make them.

A client that raises, sends numbers that are not finite, tensors of other names or shapes, or an update far longer than
the others' is left out of the round and of the mean, keeps its old state, and stands in the record. An attack that
looks like an honest update (a flipped one of the same length) passes; against those there are robust means
(``sparing.federated`` methods with a median, a trimmed mean or Krum).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from sparing.errors import RunError, require
from sparing.federated.loop import Visit
from sparing.federated.methods import Update, Vector
from sparing.seeds import stream
from sparing.vectors import norm


@dataclass(frozen=True, slots=True)
class Fault:
    """A client that is left out of a round, and why."""

    client: int
    """Its number."""

    kind: str
    """``"crash"``, ``"not finite"``, ``"wrong shape"`` or ``"huge"``."""

    detail: str
    """What was seen, in a few words."""

    def __str__(self) -> str:
        return f"client {self.client}: {self.kind} ({self.detail})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Which updates are left out, and when a round has too few."""

    huge: float | None = 100.0
    """Largest length ‖x − g‖ of an update, in medians of the round's lengths, > 1; None admits any. Three clients or
    more, or there is no such thing as the others."""

    least: int = 1
    """Clients that a round must be left with (count), >= 1."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        fine = self.huge is None or self.huge > 1
        require(fine, "Guard.huge", self.huge, "half of the honest clients lie above the median", "pass a number > 1")
        require(self.least >= 1, "Guard.least", self.least, "a mean needs a client", "pass least >= 1")


def sift(
    visits: Sequence[Visit], params: Vector, buffers: Vector, guard: Guard, *, partial: bool = False
) -> tuple[list[Visit], list[Fault]]:
    """Part the updates that can be averaged from those that cannot.

    Args:
        visits: Of the clients that answered.
        params: The global model that was sent.
        buffers: Its buffers.
        guard: What is huge.
        partial: Whether clients may leave parameters out.

    Returns:
        Visits that count, and a fault for each other.
    """
    faults: dict[int, Fault] = {}
    for visit in visits:
        found = _misshapen(visit.update, params, buffers, partial) or _not_finite(visit.update)
        if found:
            faults[visit.update.client] = Fault(visit.update.client, *found)
    sound = [visit for visit in visits if visit.update.client not in faults]
    lengths = {visit.update.client: _length(visit.update.params, params) for visit in sound}
    if guard.huge is not None and len(lengths) > 2:
        middle = statistics.median(lengths.values())
        for client, length in lengths.items():
            if length > guard.huge * middle > 0:
                faults[client] = Fault(client, "huge", f"{length / middle:.3g} times the median update")
    return [visit for visit in sound if visit.update.client not in faults], sorted(
        faults.values(), key=lambda fault: fault.client
    )


def require_enough(left: int, number: int, faults: Sequence[Fault], guard: Guard) -> None:
    """Stop a run whose round has too few clients left.

    Args:
        left: Clients that count.
        number: Of the round, 0 for the first.
        faults: Of this round.
        guard: Its ``least``.

    Raises:
        RunError: With the first few faults.
    """
    if left < guard.least:
        told = "; ".join(map(str, faults[:3])) + ("; …" if len(faults) > 3 else "")
        raise RunError(f"round {number + 1}: {left} clients left of the {guard.least} that it needs; {told}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sabotage:
    """A share of the clients that misbehaves in every round it is drawn in; for tests and studies of robustness.

    ``simulate(tamper=Sabotage(kind="flip", share=0.2))`` turns the updates of a fixed fifth of the clients around.
    """

    kind: Literal["crash", "not finite", "wrong shape", "flip", "huge"]
    """``"flip"`` sends g − (x − g); ``"huge"`` sends g + 10⁶ (x − g)."""

    share: float
    """Share of the clients, in [0, 1]; each one is drawn for itself."""

    seed: int = 0
    """Of the draw of clients."""

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        require(0 <= self.share <= 1, "Sabotage.share", self.share, "it is a share of clients", "pass 0 <= share <= 1")

    def strikes(self, client: int) -> bool:
        """Say whether a client is one of them."""
        source = stream(self.seed, "federated", "sabotage", client)
        return bool(torch.rand((), generator=source, dtype=torch.float64) < self.share)

    def __call__(self, update: Update, params: Vector) -> Update:
        """Return what the client sends in place of its update.

        Args:
            update: The honest one.
            params: The global model that it received.

        Returns:
            The update itself, if the client is not one of them.

        Raises:
            RunError: For a crash.
        """
        if not self.strikes(update.client):
            return update
        if self.kind == "crash":
            raise RunError("sabotage")
        if self.kind == "not finite":
            return replace(update, params={name: value * float("nan") for name, value in update.params.items()})
        if self.kind == "wrong shape":
            return replace(update, params={name: value[..., None] for name, value in update.params.items()})
        factor = -1.0 if self.kind == "flip" else 1e6
        moved = {name: params[name] + factor * (value - params[name]) for name, value in update.params.items()}
        return replace(update, params=moved)


def _misshapen(update: Update, params: Vector, buffers: Vector, partial: bool) -> tuple[str, str] | None:
    """Names, shapes and kinds of numbers that the server's model does not have."""
    for sent, here, some in ((update.params, params, partial), (update.buffers, buffers, False)):
        strange = sent.keys() - here.keys() if some else sent.keys() ^ here.keys()
        if strange:
            return "wrong shape", f"{min(strange)} is only on one side"
        for name, value in sent.items():
            if value.shape != here[name].shape or value.dtype != here[name].dtype:
                what = f"{name} is {tuple(value.shape)} {value.dtype}, the model's {tuple(here[name].shape)}"
                return "wrong shape", f"{what} {here[name].dtype}".replace("torch.", "")
    return None


def _not_finite(update: Update) -> tuple[str, str] | None:
    for part in (update.params, update.buffers, *update.extras.values()):
        for name, value in part.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return "not finite", name
    return None if 0 < update.weight < float("inf") else ("not finite", f"weight {update.weight}")


def _length(params: Vector, base: Vector) -> float:
    return float(norm({name: value.double() - base[name] for name, value in params.items()}))
