"""Clients that fail or attack: how they are found, named and left out, and how tests and studies make them.

A client that raises, sends numbers that are not finite, tensors of other names or shapes, a weight that is not its own,
or anything that lies far further from what it received than the others' does is left out of the round and of the mean,
keeps its old state, and stands in the record. This holds for all that travels: parameters, each buffer, and what goes
beside the model, such as SCAFFOLD's control. An attack that looks like an honest update (a flipped one of the same
length) passes; against those there are robust means (``sparing.federated`` methods with a median, a trimmed mean or
Krum).

How much a client counts is never its own to say. Where the server knows it (always 1 with uniform weights; the rows, in
a simulation or where they were passed) a claim must equal it. Where it does not, claims are held against each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from sparing.errors import RunError, require
from sparing.federated.loop import Visit
from sparing.federated.methods import Method, Sent, Update, Vector
from sparing.seeds import stream
from sparing.vectors import norm

HUGE = 20.0
"""Medians of the round's distances beyond which an update is left out; honest ones of skewed clients came to 13."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A client that is left out of a round, and why."""

    client: int
    """Its number."""

    kind: str
    """``"crash"``, ``"not finite"``, ``"wrong shape"``, ``"impossible"``, ``"weight"``, ``"huge"`` or, on Flower,
    ``"absent"``."""

    detail: str
    """What was seen, in a few words."""

    def __str__(self) -> str:
        return f"client {self.client}: {self.kind} ({self.detail})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Which updates are left out, and when a round has too few."""

    huge: float | None = HUGE
    """Largest distance of an update from what was sent, in medians of the round's distances, > 1: of the parameters
    together, of each buffer, and of each vector beside the model. None admits any. Three clients or more, or there is
    no such thing as the others."""

    heavy: float | None = 10.0
    """Largest weight that a client may claim, in medians of the round's claims, >= 1, where the server does not know
    the weights. None admits any."""

    least: int = 1
    """Clients that a round must be left with (count), >= 1."""

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        fine = self.huge is None or self.huge > 1
        require(fine, "Guard.huge", self.huge, "half of the honest clients lie above the median", "pass a number > 1")
        fine = self.heavy is None or self.heavy >= 1
        require(fine, "Guard.heavy", self.heavy, "half of the clients hold more than the median", "pass a number >= 1")
        require(self.least >= 1, "Guard.least", self.least, "a mean needs a client", "pass least >= 1")


def sift(
    visits: Sequence[Visit],
    params: Vector,
    buffers: Vector,
    guard: Guard,
    *,
    partial: bool = False,
    beside: Collection[str] = (),
    weights: Mapping[int, float] | None = None,
) -> tuple[list[Visit], list[Fault]]:
    """Part the updates that can be averaged from those that cannot.

    Args:
        visits: Of the clients that answered.
        params: The global model that was sent.
        buffers: Its buffers.
        guard: What is huge, and what is heavy.
        partial: Whether clients may leave parameters out.
        beside: Names of the vectors that travel beside the model.
        weights: Client -> how much it counts, where the server knows; otherwise claims are held against each other.

    Returns:
        Visits that count, and a fault for each other.
    """
    faults: dict[int, Fault] = {}

    def leave_out(client: int, kind: str, detail: str) -> None:
        faults.setdefault(client, Fault(client, kind, detail))

    for visit in visits:
        update = visit.update
        found = (
            _misshapen(update, params, buffers, partial, beside)
            or _not_finite(update)
            or _impossible(update)
            or _unlike(update, weights)
        )
        if found:
            leave_out(update.client, *found)
    sound = [visit.update for visit in visits if visit.update.client not in faults]
    if len(sound) > 2:
        if weights is None and guard.heavy is not None:
            middle = statistics.median(update.weight for update in sound)
            for update in sound:
                if update.weight > guard.heavy * middle:
                    leave_out(update.client, "weight", f"claims {update.weight / middle:.3g} times the median")
        if guard.huge is not None:
            for client, detail in _outlying(sound, params, buffers, guard.huge):
                leave_out(client, "huge", detail)
    kept = [visit for visit in visits if visit.update.client not in faults]
    return kept, sorted(faults.values(), key=lambda fault: fault.client)


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


def require_finite(params: Vector, number: int) -> None:
    """Stop a run whose next global model is no number, though all that it was made of was finite.

    Args:
        params: The next global model.
        number: Of the round, 0 for the first.

    Raises:
        RunError: With the first parameter at fault.
    """
    for name, value in params.items():
        if not bool(value.isfinite().all()):
            raise RunError(f"round {number + 1}: the server's step made {name} infinite or NaN; lower the rates")


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


def beside_of(method: Method, params: Vector, buffers: Vector) -> frozenset[str]:
    """Return the names of the vectors that a method's clients send beside their models."""
    fresh = method.client_state(params)
    return frozenset(method.finish(Sent(params, {}, buffers), params, fresh, 1, 1.0, buffers)[1])


def _misshapen(
    update: Update, params: Vector, buffers: Vector, partial: bool, beside: Collection[str]
) -> tuple[str, str] | None:
    """Names, shapes and kinds of numbers that the server's model does not have."""
    if odd := set(update.extras) ^ set(beside):
        return "wrong shape", f"{min(odd, key=str)} beside the model is only on one side"
    # A vector beside the model belongs to the parameters that travelled.
    trained = {name: params[name] for name in update.params if name in params}
    extras = [(vector, trained, False) for vector in update.extras.values()]
    for sent, here, some in ((update.params, params, partial), (update.buffers, buffers, False), *extras):
        strange = sent.keys() - here.keys() if some else sent.keys() ^ here.keys()
        if strange:
            return "wrong shape", f"{min(strange, key=str)} is only on one side"
        for name, value in sent.items():
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                return "wrong shape", f"{name} is no dense tensor"
            if value.shape != here[name].shape or value.dtype != here[name].dtype:
                what = f"{name} is {tuple(value.shape)} {value.dtype}, the model's {tuple(here[name].shape)}"
                return "wrong shape", f"{what} {here[name].dtype}".replace("torch.", "")
    return None


def _not_finite(update: Update) -> tuple[str, str] | None:
    for part in (update.params, update.buffers, *update.extras.values()):
        for name, value in part.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return "not finite", name
    number = isinstance(update.weight, int | float) and 0 < update.weight < math.inf
    return None if number else ("not finite", f"weight {update.weight!s:.20}")


def _impossible(update: Update) -> tuple[str, str] | None:
    """Statistics that no rows have: a variance below zero, a count below zero."""
    for name, value in update.buffers.items():
        if name.endswith(("running_var", "num_batches_tracked")) and bool((value < 0).any()):
            return "impossible", f"{name} is below zero"
    return None


def _unlike(update: Update, weights: Mapping[int, float] | None) -> tuple[str, str] | None:
    """A weight that is not the one that the server knows."""
    known = update.weight if weights is None else weights[update.client]
    return None if update.weight == known else ("weight", f"claims {update.weight:.3g} and counts {known:.3g}")


def _outlying(updates: Sequence[Update], params: Vector, buffers: Vector, most: float) -> Iterator[tuple[int, str]]:
    """Clients that lie further from what was sent than ``most`` medians, in any of the parts that travel."""
    parts = [("update", [_length(update.params, params) for update in updates])]
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    parts += [(key, [_length(update.extras[key], zeros) for update in updates]) for key in updates[0].extras]
    for name, sent in buffers.items():
        one = {name: sent}
        parts.append((name, [_length({name: update.buffers[name]}, one) for update in updates]))
    for what, lengths in parts:
        middle = statistics.median(lengths)
        if not middle and what not in buffers:  # most clients sent back what they got: those that trained are judged
            middle = statistics.median([length for length in lengths if length] or [0.0])
        for update, length in zip(updates, lengths, strict=True):
            if length > most * middle:
                times = f"{length / middle:.3g} times" if middle else "moved, unlike"
                yield update.client, f"{times} the median {what}"


def _length(params: Vector, base: Vector) -> float:
    return float(norm({name: value.double() - base[name].double() for name, value in params.items()}))
