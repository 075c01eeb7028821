"""Tables of ``docs/results/composition.md`` from the committed JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.federated.paired import differences, verdict
from benchmarks.marks import marked
from benchmarks.memory_tables import table
from benchmarks.network.predictions import kendall
from benchmarks.valley.numbers import Row, mean
from sparing.report import Record

RESULTS = Path(__file__).parent / "results"
SHARDING, IMPORTANCE = RESULTS / "composition_lisa_sharding.jsonl", RESULTS / "composition_importance.json"
MIB, TERA = 2**20, 1e12
ARMS = ("uniform", "gradient norm", "learned", "learned, not billed")
PAIRS = (("learned", "uniform"), ("learned", "gradient norm"), ("gradient norm", "uniform"),
         ("learned, not billed", "uniform"))  # fmt: skip


def arms() -> list[Row]:
    """Rows of the shaped network, those of plans alone."""
    return [row for row in Record.read(SHARDING).table("arms") if row["arm"].split()[0] != "alone"]


def cells(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Micro-steps and drawn blocks, in the order of the columns."""
    found = {(row["accumulate"], row["active"]) for row in rows}
    return sorted(found, key=lambda cell: (-cell[0], cell[1]))


def title(micros: int, active: int) -> str:
    """Head of a column."""
    return f"s = {micros}, {f'{active} of 16' if active else 'all'}"


def _by_plan(rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    columns, lines = cells(rows), []
    for plan in dict.fromkeys(row["plan"] for row in rows):
        held = {(row["accumulate"], row["active"]): row for row in rows if row["plan"] == plan}
        lines.append([plan, *(cell(held[column]) if column in held else "–" for column in columns)])
    return table(["", *(title(*column) for column in columns)], lines)


def steps() -> str:
    """Seconds of a step by plan, measured with ends, and predicted."""
    return _by_plan(arms(), lambda row: f"{_ends(row, 'seconds')} ({row['predicted']:.2f})")


def _ends(row: Row, name: str, form: str = ".2f") -> str:
    return f"{row[name]:{form}} [{row[f'{name}_low']:{form}}, {row[f'{name}_high']:{form}}]"


def sent() -> str:
    """Bytes that a rank sends in a step, between groups and inside."""
    rows = arms()
    exact = sum(row["bytes_as_formula"] for row in rows)
    text = _by_plan(rows, lambda row: f"{row['payload_inter'] / MIB:.2f} + {row['payload_intra'] / MIB:.2f}")
    return (
        f"{text}\n\nCounted bytes equal the formula, round by round and rank by rank, in {exact} of {len(rows)} rows."
    )


def best() -> str:
    """The best plan of every share, and the one that the library would take."""
    record, lines = Record.read(SHARDING), []
    rows = {(row["accumulate"], row["active"], row["plan"]): row for row in arms()}
    choices = {(row["accumulate"], row["share"]): row for row in record.table("choices")}
    for micros, active in sorted(choices, key=lambda cell: (-cell[0], cell[1])):
        choice, whole = choices[micros, active], choices[micros, 0]
        found = rows[micros, active, choice["best"]]
        plans = [row for (s, share, _), row in rows.items() if (s, share) == (micros, active)]
        tau = kendall([row["seconds"] for row in plans], [row["predicted"] for row in plans], 0.03)
        regret = choice["chosen_seconds"] / choice["best_seconds"] - 1
        blind = choice["chosen_wires_seconds"] / choice["best_seconds"] - 1
        lines.append([
            title(micros, active), choice["best"], _ends(found, "seconds"),
            f"{whole['best_seconds'] / choice['best_seconds']:.1f}×",
            f"{choice['chosen']} ({regret:+.0%})", f"{choice['chosen_wires']} ({blind:+.0%})", f"{tau:.2f}", found["n"],
        ])  # fmt: skip
    head = ["", "best plan", "s per step", "faster than all blocks", "`choose`, told the arithmetic (slower by)",
            "`choose`, wires alone (slower by)", "Kendall's τ, predicted and measured", "n"]  # fmt: skip
    return table(head, lines)


def switch() -> str:
    """What a switch of blocks costs, over all plans."""
    rows, lines = [row for row in arms() if row["active"]], []
    for micros, active in cells(rows):
        of = [row for row in rows if (row["accumulate"], row["active"]) == (micros, active)]
        seconds = [1000 * row["switch"] for row in of]
        worst = max(of, key=lambda row: row["switch"])
        share = median(row["switch"] / row["seconds"] for row in of)
        lines.append([
            title(micros, active), f"{median(seconds):.0f} [{min(seconds):.0f}, {max(seconds):.0f}]", worst["plan"],
            f"{share:.0%}", max(row["switch_payload"] for row in of),
            f"{median(row['switch_inter'] for row in of) / 1024:.1f}",
            f"{median(row['switch_intra'] for row in of) / 1024:.1f}",
        ])  # fmt: skip
    head = ["", "ms, median [least, most] of the plans", "most in", "share of a step, median", "B of payload",
            "KiB out of a group, messages of agreement", "KiB inside"]  # fmt: skip
    return table(head, lines)


def rows_of(name: str) -> list[Row]:
    """Rows of one table of the study of importance."""
    rows = json.loads(IMPORTANCE.read_text())["rows"].values()
    return [row for row in rows if row["table"] == name]


def picked(case: str) -> dict[tuple[str, int], Row]:
    """By arm and seed the run of the rate that the development rows choose."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows_of("runs"):
        key = (row["arm"], row["seed"])
        if row["case"] == case and (key not in found or row["dev"] < found[key]["dev"]):
            found[key] = row
    return found


def importance() -> str:
    """Test loss, compute and seconds of every arm."""
    lines = []
    for case in rows_of("cases"):
        before = [row["test"] for row in rows_of("before") if row["case"] == case["case"]]
        lines.append([f"{case['case']}: before", mean(before, 4, sign=False), "–", "–", "–", "–", len(before)])
        for arm in ARMS:
            of = [row for (name, _), row in picked(case["case"]).items() if name == arm]
            if of:
                rates = ", ".join(f"{rate:g}" for rate in sorted({row["lr"] for row in of}))
                cells = [mean((row["test"] for row in of), 4, sign=False), f"{fmean(r['steps'] for r in of):.0f}"]
                cells += [f"{fmean(row['flops'] for row in of) / TERA:.3f}", f"{median(r['seconds'] for r in of):.1f}"]
                lines.append([f"{case['case']}: {arm}", *cells, rates, len(of)])
    head = ["", "test loss, nat/token", "steps", "TFLOP spent", "CPU s, median", "rates chosen", "n"]
    return table(head, lines)


def contrasts() -> str:
    """Differences of the test loss, seed by seed."""
    lines = []
    for case in rows_of("cases"):
        runs = picked(case["case"])
        for one, other in PAIRS:
            a, b = ({seed: row["test"] for (arm, seed), row in runs.items() if arm == name} for name in (one, other))
            gaps = [1000 * gap for gap in differences(a, b)]
            if gaps:
                lines.append([f"{case['case']}: {one} − {other}", mean(gaps, 1), verdict(gaps), len(gaps)])
    return table(["", "difference of the test loss, 10⁻³ nat/token", "its interval", "n"], lines)


def chances() -> str:
    """What was learned, and how often blocks were drawn."""
    lines = []
    for case in rows_of("cases"):
        runs = picked(case["case"])
        rates = {seed: row["lr"] for (arm, seed), row in runs.items() if arm == "learned"}
        found = [
            row["weights"]
            for row in rows_of("importance")
            if row["case"] == case["case"] and rates.get(row["seed"]) == row["lr"]
        ]
        if found:
            lines.append(
                [f"{case['case']}: learned chance", *(mean(each, 2, sign=False) for each in zip(*found, strict=True))]
            )
        for arm in ARMS[:2]:
            drawn = [row["drawn"] for (name, _), row in runs.items() if name == arm]
            shares = [[count / sum(each) for count in each] for each in drawn]
            if shares:
                cells = (mean(each, 2, sign=False) for each in zip(*shares, strict=True))
                lines.append([f"{case['case']}: drawn by {arm}", *cells])
    width = max(len(line) for line in lines) - 1
    return table(["", *(f"block {at}" for at in range(width))], lines)


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "composition-steps": (SHARDING, steps), "composition-bytes": (SHARDING, sent),
    "composition-best": (SHARDING, best), "composition-switch": (SHARDING, switch),
    "composition-importance": (IMPORTANCE, importance), "composition-contrasts": (IMPORTANCE, contrasts),
    "composition-chances": (IMPORTANCE, chances),
}  # fmt: skip


def filled(page: str) -> str:
    """The page with every table that it has marks for and that was measured."""
    parts = {name: make() for name, (path, make) in TABLES.items() if f"<!-- {name} -->" in page and path.exists()}
    return marked(page, parts)
