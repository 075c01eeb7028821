"""Tables of ``docs/results/sharding.md``: from the formulas, and from the committed records of the shaped network."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.marks import marked
from benchmarks.memory_tables import table
from benchmarks.network import bars, engines, local_loss, lowbit_loss
from benchmarks.network.cells import Cell
from benchmarks.network.labour import spent
from benchmarks.network.lowbit_loss import bigram
from benchmarks.network.machines import tiers, unequal, wires
from benchmarks.network.paired_losses import PairedLosses
from benchmarks.network.predictions import by_cell, judged, predicted
from benchmarks.network.published import published
from benchmarks.network.ties import judged as ties_judged
from sparing.report import Record
from sparing.sharding import Plan, Topology, Workload, effective, predict

RESULTS = Path(__file__).parent / "results"
PAPER = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")
"""The paper's four machines of eight GPUs, with the bandwidths it measured."""

TIE = 0.03
"""Times within this share of each other count as equal."""

Row = Mapping[str, Any]


def paper() -> str:
    """Communication and static memory of every plan by the paper's guideline, reconstructed: its tables are images."""
    settings = [(7e9, 1.0), (7e9, 1 / 16), (65e9, 1.0), (65e9, 1 / 16), (65e9, 3 / 1000)]
    works = [Workload(params=size, trainable=size * share, accumulate=10) for size, share in settings]
    lines = []
    for plan in effective():
        prices = [predict(work, PAPER, plan) for work in works]
        cells = (f"{price.paper_seconds:.3g} s, {price.static / 1e9:.3g} GB" for price in prices)
        lines.append([f"{plan}{_known(plan)}", *cells])
    return table(["", "7B", "7B, 1/16", "65B", "65B, 1/16", "65B, 3/1000"], lines)


def _known(plan: Plan) -> str:
    return f" ({plan.known_as})" if plan.known_as else ""


MAIN = ("alone", "NNG", "ddp", "fsdp2 hybrid", "GGG", "zero-3", "zero-3 lean", "fsdp2")
"""Arms of the reference cell that the page shows before the fold."""


def reference(record: Record, arms: Sequence[str] = ()) -> str:
    """The arms of the reference cell, or some of them, fastest first."""
    lines = [
        [row["arm"], row["plan"] if row["plan"] != row["arm"] else "–", _ends(row, "seconds"), f"{row['cpu']:.2f}",
         f"{row['sent_inter'] / 2**20:.1f}", f"{row['sent_intra'] / 2**20:.1f}", row["n"]]
        for row in sorted(record.table("arms"), key=lambda row: row["seconds"])
        if not arms or row["arm"] in arms
    ]  # fmt: skip
    head = ["arm", "as a plan", "s per step", "CPU s, all ranks", "MiB out of a group", "MiB inside", "n"]
    return table(head, lines)


def _ends(row: Row, name: str, form: str = ".2f") -> str:
    return f"{row[name]:{form}} [{row[f'{name}_low']:{form}}, {row[f'{name}_high']:{form}}]"


def cells(record: Record) -> str:
    """How well the simulator ranks the plans, cell by cell, with the work of the cores and without."""
    rows = _in_order(_best_known(record))
    probed, bare = {_place(row) for row in predicted(record)}, _in_order(_best_known(record, wires=True))
    both = list(zip(judged(rows, tie=TIE), judged(bare, tie=TIE), strict=True))
    lines = [
        [_place(row), "probed" if _place(row) in probed else "as held", f"{row['tau']:.2f}", f"{row['repeat']:.2f}",
         row["chosen"], row["best"], f"{100 * row['regret']:.0f} %", f"{100 * row['fresh']:+.0f} %",
         f"{row['off']:.2f}",
         f"{other['chosen']}, {100 * other['regret']:.0f} %, {other['off']:.2f}"]
        for row, other in both
    ]  # fmt: skip
    means, shapes = [], dict.fromkeys(_shape(row) for row, _ in both)
    for shape in [*shapes, ""] if len(shapes) > 1 else [""]:
        own = [pair for pair in both if shape in ("", _shape(pair[0]))]
        means.append(_means(f"mean of {len(own)}" + (f" at {shape}" if shape else ""), *zip(*own, strict=True)))
    head = ["groups×ranks, B′ : B, micro-steps, trainable", "links", "τ", "τ of a repeat", "predicted best",
            "measured best", "regret", "in a fresh round", "predicted over measured",
            "wires alone: best, regret, predicted over measured",
            ]  # fmt: skip
    exact = sum(row["bytes_as_formula"] for row in rows)
    said = f"Counted bytes equal the formula in {exact} of {len(rows)} rows."
    return f"{table(head, means)}\n\n{said}\n\n{table(head, lines)}"


def _means(title: str, found: Sequence[Row], alone: Sequence[Row]) -> list[str]:
    """The line that sums up some cells."""
    tau, repeat, off = (fmean(row[name] for row in found) for name in ("tau", "repeat", "off"))
    bare = f"τ {fmean(row['tau'] for row in alone):.2f}; {_hits(alone)}; {_regret(alone)}"
    ranked = [f"{tau:.2f}", f"{repeat:.2f}", "", _hits(found), _regret(found), _fresh(found), f"{off:.2f}"]
    return [title, "", *ranked, bare]


def choices(record: Record) -> str:
    """What the prediction's choice costs, beside taking one plan always."""
    rows = _in_order(_best_known(record))
    lines = []
    for plan in (None, "NNN", "NNI", "NNG", "III", "IIG", "GGG"):
        found = judged(rows, tie=TIE, always=plan)
        worst = max(found, key=lambda row: row["regret"])
        lines.append([
            f"always {plan}" if plan else "the predicted best", f"{fmean(row['hit'] for row in found):.0%}",
            _regret(found), _fresh(found), f"{100 * worst['regret']:.0f} %", _place(worst), str(len(found)),
        ])  # fmt: skip
    head = ["the choice", "measured best", "mean regret", "in a fresh round", "largest", "where", "cells"]
    return table(head, lines)


def labour(record: Record) -> str:
    """What messages take of the cores in the engine, beside the probe."""
    lines = [
        [row["shape"], f"{1e3 * row['message']:.2f}", f"{1e3 * row['probe_message']:.2f}", f"{1e9 * row['byte']:.1f}",
         f"{1e9 * row['probe_byte']:.1f}", f"{100 * row['explained']:.0f} %", str(row["n"])]
        for row in spent(record)
    ]  # fmt: skip
    head = ["groups×ranks", "ms a message, engine", "ms, probe", "ns a byte, engine", "ns, probe", "explained", "n"]
    return table(head, lines)


def _fresh(found: Sequence[Row]) -> str:
    return f"{100 * fmean(row['fresh'] for row in found):+.1f} %"


def _hits(found: Sequence[Row]) -> str:
    hits, close, even = (fmean(row[name] for row in found) for name in ("hit", "close", "even"))
    return f"{hits:.0%} hit, {close:.0%} within 3 %, {even:.0%} not told apart"


def _regret(found: Sequence[Row]) -> str:
    return f"{100 * fmean(row['regret'] for row in found):.1f} %"


_KNOWN: dict[tuple[int, bool], list[dict[str, Any]]] = {}


def _best_known(record: Record, *, wires: bool = False) -> list[dict[str, Any]]:
    """Predictions from the probe, where a cell has one, and from the rates that its links are held to elsewhere."""
    if (id(record), wires) not in _KNOWN:  # seconds for a grid, and several tables ask; ``_record`` keeps each alive
        found = {(_place(row), row["plan"]): row for row in predicted(record, held=True)}
        found |= {(_place(row), row["plan"]): row for row in predicted(record, wires=wires)}
        _KNOWN[id(record), wires] = list(found.values())
    return _KNOWN[id(record), wires]


def _share(trainable: float) -> str:
    return {1.0: "all", 1 / 16: "1/16"}.get(trainable, f"{1000 * trainable:.0f}/1000")


def plans(record: Record) -> str:
    """Measured and predicted seconds of every plan in every cell."""
    rows = _in_order(_best_known(record))
    held = {(_place(row), row["plan"]): f"{row['measured']:.2f} ({row['predicted']:.2f})" for row in rows}
    names = [str(plan) for plan in effective()]
    places = dict.fromkeys(_place(row) for row in rows)
    lines = [[place, *(held.get((place, name), "–") for name in names)] for place in places]
    return table(["s per step, measured (predicted)", *names], lines)


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """By shape, links, micro-steps and trainable share, whenever they were measured."""
    return sorted(
        rows, key=lambda row: (row["groups"] * row["per_group"], row["groups"], row["inter"] / row["intra"],
                               row["accumulate"], -row["trainable"])
    )  # fmt: skip


def _shape(row: Row) -> str:
    return f"{row['groups']}×{row['per_group']}"


def _place(row: Row) -> str:
    ratio = row["ratio"] if "ratio" in row else row["intra"] / row["inter"]
    return f"{_shape(row)}, {ratio:.0f} : 1, s = {row['accumulate']}, {_share(row['trainable'])}"


def kills(record: Record) -> str:
    """Every killed rank: how soon the others ended, and what resuming gave."""
    lines = [
        [row["rank"], row["checkpoint"], f"{row['seconds']:.1f}", "yes" if row["named"] else "no", row["left"],
         "yes" if row["bits_equal"] else "no", f"{row['apart_on_two']:.0e}"]
        for row in sorted(record.table("kills"), key=lambda row: row["rank"])
    ]  # fmt: skip
    head = ["rank killed", "at step", "s until all had ended", "named by the others", "processes left",
            "same bits, 4 ranks", "relative difference, 2 ranks"]  # fmt: skip
    return table(head, lines)


def collectives(record: Record) -> str:
    """Flat, two-level and overlapped collectives, on a link that a group shares and on one of each rank's own."""
    lines = [
        [f"{row['pattern']}, {row['arm']}, {'own links' if row['sharing'] == 1 else 'shared link'}",
         _ends(row, "seconds", ".3f"), "–" if row["model"] is None else f"{row['model']:.3f}",
         f"{100 * row['saved']:.1f} %", row["n"]]
        for row in record.table("collectives")
    ]  # fmt: skip
    return table(["", "s", "bytes alone, s", "less than flat", "n"], lines)


def ties(record: Record) -> str:
    """What each rule for plans of equal predicted time would have cost."""
    lines = [
        [row["rule"], f"{100 * row['mean']:.1f} %", f"{100 * row['worst']:.0f} %", f"{row['plan']} at {row['there']}",
         row["cells"]]
        for row in ties_judged(record)
    ]  # fmt: skip
    return table(["of plans that tie, the one with", "mean regret", "largest", "where", "cells"], lines)


def scaling(record: Record) -> str:
    """Every arm on more and more groups, each rank with as many rows as before: seconds, processor time and bytes."""
    rows = sorted(record.table("arms"), key=lambda row: (row["groups"] * row["per_group"], row["seconds"]))
    fewest = rows[0]["groups"] * rows[0]["per_group"]
    base = {row["arm"]: row["seconds"] for row in rows if row["groups"] * row["per_group"] == fewest}
    cores = int(record.environment["cores"])
    lines = [
        [f"{row['groups']}×{row['per_group']}", row["arm"], _ends(row, "seconds"),
         f"{row['seconds'] / base[row['arm']]:.2f}×" if row["arm"] in base else "–", f"{row['cpu']:.2f}",
         f"{100 * row['cpu'] / row['seconds'] / cores:.0f} %", f"{row['sent_inter'] / 2**20:.1f}",
         f"{row['sent_intra'] / 2**20:.1f}", row["n"]]
        for row in rows
    ]  # fmt: skip
    head = ["groups×ranks", "arm", "s per step", f"of {fewest} ranks' step", "CPU s, all ranks",
            f"of {cores} cores", "MiB out of a group", "MiB inside", "n"]  # fmt: skip
    return table(head, lines)


def batch(record: Record) -> str:
    """NNI beside ZeRO-1's plan with more and more micro-steps of a step: measured, simulated, and by bytes alone."""
    cells: dict[int, dict[str, Row]] = {}
    for row in record.table("arms"):
        cells.setdefault(row["accumulate"], {})[row["arm"]] = row
    lines = []
    for micros, arms in sorted(cells.items()):
        nni, nng, flat, alone = (arms[name] for name in ("NNI", "NNG", "NNG flat", "alone"))
        told = "predicted" if "predicted" in nni else "predicted_nominal"
        by_bytes = [alone["seconds"] + 8 * row["sent_inter"] / row["inter"] for row in (flat, nni)]
        lines.append([
            micros, _ends(alone, "seconds"), *(_ends(row, "seconds") for row in (nni, nng, flat)),
            f"{nng['seconds'] / nni['seconds']:.2f}", f"{nng[told] / nni[told]:.2f}",
            f"{flat['seconds'] / nni['seconds']:.2f}", f"{by_bytes[0] / by_bytes[1]:.2f}",
        ])  # fmt: skip
    head = ["micro-steps", "alone, s", "NNI, s", "NNG, s", "NNG on flat rings, s", "NNG over NNI", "simulated",
            "flat NNG over NNI", "by bytes"]  # fmt: skip
    return table(head, lines)


def yielding(record: Record) -> str:
    """Arms whose threads yield beside the same with threads as they come, turn by turn."""
    cells: dict[Cell, dict[str, Row]] = by_cell(record.table("arms"))
    lines = []
    for cell, arms in cells.items():
        for arm, row in arms.items():
            hurried = arms.get({"ddp yielding": "ddp"}.get(arm, f"{arm} hurried"))
            if hurried is not None:
                turns = zip(row["rounds"].split(), hurried["rounds"].split(), strict=True)
                less = sorted(100 * (1 - float(own) / float(other)) for own, other in turns)
                lines.append([
                    f"{arm.split()[0]}, {_share(cell.trainable)}", _ends(hurried, "seconds", ".3f"),
                    _ends(row, "seconds", ".3f"), f"{median(less):.0f} % [{less[0]:.0f}, {less[-1]:.0f}]",
                    f"{100 * (1 - row['cpu'] / hurried['cpu']):.0f} %", row["n"],
                ])  # fmt: skip
    head = ["arm, trainable", "threads as they come, s", "threads that yield, s", "less", "less of the cores", "n"]
    return table(head, lines)


def curves(document: Mapping[str, Any]) -> str:
    """How far every arm's loss curve and weights end from those of one process."""
    lines = [
        [row["arm"], f"{row['first']:.4f}", f"{row['last']:.4f}", *(_tiny(row[n]) for n in ("apart_10", "apart")),
         _tiny(row["weights"])]
        for row in document["arms"]
    ]  # fmt: skip
    head = ["arm", "first loss, nat", "last loss, nat", "largest deviation of 10 steps", "of all steps",
            "weights apart at the end"]  # fmt: skip
    return table(head, lines)


def losses(study: PairedLosses, file: str) -> str:
    """Held-out loss of every arm over its seeds, paired with the arm it is held against, and the trivial control."""
    found = study.summary(json.loads((RESULTS / file).read_text())["rows"])
    apart, base = f"above {study.against}", found[0]["sent"]
    lines = [
        [row["arm"], f"{row['held out']:.4f} [{row['lowest']:.4f}, {row['highest']:.4f}]",
         "–" if row["arm"] == study.against else f"{row[apart]:+.4f} ± {row['± 95 %']:.4f}",
         f"{base / row['sent']:.1f}×" if row["sent"] else "no bytes", row["seeds"]]
        for row in found
    ]  # fmt: skip
    lines.append(["pairs of characters, counted", f"{bigram():.4f}", "–", "–", "–"])
    return table(["arm", "held-out loss, nat", f"{apart}, nat", "fewer bytes between groups", "seeds"], lines)


def _tiny(value: float) -> str:
    return f"{value:.0e}" if value else "0"


@functools.cache
def _record(name: str) -> Record:
    return Record.read(RESULTS / f"{name}.jsonl")


MADE: dict[str, tuple[str, Callable[[Record], str]]] = {
    "reference-main": ("network_reference", functools.partial(reference, arms=MAIN)),
    "reference": ("network_reference", reference), "equal": ("network_equal", reference),
    "lowbit": ("network_lowbit", reference),
    "yielding": ("network_yielding", yielding), "cells": ("network_plans", cells), "plans": ("network_plans", plans),
    "choices": ("network_plans", choices), "labour": ("network_plans", labour), "ties": ("network_plans", ties),
    "since": ("network_plans_yielding", cells), "choices-since": ("network_plans_yielding", choices),
    "labour-since": ("network_plans_yielding", labour), "scaling": ("network_scaling", scaling),
    "batch": ("network_batch", batch), "collectives": ("network_collectives", collectives),
    "kills": ("shard_kills", kills), "wires": ("network_reference", wires),
    **{f"{name}{end}": (f"network_{file}", build)
       for end, file in (("-probed", "plans_probed"), ("-engines", "engines"), ("-since", "plans_yielding"),
                         ("", "plans"))
       for name, build in (("capped", bars.capped), ("pairs", bars.pairs), ("sizes", bars.sizes))},
    **{f"engines{end}": ("network_engines", lambda record, build=build: build(list(engines.pairs(record.rows))))
       for end, build in (("", engines.table), ("-cells", engines.summary))},
}  # fmt: skip
"""Mark -> file of the rows, and what makes the table."""


def filled(page: str) -> str:
    """The page with every table made anew."""
    parts = {name: build(_record(file)) for name, (file, build) in MADE.items()}
    parts |= {"paper": paper(), "published": published(), "tiers": tiers(), "unequal": unequal()}
    parts["lowbit-loss"] = losses(lowbit_loss.STUDY, "network_lowbit_loss.json")
    parts["local-loss"] = losses(local_loss.STUDY, "network_local_loss.json")
    return marked(page, parts | {"curves": curves(json.loads((RESULTS / "network_curves.json").read_text()))})
