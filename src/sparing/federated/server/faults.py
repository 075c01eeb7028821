"""Clients that fail or attack: how they are found, named and left out, and how tests and studies make them.

A client that raises, sends numbers that are not finite, tensors of other names or shapes, a weight that is not its own,
or anything that lies far further from what it received than the others' does, and than its local steps explain, is left
out of the round and of the mean, keeps its old state, and is named in the record. This holds for all that is sent:
parameters, each buffer, and what goes beside the model, such as SCAFFOLD's control. An attack that looks like an honest
update (a flipped one of the same length) passes; against those there are robust means (``sparing.federated`` methods
with a median, a trimmed mean or Krum).

How much a client counts is never its own to say. Where the server knows it (always 1 with uniform weights; the rows, in
a simulation or where they were passed) a claim must equal it. Where it does not, claims are held against each other.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from sparing.errors import RunError, require
from sparing.federated.client.train import ClientResult
from sparing.federated.methods.interface import Method, Sent, Update, Vector
from sparing.federated.methods.scaffold import effective_steps
from sparing.seeds import stream
from sparing.vectors import norm

HUGE = 20.0
"""Medians of the round's distances, times what a client's steps explain, beyond which an update is left out; honest
ones of skewed clients came to 13."""

HEAVY = 10.0
"""Medians of the round's claims beyond which a claim of rows or steps that the server cannot check is refused."""

FAULT: Final = re.compile(r"client (\d+): (crash|not finite|wrong shape|impossible|weight|huge|absent) \(")
"""How the text of a fault begins: client and kind."""


SabotageKind = Literal["crash", "not finite", "wrong shape", "flip", "huge"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A client that is left out of a round, and why."""

    client: int
    kind: str  # one of those in ``FAULT``
    detail: str

    def __str__(self) -> str:
        return f"client {self.client}: {self.kind} ({self.detail})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Which updates are left out, and when a round has too few."""

    huge: float | None = HUGE
    """Largest distance of an update from what was sent, in medians of the round's distances, > 1: of the parameters
    together, of each buffer, and of each vector beside the model. A client with more local steps than the median one
    may go further by as much as its steps go along a constant gradient; so an honest client with a hundred times the
    rows stays, and who holds many rows can also do more harm. Buffers that most clients did not change, and counters,
    may move by ``huge`` units an element for each step of the busiest client. None admits any. It needs at least three
    clients."""

    heavy: float | None = HEAVY
    """Largest weight that a client may claim, in medians of the round's claims, >= 1, where the server does not know
    the weights. None admits any. Where it does not know the rows, as on Flower without ``rows=``, it is also the most
    that a claim of many local steps counts for, in medians (10 if None)."""

    least: int = 1  # clients that a round must be left with, >= 1

    def __post_init__(self) -> None:
        fine = self.huge is None or self.huge > 1
        require(fine, "Guard.huge", self.huge, "half of the honest clients lie above the median", "pass a number > 1")
        fine = self.heavy is None or self.heavy >= 1
        require(fine, "Guard.heavy", self.heavy, "half of the clients hold more than the median", "pass a number >= 1")
        require(self.least >= 1, "Guard.least", self.least, "a mean needs a client", "pass least >= 1")


def filter_results(
    results: Sequence[ClientResult],
    params: Vector,
    buffers: Vector,
    guard: Guard,
    *,
    partial: bool = False,  # whether clients may omit parameters
    extra_names: Collection[str] = (),  # of the vectors that travel beside the model
    weights: Mapping[int, float] | None = None,  # what each client counts; None: claims are compared with each other
    momentum: float = 0.0,  # of the clients' SGD
    rounds: int = 1,  # in which a client's buffers may have moved
    positive: Collection[str] = (),  # buffers that no rows make less than zero
) -> tuple[list[ClientResult], list[Fault]]:
    """Separate the results that can be averaged from those that cannot, with a fault for each of these."""
    faults: dict[int, Fault] = {}
    for result in results:
        update = result.update
        # Shapes first: the other checks rely on names that match.
        found = (
            _wrong_shape(update, params, buffers, partial, extra_names)
            or _bad_numbers(update, positive)
            or _wrong_weight(update, weights)
        )
        if found:
            faults.setdefault(update.client, Fault(update.client, *found))
    valid = [result.update for result in results if result.update.client not in faults]
    # Of two, nobody knows which is the odd one.
    if len(valid) > 2:
        if weights is None:
            for client, medians in heavy_claims({update.client: update.weight for update in valid}, guard).items():
                faults.setdefault(client, Fault(client, "weight", f"claims {medians:.3g} times the median"))
        if guard.huge is not None:
            steps = {result.update.client: result.steps for result in results}
            made = [steps[update.client] for update in valid]
            factors, events = _distance_factors(made, momentum), max(made) * rounds
            for client, detail in _outliers(valid, params, buffers, guard.huge, factors, events):
                faults.setdefault(client, Fault(client, "huge", detail))
    kept = [result for result in results if result.update.client not in faults]
    return kept, sorted(faults.values(), key=lambda fault: fault.client)


def require_enough(left: int, number: int, faults: Sequence[Fault], guard: Guard) -> None:
    """Stop a run whose round (0 is the first) has too few clients left."""
    if left < guard.least:
        text = "; ".join(map(str, faults[:3])) + ("; …" if len(faults) > 3 else "")
        raise RunError(f"round {number + 1}: {left} clients left of the {guard.least} that it needs; {text}")


def report_faults(row: Mapping[str, Any], seen: set[tuple[str, str]], label: str) -> None:
    """Write on stderr who is left out of a round, each client once for each kind of fault."""
    text = str(row["left_out"])
    found = list(FAULT.finditer(text))
    for at, one in enumerate(found):
        if one.groups() not in seen:
            seen.add((one[1], one[2]))
            end = found[at + 1].start() if at + 1 < len(found) else len(text)
            detail = text[one.start(2) : end].removesuffix("; ")
            line = f"round {row['round']}: client {one[1]} is left out: {detail}; later rounds are not reported again"
            sys.stderr.write(f"{label}: {line}\n")


def require_finite(params: Vector, number: int) -> None:
    """Stop a run whose next global model is not finite, though all updates were."""
    for name, value in params.items():
        if not bool(value.isfinite().all()):
            raise RunError(f"round {number + 1}: the server's step made {name} infinite or NaN; lower the rates")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sabotage:
    """A share of the clients that misbehaves in every round it is drawn in; for tests and studies of robustness.

    ``simulate(tamper=Sabotage(kind="flip", share=0.2))`` turns the updates of a fixed fifth of the clients around.
    """

    # "flip" sends g − (x − g), "huge" g + 10⁶ (x − g).
    kind: SabotageKind
    share: float  # of the clients, in [0, 1]; each is drawn independently
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, "Sabotage.share", self.share, "it is a share of clients", "pass 0 <= share <= 1")

    def is_hostile(self, client: int) -> bool:
        """Say whether a client is one of them."""
        source = stream(self.seed, "federated", "sabotage", client)
        return bool(torch.rand((), generator=source, dtype=torch.float64) < self.share)

    def __call__(self, update: Update, params: Vector) -> Update:
        """Return what the client sends in place of its update; a crash raises ``RunError``."""
        if not self.is_hostile(update.client):
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


def extra_names_of(method: Method, params: Vector, buffers: Vector) -> frozenset[str]:
    """Return the names of the vectors that a method's clients send beside their models."""
    fresh = method.client_state(params)
    return frozenset(method.finish(Sent(params, {}, buffers), params, fresh, 1, 1.0, buffers)[1])


def _wrong_shape(
    update: Update, params: Vector, buffers: Vector, partial: bool, extra_names: Collection[str]
) -> tuple[str, str] | None:
    """Names, shapes and kinds of numbers that the server's model does not have."""
    if odd := set(update.extras) ^ set(extra_names):
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


def _bad_numbers(update: Update, positive: Collection[str]) -> tuple[str, str] | None:
    """Numbers that are not finite, and statistics that no rows have: a variance or a count below zero."""
    for part in (update.params, update.buffers, *update.extras.values()):
        for name, value in part.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return "not finite", name
    if not (isinstance(update.weight, int | float) and 0 < update.weight < math.inf):
        return "not finite", f"weight {update.weight!s:.20}"
    for name, value in update.buffers.items():
        if name in positive and bool((value < 0).any()):
            return "impossible", f"{name} is below zero"
    return None


def _wrong_weight(update: Update, weights: Mapping[int, float] | None) -> tuple[str, str] | None:
    """A weight that is not the one that the server knows."""
    known = update.weight if weights is None else weights[update.client]
    return None if update.weight == known else ("weight", f"claims {update.weight:.3g} and counts {known:.3g}")


def heavy_claims(claims: Mapping[int, float], guard: Guard) -> dict[int, float]:
    """Return, in medians, the claims beyond ``Guard.heavy`` medians; of fewer than three claims none."""
    if guard.heavy is None or len(claims) < 3:
        return {}
    median = statistics.median(claims.values())
    return {client: claim / median for client, claim in claims.items() if claim > guard.heavy * median}


def _distance_factors(steps: Sequence[int], momentum: float) -> list[float]:
    """How many times further than the median client each may move, at least 1."""
    distances = [effective_steps(made, momentum) for made in steps]
    # Along bounded gradients a distance grows at most as the sum of the steps. Nothing is taken from who made fewer
    # steps: others' updates may have come to rest.
    usual = statistics.median(distances)
    return [max(distance / usual, 1.0) if usual else 1.0 for distance in distances]


def _outliers(
    updates: Sequence[Update], params: Vector, buffers: Vector, limit: float, factors: Sequence[float], events: int
) -> Iterator[tuple[int, str]]:
    """Clients and details of what lies further than ``limit`` medians from what was sent, in any part that travels."""
    parts = [("update", [_distance(update.params, params) for update in updates])]
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    parts += [(key, [_distance(update.extras[key], zeros) for update in updates]) for key in updates[0].extras]
    for what, lengths in parts:
        # Where most clients sent back what they received, the median is of those that did train.
        median = statistics.median(lengths) or statistics.median([length for length in lengths if length] or [0.0])
        for update, length, factor in zip(updates, lengths, factors, strict=True):
            if length > limit * median * factor:
                yield update.client, f"{length / median:.3g} times the median {what}"
    for name in buffers:
        yield from _buffer_outliers(updates, name, buffers[name], limit, factors, events)


def _buffer_outliers(
    updates: Sequence[Update], name: str, sent: Tensor, limit: float, factors: Sequence[float], events: int
) -> Iterator[tuple[int, str]]:
    """Clients whose buffer of this name lies too far from the one that was sent."""
    lengths = [_distance({name: update.buffers[name]}, {name: sent}) for update in updates]
    median = statistics.median(lengths)
    # Where most clients did not change it there is no median to go by, and counters of clients that keep their own
    # batch norm differ by the rounds they trained in: these are held to a count of events. Not to what the buffer held:
    # that would compound.
    counts = not median or not sent.is_floating_point()
    least = events * sent.numel() ** 0.5 if counts else 0.0
    for update, length, factor in zip(updates, lengths, factors, strict=True):
        if length > limit * max(median * factor, least):
            seen = f"{length / median:.3g} times the median" if median else f"moved by {length:.3g}, unlike the median"
            yield update.client, f"{seen} {name}"


def _distance(params: Vector, base: Vector) -> float:
    return float(norm({name: value.double() - base[name].double() for name, value in params.items()}))
