"""Tables of ``docs/results/hypergradients.md`` on how token weights are learnt: arms, and every pair of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.federated.paired import differences, shown
from benchmarks.memory_tables import table
from benchmarks.valley.numbers import T95, bounds, mean

RESULTS = Path(__file__).parent / "results"
LABELS = {
    "base": "base, no adapting", "uniform": "uniform", "names": "names and numbers only",
    "random": "drawn at random, same mean",
    "rgu": "RGU, 6 documents", "checkpointed": "checkpointed", "fg-psi": "(FG)²U in ψ", "fg-phi": "(FG)²U in φ",
}  # fmt: skip
OWN = ", own inner rate"
"""Behind the label of an arm that ran again at an inner rate of its own, other than that of uniform weights."""
COMPARED = ("uniform", "rgu", "checkpointed", "fg-psi", "fg-phi")
"""Every pair of these is a contrast of the goal; controls are compared with uniform weights alone."""
EVEN = 0.1
"""Two arms are even where the whole interval is within this (nat/token)."""

Runs = Mapping[str, Mapping[int, Mapping[str, Any]]]  # row by arm and seed


def label(arm: str) -> str:
    """What a table calls an arm."""
    return LABELS[arm.removeprefix("own ")] + OWN * arm.startswith("own ")


def at_best(runs: Runs) -> list[str]:
    """The arms of the contrasts, each at its own inner rate if it has one and all its seeds are there."""
    return [own if len(runs.get(own := f"own {arm}", ())) == len(runs[arm]) else arm for arm in COMPARED]


def verdict(values: Sequence[float]) -> str:
    """Which of two arms has the lower loss, by the 95 % t-interval of a − b; or that they are even; or neither.

    Example:
        >>> verdict([-0.2, -0.3, -0.25]), verdict([0.01, -0.01, 0.0]), verdict([-1.0, 1.0, 0.0])
        ('first lower', 'even', 'open')
    """
    if len(values) not in T95:
        return "open"
    low, high = bounds(values)
    if low > 0 or high < 0:
        side = "first lower" if high < 0 else "second lower"
        return f"{side}, within ±{EVEN}" if max(-low, high) <= EVEN else side
    return "even" if max(-low, high) <= EVEN else "open"


def of_seeds(rows: Iterable[Mapping[str, Any]], value: Any) -> dict[int, float]:
    """A number of each run by its seed."""
    return {int(row["seed"]): value(row) for row in rows}


def small_runs() -> dict[str, dict[int, dict[str, Any]]]:
    """Rows of the small model by arm and seed: without those of tuning, and of seeds that every arm has."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for key, row in json.loads((RESULTS / "token_weights.json").read_text())["rows"].items():
        arm, *_, seed = key.split(" | ")
        if key.count("|") == 1:
            found.setdefault(arm, {})[int(seed)] = row
    whole = set.intersection(*(set(found[arm]) for arm in ("base", *COMPARED)))
    return {arm: {seed: row for seed, row in runs.items() if seed in whole} for arm, runs in found.items()}


def stories_runs(path: Path = RESULTS / "adapt_table.json") -> dict[str, dict[int, dict[str, Any]]]:
    """Rows of stories15M by arm and seed: of seeds that every arm has; where the start was best, those of it."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in json.loads(path.read_text())["rows"].values():
        if row["table"] == "answers":
            found.setdefault(row["method"], {})[row["seed"]] = row
    whole = set.intersection(*(set(runs) for runs in found.values()))
    return {arm: {seed: or_start(runs[seed], found["uniform"][seed]) for seed in sorted(whole)}
            for arm, runs in found.items()}  # fmt: skip


def or_start(row: dict[str, Any], uniform: Mapping[str, Any]) -> dict[str, Any]:
    """What an arm ends with: uniform weights if these, each at its best rate of adapting, are better on validation."""
    if "inner_lr" not in row:
        return row
    # a file holds no number that is not finite
    ends = [[one["objective"] for one in each["sweep"] if one["objective"] is not None] for each in (row, uniform)]
    learnt, start = (min(each, default=math.inf) for each in ends)
    if learnt < start:
        return row | {"kept": row["steps"]}
    return row | {name: uniform[name] for name in ("lr", "nll", "em", "f1", "kl")} | {"kept": 0}


def stories() -> str:
    """Every arm on stories15M, beside uniform weights."""
    runs, lines = stories_runs(), []
    for arm in (name for name in LABELS if name in runs):
        rows = list(runs[arm].values())
        less = "–" if arm == "uniform" else shown(differences(nll(runs, arm), nll(runs, "uniform")), 2)
        parts = [
            f"{fmean(row[name] for row in rows):{form}}" for name, form in (("em", ".1f"), ("f1", ".1f"), ("kl", ".2f"))
        ]
        learnt = "kept" in rows[0]
        lines.append([
            label(arm), mean(nll(runs, arm).values(), 2, sign=False), less, *parts, between(rows, "lr"),
            *(between(rows, name) for name in ("inner_lr", "outer_lr")), between(rows, "steps") if learnt else "–",
            f"{sum(row['kept'] == 0 for row in rows)} of {len(rows)}" if learnt else "–",
        ])  # fmt: skip
    head = [
        "weights", "answer loss, nat/token", "minus uniform", "exact match, %", "F1, %", "KL, nat", "rate of adapting",
        "inner rate", "outer rate", "outer steps", "ties with the start",
    ]  # fmt: skip
    asked = sum(row["questions"] for row in runs["base"].values())
    return f"{table(head, lines).rstrip()}\n\n{asked} questions over {len(runs['base'])} seeds."


def between(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Lowest and highest of a column, where the rows have it."""
    found = sorted(row[name] for row in rows if name in row)
    ends = dict.fromkeys(f"{end:g}" for end in found[:: max(1, len(found) - 1)])  # one number where all are alike
    return " to ".join(ends) or "–"


def nll(runs: Runs, arm: str) -> dict[int, float]:
    """Answer loss by seed (nat/token)."""
    return {seed: row["nll"] for seed, row in runs[arm].items()}


def part(runs: Runs, arm: str, *, wiki: bool) -> dict[int, float]:
    """Answer loss by seed on the questions of enwik8 or of the books (nat/token)."""
    found = {}
    for seed, row in runs[arm].items():
        shared = runs["base"][seed]
        chosen = slice(0, shared["wiki"]) if wiki else slice(shared["wiki"], None)
        found[seed] = sum(row["losses"][chosen]) / sum(shared["tokens"][chosen])
    return found


def arms() -> str:
    """Every arm on the small model, beside uniform weights."""
    runs, lines = small_runs(), []
    for arm in (one for name in LABELS for one in (name, f"own {name}") if one in runs):
        rows = list(runs[arm].values())
        less = [
            "–" if arm == "uniform" else shown(differences(mine(arm), mine("uniform")), 2)
            for mine in (
                lambda name: nll(runs, name),
                lambda name: part(runs, name, wiki=True),
                lambda name: part(runs, name, wiki=False),
            )
        ]
        learnt = "steps" in rows[0]
        lines.append([
            label(arm), mean(nll(runs, arm).values(), 2, sign=False), *less, f"{fmean(row['kl'] for row in rows):.2f}",
            between(rows, "lr"), *(f"{rows[0][name]:g}" if learnt else "–" for name in ("inner", "outer")),
            between(rows, "steps"),
            f"{sum(row['kept'] == 0 for row in rows)} of {len(rows)}" if learnt else "–",
        ])  # fmt: skip
    head = [
        "weights", "answer loss, nat/token", "minus uniform", "on enwik8", "on the books", "KL, nat",
        "rate of adapting", "inner rate", "outer rate", "outer steps", "ties with the start",
    ]  # fmt: skip
    shared = list(runs["base"].values())
    asked, tokens = (sum(len(row["tokens"]) for row in shared), sum(sum(row["tokens"]) for row in shared))
    documents = sum(row["documents"] for row in shared)
    counted = (
        f"{asked:,} questions, {tokens:,} answer tokens and {documents:,} test documents over {len(shared)} seeds."
    )
    return f"{table(head, lines).rstrip()}\n\n{counted}"


def pairs(runs: Runs) -> str:
    """Every contrast: difference of answer losses over the same questions, interval over seeds, verdict."""
    lines, settled = [], 0
    for first, second in combinations(at_best(runs), 2):
        found = differences(nll(runs, first), nll(runs, second))
        lines.append([f"{label(first)} − {label(second)}", shown(found, 2), verdict(found), len(found)])
        settled += verdict(found) != "open"
    made = table(["contrast", "difference, nat/token", "verdict", "seeds"], lines)
    return f"{made.rstrip()}\n\n{settled} of {len(lines)} contrasts are settled."


def longer() -> str:
    """The learnt arms on the validation streams of the tuning seed: at the start, after their time and after more."""
    rows = json.loads((RESULTS / "token_weights.json").read_text())["rows"]
    lines = []
    for arm in (one for name in COMPARED[1:] for one in (name, f"own {name}")):
        long = next((row for key, row in rows.items() if key.startswith(f"longer | {arm} ")), None)
        if long is None:
            continue
        at = f" | inner {long['inner']:g}" if arm.startswith("own ") else ""
        tuned = rows[f"outer | {arm.removeprefix('own ')} | {long['outer']:g}{at}"]
        lines.append([
            label(arm), f"{long['looks'][0]['objective']:.2f}", f"{tuned['learnt']:.2f}", tuned["steps"],
            f"{long['learnt']:.2f}", long["steps"],
        ])  # fmt: skip
    if not lines:
        return ""
    said = "With four times the seconds, on the validation streams of the tuning seed (one run each; lowest objective):"
    return f"{said}\n\n{table(['', 'uniform', 'after 15 s', 'outer steps', 'after 60 s', 'outer steps'], lines)}"


def parts() -> dict[str, str]:
    """The tables by their marks."""
    return {
        "token-weights": arms(), "token-contrasts": pairs(small_runs()), "token-longer": longer(),
        "adaptation": stories(), "token-stories": pairs(stories_runs()),
    }  # fmt: skip
