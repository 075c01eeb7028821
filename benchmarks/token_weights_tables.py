"""Tables of ``docs/results/hypergradients.md`` on how token weights are learnt: arms, and every pair of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.federated.paired import differences, shown
from benchmarks.memory_tables import table
from benchmarks.token_base import LONGER, SMALL, STORIES, TUNING, Study
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


def rows_of(study: Study) -> dict[str, dict[str, Any]]:
    """Every row of a study's file by its key; none where there is no file yet."""
    path = RESULTS / f"{study.name}.json"
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text())["rows"] if path.is_file() else {}
    return rows


def runs_of(study: Study) -> dict[str, dict[int, dict[str, Any]]]:
    """Rows of a study by arm and seed: without those of tuning, and of seeds that every arm has."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for key, row in rows_of(study).items():
        arm, *_, seed = key.split(" | ")
        if key.count("|") == 1:
            found.setdefault(arm, {})[int(seed)] = row
    whole = set.intersection(*(set(found[arm]) for arm in ("base", *COMPARED)))
    return {arm: {seed: row for seed, row in runs.items() if seed in whole} for arm, runs in found.items()}


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


def arms(runs: Runs) -> str:
    """Every arm, beside uniform weights."""
    lines = []
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


def longer(study: Study) -> str:
    """The learnt arms on the validation streams of the tuning seed: at the start, after their time and after more."""
    rows, lines = rows_of(study), []
    for arm in (one for name in COMPARED[1:] for one in (name, f"own {name}")):
        long = next((row for key, row in rows.items() if key.startswith(f"longer | {arm} ")), None)
        if long is None:
            continue
        at = "" if long["inner"] == rows[f"inner | uniform | {TUNING}"]["lr"] else f" | inner {long['inner']:g}"
        tuned = rows[f"outer | {arm.removeprefix('own ')} | {long['outer']:g}{at}"]
        lines.append([
            label(arm), f"{long['looks'][0]['objective']:.2f}", f"{tuned['learnt']:.2f}", tuned["steps"],
            f"{long['learnt']:.2f}", long["steps"],
        ])  # fmt: skip
    if not lines:
        return ""
    said = f"With {LONGER} times the seconds (lowest objective on the tuning seed's validation streams, one run each):"
    short, long = (f"after {times * study.seconds:g} s" for times in (1, LONGER))
    return f"{said}\n\n{table(['', 'uniform', short, 'outer steps', long, 'outer steps'], lines)}"


def parts() -> dict[str, str]:
    """The tables by their marks."""
    small, stories = runs_of(SMALL), runs_of(STORIES)
    return {
        "token-weights": arms(small), "token-contrasts": pairs(small), "token-longer": longer(SMALL),
        "adaptation": arms(stories), "token-stories": pairs(stories), "token-stories-longer": longer(STORIES),
    }  # fmt: skip
