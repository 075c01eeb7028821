"""The rows of a record: who holds what, what a run will cost, and what it came to.

The price is known from shapes alone, before anything is trained: every draw of a run (who trains in which round, which
blocks a client sends) comes from the seed, so clients, steps and bytes by round are not estimated; clients that fail
are what can change them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sparing.federated import Schedule
from sparing.federated.client.train import Client, buffers_of, client_setup, count_steps, frozen_names, initial_model
from sparing.federated.methods.controls import NormMatched
from sparing.federated.methods.interface import Method, Sent, Vector
from sparing.federated.methods.private import Private, draw_seed
from sparing.federated.methods.secure import SecureSum
from sparing.federated.metrics import bytes_of
from sparing.federated.secure.cost import Answers, bytes_down, bytes_up
from sparing.federated.server.trust import check_root
from sparing.federated.settings import sample_clients
from sparing.federated.splits import Split
from sparing.jobs.federate.engines import Outcome, Setup
from sparing.jobs.federate.inputs import Inputs
from sparing.jobs.federate.settings import Settings
from sparing.jobs.lm.losses import perplexity
from sparing.report.pairs import mcnemar


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
    make_model: Callable[[], nn.Module], method: Method, schedule: Schedule, sizes: Sequence[int], *, seed: int,
    root: Client | None = None,
) -> Price:  # fmt: skip
    """Predict the cost of a run from shapes; what ``simulate`` counts is equal if no client fails."""
    inner = method.method if isinstance(method, NormMatched) else method
    inner.check(schedule)
    setup = client_setup(initial_model(inner, make_model, seed), inner, schedule, seed=seed)
    params: Vector = {name: value.detach() for name, value in setup.params.items()}
    check_root(inner, schedule, root, params)
    kept_back, whole = buffers_of(setup.model), bytes_of(params)
    # Vectors of the model's size that travel beside it, each way: one for SCAFFOLD, none for the others.
    extras = inner.finish(Sent(params, {}, kept_back), params, inner.client_state(params), 1, 1.0, kept_back)[1]
    buffers, beside = bytes_of(kept_back), bytes_of(extras) // max(whole, 1)
    back = bytes_of(setup.returned(kept_back))
    if isinstance(inner, Private | SecureSum):
        inner.check_run(schedule, len(sizes), normed=bool(setup.norms), extras=list(extras), huge=False)
    down, up, up_full, steps, updates = [], [], [], 0, 0
    for number in range(schedule.rounds):
        ids = sample_clients(schedule, len(sizes), number, draw_seed(inner, seed))
        # Which of them answer first, nobody knows: with spare clients means stand for those that do.
        taken = schedule.participants(len(sizes)) if schedule.spare else len(ids)
        share = taken / len(ids) if ids else 1.0
        updates += taken
        # What goes beside the model begins with the first answer, so the first round is sent without it.
        down.append(len(ids) * (whole + buffers + (whole * beside if number else 0)))
        # Participants and blocks are drawn from the seed alone, so the draws of the run are known before it.
        rest = [frozen_names(setup, number, client) for client in ids]
        kept = [whole - bytes_of({name: params[name] for name in names}) for names in rest]
        up.append(round(share * sum(part * (1 + beside) + back for part in kept)))
        up_full.append(taken * (whole * (1 + beside) + back))
        if isinstance(inner, SecureSum):
            everybody = Answers(len(ids), len(ids), taken, taken, taken if inner.signed else 0)
            down[-1] += bytes_down(everybody)
            up[-1] = up_full[-1] = bytes_up(everybody, sum(value.numel() for value in params.values()), inner.bits)
        steps += round(share * sum(count_steps(sizes[client], schedule, normed=bool(setup.norms)) for client in ids))
    count = sum(value.numel() for value in params.values())
    return Price(count, updates, steps, tuple(down), tuple(up), tuple(up_full))


def split_rows(split: Split, rows: Inputs) -> list[dict[str, Any]]:
    """Rows of each class per client; of texts, which have no classes, rows alone."""
    if not rows.classes:
        return [{"client": client, "rows": len(part)} for client, part in enumerate(split.clients)]
    counts = split.counts(rows.targets).tolist()
    names = [f"class_{which}" for which in range(rows.classes)]
    # A class without training rows may have no column in the counts, hence ``strict=False`` below.
    return [
        {"client": client, "rows": sum(one), **dict.fromkeys(names, 0), **dict(zip(names, one, strict=False))}
        for client, one in enumerate(counts)
    ]


def price_rows(label: str, known: Price) -> list[dict[str, Any]]:
    """What a method will send, one row per direction."""
    ways = (("down", known.down, known.down), ("up", known.up, known.up_full))
    return [
        {"method": label, "direction": way, "a_round": sum(each) / len(each), "in_all": sum(each),
         "of_full": sum(each) / sum(full), "updates": known.updates, "steps": known.steps}
        for way, each, full in ways
    ]  # fmt: skip


def method_row(
    label: str,
    method: Method,
    outcome: Outcome,
    known: Price,
    setup: Setup,
    force: float | None,
    held: Mapping[str, float],
) -> dict[str, Any]:
    """What a method reached, beside its prediction."""
    last, rows = outcome.rounds[-1], outcome.rounds
    judged = [row["accuracy"] for row in rows if "accuracy" in row]
    # Tokens of a text depend on each other, so an interval as of rows would be too narrow.
    n, text = len(setup.test.targets), setup.settings.model is not None
    low, high = (None, None) if text else wilson(last["accuracy"], n)
    seconds = [row["seconds"] for row in rows]
    made = [row["steps"] for row in rows]
    return {
        "method": label, "accuracy": last["accuracy"], "accuracy_low": low, "accuracy_high": high, "n": n,
        "last_ten": sum(judged[-10:]) / len(judged[-10:]), "validation_accuracy": held.get("accuracy"),
        "loss": last["loss"], "validation_loss": held.get("loss"),
        **({"perplexity": perplexity(last["loss"])} if text else {}),
        **{name: last.get(name) for name in ("fusion_gap", "ssr_global", "ssr_pairs")},
        "norm": last.get("norm"), "force": force,
        "answered": sum(row["answered"] for row in rows), "predicted_updates": known.updates,
        "steps": None if None in made else sum(made), "predicted_steps": known.steps,
        "bytes_down": sum(row["bytes_down"] for row in rows), "predicted_down": sum(known.down),
        "bytes_up": sum(row["bytes_up"] for row in rows), "predicted_up": sum(known.up),
        # The first round predicts the time: nothing else is known of this machine.
        "seconds": sum(seconds), "predicted_seconds": seconds[0] * len(seconds), "engine": outcome.engine,
        "value": repr(method) if len(repr(method)) < 400 else type(method).__name__,
    }  # fmt: skip


def privacy_row(
    label: str, method: Method, settings: Settings, clients: int, answered: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return what a private run tells about a client, before it or, with the ``answered`` of each round, after."""
    if not isinstance(method, Private):
        return {}
    schedule, delta = settings.training(), settings.private.delta or clients**-1.1
    when, rounds = ("before", schedule.rounds) if answered is None else ("after", len(answered))
    found = method.epsilon(schedule, clients, delta=delta, answered=answered)
    return {
        "method": label, "when": when, "epsilon": found, "delta": delta, "rounds": rounds, "noise": method.noise,
        "drawn": method.per_round, "clients": clients,
    }  # fmt: skip


def pair_rows(right: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Compare every two methods on the same test rows, the better first, by McNemar's exact test."""
    rows = []
    for pair in itertools.combinations(right, 2):
        first, second = sorted(pair, key=lambda name: -int(right[name].sum()))
        found = mcnemar(right[first], right[second])
        rows.append({"first": first, "second": second, "first_only": found.first_only,
                     "second_only": found.second_only, "difference": found.difference, "z": found.z,
                     "p": found.p})  # fmt: skip
    return rows


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share counted in n rows (Wilson 1927).

    Example:
        >>> [round(end, 3) for end in wilson(0.5, 100)]
        [0.404, 0.596]
    """
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    # Unlike the normal interval, this one stays in [0, 1] and has width at shares of 0 and 1.
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)
