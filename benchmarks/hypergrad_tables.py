"""Tables of the hypergradient benchmarks in Markdown, from their committed JSON."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import (
    attribution_tables,
    condense_recipe_tables,
    data_selection_tables,
    hypergrad_prices,
    hypergrad_schedules_tables,
    pde_tables,
    token_weights_tables,
)
from benchmarks.marks import marked
from benchmarks.memory_tables import table
from sparing.hypergrad.planning import predict
from sparing.report import Record

RESULTS = Path(__file__).parent / "results"
MIB = 2**20
Row = dict[str, Any]


def ranged(row: Row, column: str, form: str = ".2f") -> str:
    """A number with its least and most, where they are known."""
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    shown = f"{row[column]:{form}}"
    return shown if low is None else f"{shown} [{low:{form}}, {high:{form}}]"


def memory(record: Record) -> str:
    """Peak MiB above the floor, by arm and depth."""
    rows = record.table("memory")
    depths = sorted({row["steps"] for row in rows})
    held = {(row["arm"], row["steps"]): row["peak"] for row in rows}
    arms = dict.fromkeys(row["arm"] for row in rows)
    lines = [[arm, *(f"{held[arm, d] / MIB:.0f}" if (arm, d) in held else "–" for d in depths)] for arm in arms]
    return table(["MiB at T =", *depths], lines)


def defaults(record: Record) -> str:
    """Resident set of a short and a long run in turn, where the allocator is left alone."""
    held = {(row["pair"], row["steps"]): row["process"] / MIB for row in record.table("defaults")}
    short, long = sorted({steps for _, steps in held})
    pairs = [(held[pair, short], held[pair, long]) for pair in sorted({pair for pair, _ in held})]
    lines = [[at, f"{one:.0f}", f"{two:.0f}", f"{two / one:.2f}×"] for at, (one, two) in enumerate(pairs, start=1)]
    return table(["pair", f"MiB at T = {short}", f"MiB at T = {long}", "ratio"], lines)


def seconds(record: Record) -> str:
    """CPU seconds of one hypergradient, against a plain run and against higher."""
    lines = [
        [
            f"{row['arm']}, T = {row['steps']}", f"{row['seconds']:.2f}", ranged(row, "against_plain"),
            ranged(row, "against_higher") if "against_higher" in row else "–",
            f"{row['cosine']:.3f}" if row.get("cosine") is not None else "–", row["n"],
        ]
        for row in record.table("time")
    ]  # fmt: skip
    return table(["", "CPU s", "× plain run", "× higher", "cosine to exact", "n"], lines)


def goals(record: Record) -> str:
    """Goals and whether they are met."""
    lines = [
        [row["goal"], f"{row['measured']:.2f}", f"{row['at_most']:g}", "met" if row["met"] else "missed"]
        for row in record.table("goals")
    ]
    return table(["goal", "measured", "at most", ""], lines)


def ranks(record: Record) -> str:
    """Wall seconds over one and two processes."""
    lines = [
        [
            row["divided"],
            row["processes"],
            ranged(row, "seconds", ".1f"),
            f"{row['against_one']:.2f}×",
            f"{row['difference']:.1g}",
            row["n"],
        ]
        for row in record.table("ranks")
    ]
    return table(["divided", "processes", "wall s", "speed-up", "relative difference", "n"], lines)


def cosines(record: Record) -> str:
    """Best mean cosine of each family at each budget, by problem."""
    rows = record.table("budgets")
    budgets = sorted({row["budget"] for row in rows})
    best = {(row["problem"], row["family"], row["budget"]): row for row in rows}
    lines = []
    for problem, family in dict.fromkeys((row["problem"], row["family"]) for row in rows):
        cells = [ranged(best[problem, family, b], "cosine") if (problem, family, b) in best else "–" for b in budgets]
        lines.append([f"{problem}: {family}", *cells])
    return table(["cosine at a budget of", *(f"{b:g}× plain" for b in budgets)], lines)


def winners(record: Record) -> str:
    """Our best against the paper's methods, at each budget."""
    lines = []
    for row in record.table("goals"):
        ours = "–" if row["our_cosine"] is None else f"{row['ours']} {row['our_cosine']:.3f}"
        theirs = "–" if row["paper_cosine"] is None else f"{row['paper']} {row['paper_cosine']:.3f}"
        ratio = row.get("psi_over_phi")
        shown = f"{ratio:.0f}×" if ratio else "–"
        lines.append([f"{row['problem']}, {row['budget']:g}×", ours, theirs, "yes" if row["met"] else "no", shown])
    head = [
        "problem, budget",
        "best of the others",
        "best of truncation, Hessian-free, Neumann and (FG)²U",
        "others best or tied",
        "ψ over φ",
    ]
    return table(head, lines)


def bottleneck(record: Record) -> str:
    """ψ against φ at equal directions."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in record.table("runs"):
        if row["problem"] == "token weights":
            found[row["family"], row["dial"]].append(row["cosine"])
    lines = []
    for row in record.table("bottleneck"):
        cells = [
            f"{row[space]:.{digits}f} [{min(scores):.{digits}f}, {max(scores):.{digits}f}]".replace("-", "−")
            for space, family, digits in (("psi", "(FG)²U", 2), ("phi", "(FG)²U in φ", 4))
            if (scores := found[family, row["directions"]])
        ]
        # scattered around zero in ψ, a ratio of means says nothing
        told = min(found["(FG)²U", row["directions"]]) > 0
        ratio = f"{row['psi_over_phi']:.1f}×" if told else "not told apart from 0"
        lines.append([row["directions"], *cells, ratio, len(found["(FG)²U", row["directions"]])])
    return table(["directions", "cosine in ψ", "cosine in φ", "ratio", "n"], lines)


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Mean ± standard deviation and n."""
    if not values:
        return "–"
    mean = statistics.mean(values)
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean:{form}}{deviation} (n={len(values)})"


def condensation(document: dict[str, Any]) -> str:
    """Accuracy by method and images per class, beside the paper's."""
    rows = document["rows"]
    lines = []
    for key, row in rows.items():
        if not key.startswith("length "):
            continue
        _, count, method = key.split(" ", 2)
        runs = [r for k, r in rows.items() if k.startswith(f"run {count} {method} ")]
        scores = [run["accuracy"] for run in runs if "accuracy" in run]
        failed = len(runs) - len(scores)
        title = next((run["method"] for run in runs if "method" in run), method)
        paper = document["paper"].get(f"mnist {count}", {}).get(title)
        rate = next((f"{run['outer_lr']:g}" for run in runs if "outer_lr" in run), "–")
        lines.append([
            f"{title}, {count} a class", spread(scores) + (f", {failed} failed" if failed else ""), rate, row["steps"],
            f"{row['peak'] / MIB:.0f}", _paper(paper),
        ])  # fmt: skip
    for count in (case["per_class"] for case in document["cases"]):
        real = rows[f"start {count}"]["real images"]
        lines.append([f"as many real images, one draw, {count} a class", spread(real), *["–"] * 4])
    return table(["accuracy, %", "ours", "outer rate", "outer steps", "MiB a step", "paper, its size"], lines)


def _paper(found: Any) -> str:
    if isinstance(found, int | float):
        return f"{found:.2f}"
    return f"{found[0]:.2f} ± {found[1]:.2f}" if found else "–"


def token_cosines(document: dict[str, Any]) -> str:
    """Cosine to the exact hypergradient of directions in ψ and in φ, on the language model."""
    rows = [row for row in document["rows"].values() if row["table"] == "cosine"]
    lines = [
        [row["seed"], row["tokens"], row["parameters"], f"{row['psi_cosine']:.3f}", f"{row['phi_cosine']:.4f}"]
        for row in rows
    ]
    for name, middle in (("mean", statistics.mean), ("root mean square", _rms)):
        cells = [f"{middle([row[f'{space}_cosine'] for row in rows]):.4f}" for space in ("psi", "phi")]
        lines.append([name, "", "", *cells])
    return table(["seed", "tokens n", "weights N", "cosine in ψ, b = 4", "cosine in φ, b = 4"], lines)


def _rms(values: Sequence[float]) -> float:
    return statistics.mean(value * value for value in values) ** 0.5


def equations(document: dict[str, Any]) -> str:
    """Errors of coefficient and solution, beside the paper's."""
    tables = document["tables"]
    paper = {(row["equation"], row["method"]): row for row in tables["paper"]}
    kinds = {row["name"]: (row["equation"], row["method"]) for row in tables["runs"]}
    lines = []
    for row in tables["summary"]:
        theirs = None if "field" in row["name"] else paper.get(kinds[row["name"]])
        cells = [_error(row, "coefficient_error"), _error(row, "solution_error"), f"{row['seconds']:.0f}", row["n"]]
        printed = [_error(theirs, name) if theirs else "–" for name in ("coefficient_error", "solution_error")]
        lines.append([row["name"], *cells, *printed])
    return table(["", "ε of ν", "ε of u", "CPU s", "n", "ε of ν, paper", "ε of u, paper"], lines)


def _error(row: Row, name: str) -> str:
    deviation = row.get(f"{name}_sd")
    return f"{row[name]:.2g}" + (f" ± {deviation:.1g}" if deviation is not None else "")


def replays(document: dict[str, Any]) -> str:
    """CPU seconds with all comparisons over those without."""
    rows = document["tables"]["replays"]
    lines = [[row["method"], f"{row['seconds']:.2f}", ranged(row, "ratio", ".3f"), row["n"]] for row in rows]
    return table(["", "CPU s", "ratio", "pairs"], lines)


def small(document: Mapping[str, Any]) -> str:
    """A step of a small problem in forward mode, both ways, and in reverse."""
    found = {tuple(key.split("; ")): taken for key, taken in document["rounds"].items()}
    arms, places = dict.fromkeys(key[0] for key in found), dict.fromkeys(key[1:] for key in found)
    lines = [
        [", ".join(place), *(_spread([1e3 * one for one in found[arm, *place]]) for arm in arms)] for place in places
    ]
    return table(["ms a step", *arms], lines)


def prices(document: Mapping[str, Any]) -> str:
    """What pieces of a hypergradient take in gradient steps, and what ``predict`` and ``choose`` take them for."""
    held = [predict.PULL, predict.PRODUCT, *(predict.direction(count) for count in hypergrad_prices.DIRECTIONS)]
    lines = []
    for net, rounds in document["rounds"].items():
        found = [hypergrad_prices.prices(taken) for taken in rounds]
        lines.append([net, *(_spread([one[piece] for one in found]) for piece in found[0]), len(found)])
        scale = statistics.median(one["pull"] for one in found) / predict.PULL
        lines.append([f"{net.split(',')[0].split()[0]}: `choose`", *(f"{scale * one:.2f}" for one in held), "–"])
    directions = [f"a direction, b = {count}" for count in hypergrad_prices.DIRECTIONS]
    return table(
        ["gradient steps", "a pull", "a product", *directions, "n"],
        [["`predict`", *(f"{one:g}" for one in held), "–"], *lines],
    )


def mixed(document: Mapping[str, Any]) -> str:
    """Ways to pull a cotangent through a step: bytes, and seconds over those of reverse over reverse round by round."""
    lines = []
    for net, found in document["nets"].items():
        first = next(iter(found["ways"]))
        for way, row in found["ways"].items():
            over = [taken[way] / taken[first] for taken in found["rounds"]]
            share = row["bytes"] / found["ways"][first]["bytes"]
            apart = f"{row['apart']:.0e}" if row.get("apart") else "–"
            seconds = _spread(over) if way != first else "1.00"
            lines.append([f"{net}: {way}", f"{row['bytes'] / MIB:.1f}", f"{share:.2f}", seconds, apart, len(over)])
    return table(["", "MiB", "bytes, ratio", "CPU seconds, ratio", "relative difference", "n"], lines)


def offload(document: Mapping[str, Any]) -> str:
    """Graphs and checkpoints in memory and in a file: bytes, CPU seconds and those on the wall."""
    lines = []
    for steps, cell in document["cells"].items():
        for arm, held in cell["held"].items():
            cpu, wall = ([taken[arm][kind] for taken in cell["rounds"]] for kind in ("cpu", "wall"))
            file = f"{held['file'] / MIB:.0f}" if held["file"] else "–"
            lines.append([
                f"{arm}, T = {steps}", f"{held['bytes'] / MIB:.0f}", file, _spread(cpu), _spread(wall), len(cpu),
            ])  # fmt: skip
    return table(["", "MiB", "MiB in the file", "CPU s", "s on the wall", "n"], lines)


def many(document: Mapping[str, Any]) -> str:
    """Full reverse on nets of many small tensors: seconds over those of higher round by round, and operations."""
    lines, cells = [], {tuple(key.split("; ")[:2]): cell for key, cell in document["cells"].items()}
    for net, optimizer in product(("ResNet", "LSTM", "GPT-2 blocks", "perceptron"), ("SGD", "Adam")):
        cell = cells[net, optimizer]
        low, middle, high = cell["against_higher"]["Reverse"]
        goal = 1.0 if net == "perceptron" else 0.8
        counts = [sum(cell["operations"][arm].values()) for arm in ("Reverse", "higher")]
        lines.append([
            f"{net}, {'momentum' if optimizer == 'SGD' else optimizer}", f"{middle:.2f} [{low:.2f}, {high:.2f}]",
            f"{cell['against_higher']['Reverse, unpacked'][1]:.2f}", *(f"{count:,.0f}" for count in counts),
            f"{goal:g}: {'met' if middle <= goal else 'missed'}", len(cell["seconds"]["Reverse"]),
        ])  # fmt: skip
    head = ["net, optimizer", "seconds over higher's", "without packing", "operations a step", "of higher", "goal", "n"]
    return table(head, lines)


def _spread(taken: Sequence[float]) -> str:
    return f"{statistics.median(taken):.2f} [{min(taken):.2f}, {max(taken):.2f}]"


def filled(page: str) -> str:
    """The page of hypergradient results, every table made anew."""
    cost, near = (Record.read(RESULTS / f"hypergrad_{name}.jsonl") for name in ("cost", "cosine"))
    condensed, adapted, inverted = (
        json.loads((RESULTS / f"{name}_table.json").read_text()) for name in ("condense", "adapt", "pde")
    )
    held, tiny, tensors = (
        json.loads((RESULTS / f"hypergrad_{name}.json").read_text()) for name in ("replays", "small", "many")
    )
    pieces, ways, files = (
        json.loads((RESULTS / f"hypergrad_{name}.json").read_text()) for name in ("prices", "mixed", "offload")
    )
    spread_out = Record.read(RESULTS / "hypergrad_ranks.jsonl")
    return marked(page, {
        "ranks": ranks(spread_out), "replays": replays(held), "small": small(tiny), "many": many(tensors),
        "prices": prices(pieces), "mixed": mixed(ways),
        "offload": offload(files),
        "memory": memory(cost), "defaults": defaults(cost), "seconds": seconds(cost), "goals": goals(cost),
        "cosines": cosines(near),
        "winners": winners(near), "bottleneck": bottleneck(near), "condensation": condensation(condensed),
        "tokens": token_cosines(adapted), "equations": equations(inverted),
        "fields": pde_tables.fields(), "priors": pde_tables.priors(), "bars": pde_tables.bars(),
        "plane": pde_tables.plane(),
        "attribution": attribution_tables.ranks(), "agreement": attribution_tables.agreement(),
        "attribution-costs": attribution_tables.costs(), "selection": data_selection_tables.overview(),
        "selection-smooth": data_selection_tables.smooth(), "selection-all": data_selection_tables.every(),
        "row-weights": data_selection_tables.weights(),
        **condense_recipe_tables.parts(),
        "schedules": hypergrad_schedules_tables.ends(), **token_weights_tables.parts(),
    })  # fmt: skip
