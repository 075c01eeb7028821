"""Tables of "A hundred rounds" of ``docs/results/federated.md`` from ``federated_long.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.federated import personal
from benchmarks.federated.arms import MATCHED, Setting, Sweep
from benchmarks.federated.cases import Case
from benchmarks.federated.long import DEEP, ORDER, RESIDUAL, arms_of, first_settings, tuned
from benchmarks.federated.paired import differences, shown, verdict
from benchmarks.federated.store import Store
from benchmarks.federated_tables import NAMES
from benchmarks.marks import marked
from benchmarks.memory_tables import table
from benchmarks.valley.numbers import mean

LABELS = {**NAMES, "feddyn, by rows": "FedDyn by rows", "fednova": "FedNova", "fedyogi": "FedYogi"}
PAIRS = (
    ("fedsign", "fedavg, same rate"), ("fedavg, grown", "fedavg, same rate"), ("fedsign, held", "fedavg, same rate"),
    ("fedsign", "fedavg, grown"), ("feddyn, by rows", "feddyn"),
)  # fmt: skip
OWN = {"tuned": "FedAvg, tuned on the client's rows", "ditto": "Ditto", "fedavg": "FedAvg", "alone": "alone"}
SEEDS = range(100)
"""Seeds that may be there."""


def _sweep(store: Store, case: Case, arm: str) -> Sweep | None:
    """What was tried of a method; None if nothing was."""
    arm = "fedsign" if arm in MATCHED else arm
    first = (f"tune, {case.name}, {arm}, {setting.label}" for setting in first_settings(arm))
    return tuned(store, case, arm, measure=False) if any(key in store.rows for key in first) else None


def _chosen(store: Store, case: Case, arm: str) -> Setting | None:
    """What a method chose, once its sweep is closed."""
    found = _sweep(store, case, arm)
    return None if found is None or found.open else found.best


def _by_seed(store: Store, case: Case, alpha: float, arm: str, what: str) -> dict[int, float]:
    """A number of a method's test runs at the setting that it chose, by seed; shares in points."""
    setting = _chosen(store, case, arm)
    if setting is None:
        return {}
    keys = {seed: f"{case.name}, {alpha:g}, {seed}, {arm}, {setting.label}" for seed in SEEDS}
    scale = 100 if what.startswith("accuracy") else 1
    return {
        seed: scale * float(store.rows[key][what])
        for seed, key in keys.items()
        if key in store.rows and what in store.rows[key]
    }


def tuning() -> str:
    """What each method chose, and whether its best lies inside what was tried."""
    store, lines = Store("long"), []
    for case in (DEEP, RESIDUAL):
        for arm in case.methods:
            found = _sweep(store, case, arm)
            if found is None:
                continue
            best, untried = found.best, ", ".join(one.label for one in found.open)
            lies = f"at the edge: {untried} untried" if found.open else "inside"
            strength = "–" if best.strength is None else best.strength
            cells = [f"{best.lr:g}", strength, f"{100 * found.scores[best]:.1f}", len(found.scores), lies]
            lines.append([f"{case.name}: {LABELS[arm]}", *cells])
    return table(["", "rate", "strength", "validation accuracy, %", "runs", "its best lies"], lines)


def accuracy() -> str:
    """Accuracy at the end and over the whole run, and less FedAvg's on the same seeds."""
    store, lines = Store("long"), []
    for case, alpha in ORDER:
        base = {what: _by_seed(store, case, alpha, "fedavg", what) for what in ("accuracy", "accuracy_run")}
        for arm in arms_of(case):
            of = {what: _by_seed(store, case, alpha, arm, what) for what in (*base, "growth")}
            if not of["accuracy"]:
                continue
            cells: list[Any] = [mean(of["accuracy"].values(), 1, sign=False)]
            for what, theirs in base.items():
                cells.append("–" if arm == "fedavg" else shown(differences(of[what], theirs)))
            growth = mean(of["growth"].values(), 2, sign=False)
            whole = mean(of["accuracy_run"].values(), 1, sign=False)
            lines.append(
                [f"{case.name}, α = {alpha:g}: {LABELS[arm]}", cells[0], cells[1], whole, cells[2], growth,
                 len(of["accuracy"])]
            )  # fmt: skip
    head = ["", "last ten rounds, %", "less FedAvg", "whole run, %", "less FedAvg", "‖θ_T‖/‖θ₀‖", "n"]
    return table(head, lines)


def questions() -> str:
    """What FedSign's gain is made of, and what FedDyn's strengths by rows change."""
    store, lines = Store("long"), []
    for case, alpha in ORDER:
        for a, b in PAIRS:
            both = [
                differences(*(_by_seed(store, case, alpha, arm, what) for arm in (a, b)))
                for what in ("accuracy", "accuracy_run")
            ]
            if both[0]:
                name = f"{case.name}, α = {alpha:g}: {LABELS[a]} − {LABELS[b]}"
                lines.append([name, shown(both[0]), verdict(both[0]), shown(both[1]), verdict(both[1]), len(both[0])])
    head = ["points of accuracy", "last ten rounds", "its interval", "whole run", "its interval", "n"]
    return table(head, lines)


def own() -> str:
    """Accuracy of clients' own models on their own rows."""
    store, lines = Store("long"), []
    setting = _chosen(store, DEEP, "fedavg")
    if setting is None:
        return table(["own test rows", "accuracy, %"], [])
    for case, alpha in ORDER:
        of: Mapping[str, dict[int, float]] = {
            arm: {
                seed: 100 * float(store.rows[key]["accuracy"])
                for seed in SEEDS
                if (key := f"{case.name}, {alpha:g}, {seed}, own, {arm}, {setting.label}") in store.rows
            }
            for arm in OWN
        }
        for arm, values in of.items():
            if values:
                less = "–" if arm == "tuned" else shown(differences(values, of["tuned"]))
                name = f"{case.name}, α = {alpha:g}: {OWN[arm]}"
                told = _own_setting(store, case, arm, setting)
                lines.append([name, mean(values.values(), 1, sign=False), less, told, len(values)])
    return table(["own test rows", "accuracy, %", "less tuned", "chosen", "n"], lines)


def _own_setting(store: Store, case: Case, arm: str, setting: Setting) -> str:
    """What was chosen for clients' own models."""
    chosen = personal.chosen(store, case, setting, measure=False)
    rate, epochs = chosen["tuned"]
    known = {"tuned": f"rate {rate:g}, {epochs} epochs", "ditto": f"λ = {chosen['ditto']:g}"}
    known["alone"] = f"rate {chosen['alone']:g}"
    return known.get(arm, "–")


TABLES: dict[str, Callable[[], str]] = {
    "federated-long-tuning": tuning, "federated-long": accuracy, "federated-long-questions": questions,
    "federated-long-own": own,
}  # fmt: skip


def filled(page: str) -> str:
    """The page with every table that it has marks for."""
    return marked(page, {name: make() for name, make in TABLES.items() if f"<!-- {name} -->" in page})
