"""The price of a run from shapes alone, before anything is trained: clients, steps, and bytes on the wire by round.

Every draw of a run (who trains in which round, which blocks a client sends) comes from the seed, so bytes and steps
are not estimated but known; clients that fail are what can change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from sparing.federated import Schedule
from sparing.federated.controls import NormMatched
from sparing.federated.loop import buffers_of, client_setup, count_steps, initial_model
from sparing.federated.methods import Method, Sent, Vector
from sparing.federated.metrics import bytes_of
from sparing.federated.sampling import frozen_names
from sparing.federated.settings import sample_clients


@dataclass(frozen=True, slots=True)
class Price:
    """What a run will take."""

    parameters: int  # parameters that train (count)
    updates: int  # local trainings, of one client in one round (count)
    steps: int  # optimizer steps of all of them (count)
    down: tuple[int, ...]  # bytes sent to the clients of each round
    up: tuple[int, ...]  # bytes that they send back
    up_full: tuple[int, ...]  # bytes that they would send back if every client sent every block


def price(
    make_model: Callable[[], nn.Module], method: Method, schedule: Schedule, sizes: Sequence[int], *, seed: int
) -> Price:
    """Predict the cost of a run from shapes; what ``simulate`` counts is equal if no client fails."""
    inner = method.method if isinstance(method, NormMatched) else method
    inner.check(schedule)
    setup = client_setup(initial_model(inner, make_model, seed), inner, schedule, seed=seed)
    params: Vector = {name: value.detach() for name, value in setup.params.items()}
    buffers, beside = bytes_of(buffers_of(setup.model)), _beside(inner, params, buffers_of(setup.model))
    whole = bytes_of(params)
    down, up, up_full, steps = [], [], [], 0
    for number in range(schedule.rounds):
        ids = sample_clients(schedule, len(sizes), number, seed)
        # What goes beside the model begins with the first answer, so the first round is sent without it.
        down.append(len(ids) * (whole + buffers + (whole * beside if number else 0)))
        # Participants and blocks are drawn from the seed alone, so the draws of the run are known before it.
        rest = [frozen_names(setup.body, schedule, number, client, seed) for client in ids]
        kept = [whole - bytes_of({name: params[name] for name in names}) for names in rest]
        up.append(sum(part * (1 + beside) + buffers for part in kept))
        up_full.append(len(ids) * (whole * (1 + beside) + buffers))
        steps += sum(count_steps(sizes[client], schedule, normed=bool(setup.norms)) for client in ids)
    count = sum(value.numel() for value in params.values())
    return Price(count, len(down) * schedule.participants(len(sizes)), steps, tuple(down), tuple(up), tuple(up_full))


def _beside(method: Method, params: Vector, buffers: Vector) -> int:
    """How many vectors of the model's size travel beside it, each way: one for SCAFFOLD, none for the others."""
    sent = Sent(params, {}, buffers)
    extras = method.finish(sent, params, method.client_state(params), 1, 1.0, buffers)[1]
    return bytes_of(extras) // max(bytes_of(params), 1)
