"""Tables of merges, predictions and speed for ``docs/results/valley.md``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import torch

from benchmarks.memory_tables import table
from benchmarks.valley.numbers import MINUS, Row, mean, spearman
from benchmarks.valley.soft import ROWS as SOFT_ROWS
from benchmarks.valley.soft import TRUTHS
from sparing.valley.forecast.soft_labels import LEVEL, MISSES
from sparing.valley.scans.intervals import student_t_quantile

RESULTS = Path(__file__).parents[1] / "results"
NETS = {
    "vgg-batch-fashion-mnist": "VGG, BN, Fashion", "resnet-batch-cifar10": "ResNet, BN, CIFAR",
    "vgg-group-fashion-mnist": "VGG, GroupNorm, Fashion", "resnet-batch-fashion-mnist": "ResNet, BN, Fashion",
    "stories15m": "stories15M", "smollm2-135m-instruct": "SmolLM2-135M",
    "vgg-batch-fashion-mnist-x2": "VGG, BN, Fashion, twice as wide",
    "resnet-batch-fashion-mnist-x4": "ResNet, BN, Fashion, four times as wide",
}  # fmt: skip
FEWEST = 6
"""Pairs of a kind whose ranks are compared."""


def rows_of(part: str) -> dict[str, Row]:
    """Rows of a part by key, empty where it was not measured."""
    path = RESULTS / f"valley_{part}.json"
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


def soups() -> str:
    """Gap of the average of two halves, by net, start and epoch."""
    rows, found = list(rows_of("soups").values()), []
    for case in dict.fromkeys(r["case"] for r in rows):
        for start in dict.fromkeys(r["start"] for r in rows):
            for epoch in sorted({r["epoch"] for r in rows}):
                of = [r for r in rows if (r["case"], r["start"], r["epoch"]) == (case, start, epoch)]
                if of:
                    ends = mean((50 * sum(r["ends"]) for r in of), 1, sign=False)
                    gaps = [mean((100 * r["gap"] for r in of), 1), mean((r["gap_loss"] for r in of), 3)]
                    signs = mean((r["ssr_ab"] for r in of), 3, sign=False).split(" ")[0]
                    found.append([f"{NETS[case]}: {start}, {epoch}", ends, *gaps, signs, len(of)])
    return table(["start, epoch", "error of a half, %", "gap in error, points", "gap in loss, nat", "SSR", "n"], found)


def predictions() -> str:
    """Rank correlation of predicted and measured gaps, on pairs that the calibration has not seen."""
    found = []
    for label, row in rows_of("predictions").items():
        for start in ("all", *dict.fromkeys(p["start"] for p in row["pairs"])):
            of = [p for p in row["pairs"] if start in ("all", p["start"])]
            cells = []
            for metric in ("error", "loss"):
                known = [p for p in of if p[f"{metric} measured"] is not None]
                two = [[p[f"{metric} {what}"] for p in known] for what in ("predicted", "measured")]
                inside = sum(p[f"{metric} low"] <= p[f"{metric} measured"] <= p[f"{metric} high"] for p in known)
                cells += [f"{spearman(*two):.2f}".replace("-", MINUS), f"{inside} of {len(known)}"]
            found.append([f"{label}: {start}", *cells, row["calibrated"], len(of)])
    head = ["", "Spearman, error", "inside the interval", "Spearman, loss", "inside the interval", "calibrated on", "n"]
    return table(head, found)


def line() -> str:
    """Mean, deviation and sign agreement of every kind of parameter, small against large batches."""
    found = []
    for title, rows in _lines():
        found += _kinds(title, rows)
    head = ["", "mean, 16", "mean, 512", "deviation, 16", "deviation, 512", "sign as the step, 16", "512", "n"]
    return table(head, found)


def _lines() -> list[tuple[str, list[Row]]]:
    """What the large-batch net is, and the rows of its lines."""
    rows = list(rows_of("line").values())
    labels = {"batch_512": "512", "batch_512_long": "512 to the end"}
    sorted_rows = {label: [r for r in rows if r.get("large", "batch_512") == label] for label in labels}
    return [(labels[label], of) for label, of in sorted_rows.items() if of]


def _kinds(title: str, rows: list[Row]) -> list[list[object]]:
    found: list[list[object]] = []
    for kind in rows[0]["kinds"]:
        of = [r["kinds"][kind] for r in rows]
        names = ("mean_small", "mean_large", "std_small", "std_large", "agree_small", "agree_large")
        cells = (mean((r[name] for r in of), 3, sign=name[0] == "m") for name in names)
        found.append([f"{title}: {kind}", *cells, len(of)])
    return found


def line_ends() -> str:
    """Errors along the line, and the asymmetry around either end."""
    found = []
    for title, rows in _lines():
        for end, middle in enumerate((0.0, 1.0)):
            cells = [mean(_around(r, metric, middle) for r in rows) for metric in ("error", "loss")]
            at = mean((100 * r["error"][r["lambdas"].index(middle)] for r in rows), 1, sign=False)
            trained = mean((r["losses"][end] for r in rows if "losses" in r), 3, sign=False)
            found.append([f"16 and {title}: λ = {middle:g}", trained, at, *cells, len(rows)])
    return table(["batches", "training loss, nat", "test error, %", "AI error", "AI loss", "n"], found)


def _around(row: Row, metric: str, middle: float) -> float:
    """Asymmetry index of the line within 1 of an end, > 0 where it is flat towards large batches."""
    curve = dict(zip(row["lambdas"], row[metric], strict=True))
    minus = fmean(curve[at] - curve[middle] for at in curve if middle - 1 <= at < middle)
    plus = fmean(curve[at] - curve[middle] for at in curve if middle < at <= middle + 1)
    return (minus - plus) / (abs(minus) + abs(plus))


def merge_costs() -> str:
    """Memory of a merge beyond the process, and CPU seconds beside mergekit's in rounds of one each."""
    times, found = list(rows_of("merge_time").values()), []
    for row in rows_of("merge_memory").values():
        of = [r for r in times if (r["size"], r["method"]) == (row["size"], row["method"])]
        cells: list[object] = ["–", "–", "–", "–"]
        if of:
            ratios = sorted(r["ratio"] for r in of)
            cells = [f"{median(r[who] for r in of):.2f}" for who in ("ours", "theirs")]
            cells += [f"{median(ratios):.1f}× [{ratios[0]:.1f}, {ratios[-1]:.1f}]"]
            cells += [f"{max(r['their_rise'] for r in of) / 1e6:.0f}"]
        named = [f"{row['model_bytes'] / 1e6:.0f} MB: {row['method']}", f"{max(0, row['rise_bytes']) / 1e6:.1f}"]
        found.append([*named, cells[3], *cells[:3], len(of)])
    head = ["a model's size: method", "memory, MB", "mergekit's", "CPU, s", "mergekit's", "ratio (median, range)", "n"]
    return table(head, found)


def merges() -> str:
    """Merged language models, and how much lower they are than the uniform average, seed by seed."""
    rows, found = list(rows_of("merges").values()), []
    uniform = {r["seed"]: fmean(r["losses"]) for r in rows if r["name"] == "uniform"}
    titles = {"base": "stories15m", "members": "each expert on its own book"}
    for name in dict.fromkeys(r["name"] for r in rows):
        of = [r for r in rows if r["name"] == name]
        cells = [mean((r["losses"][k] for r in of), 3, sign=False).split(" ")[0] for k in (0, 1)]
        cells.append(mean((fmean(r["losses"]) for r in of), 3, sign=False))
        apart = (fmean(r["losses"]) - uniform[r["seed"]] for r in of if r["seed"] in uniform)
        cells.append("–" if name == "uniform" else mean(apart, 3))
        scales = ", ".join(f"{r['scale']:g}" for r in of if "scale" in r and name != "uniform")
        found.append([titles.get(name, name), scales or "–", *cells, len(of)])
    head = ["nat per token", "scales chosen", "Alice", "Buster Bear", "mean", "mean less uniform", "n"]
    return table(head, found)


def strangers() -> str:
    """Errors of strangers and of their average, by net and way."""
    titles = {
        "stale": "as they are", "refresh": "batch norm refreshed", "weights": "aligned by weights",
        "activations": "aligned by answers",
    }  # fmt: skip
    rows, found = list(rows_of("strangers").values()), []
    for case, way in dict.fromkeys((r["case"], r["way"]) for r in rows):
        of = [r for r in rows if (r["case"], r["way"]) == (case, way)]
        cells = [mean((100 * fmean(r["ends"]) for r in of), 1, sign=False)]
        cells += [mean((100 * r["middle"] for r in of), 1, sign=False), mean((100 * r["gap"] for r in of), 1)]
        found.append([f"{NETS[case]}: {titles[way]}", *cells, len(of)])
    return table(["", "error of the two, %", "error of the average, %", "gap, points", "n"], found)


def soft() -> str:
    """How well rows tell the gaps of averages, by what labels they are told, net and kind of pair."""
    images, texts = list(rows_of("soft").values()), list(rows_of("soft_text").values())
    ways: dict[str, list[Row]] = {"soft labels": images, "next tokens": texts}
    names = [f"{metric} {part}" for metric in ("loss", "error") for part in ("soft", "soft sampling")]
    ways["soft labels of text"] = [
        {**r, **{name.replace("soft sampling", "sampling").replace("soft", "told"): r[name] for name in names}}
        for r in texts
    ]
    found = []
    for way, rows in ways.items():
        for case in dict.fromkeys(r["case"] for r in rows):
            of_net = [r for r in rows if r["case"] == case and (r["truth"] == max(TRUTHS) or way != "soft labels")]
            for kind, of in _kinds_of(of_net).items():
                cells = [cell for metric in ("loss", "error") for cell in _told(of, metric, way)]
                found.append([f"{NETS[case]}, {way}, {kind}", *cells, len(of)])
    parts = ("Spearman", "sign right", "in the interval")
    return table(["", *(f"{part}, {metric}" for metric in ("loss", "error") for part in parts), "n"], found)


def _kinds_of(rows: list[Row]) -> dict[str, list[Row]]:
    """Pairs of one net: all, those with no part in the choice of the interval, and by kind where there are enough."""
    found = {"all": rows, "seeds that had no part": [r for r in rows if r["seed"]]}
    found |= {kind: [r for r in rows if r["start"] == kind] for kind in dict.fromkeys(r["start"] for r in rows)}
    return {kind: of for kind, of in found.items() if len(of) >= FEWEST}


def _told(rows: list[Row], metric: str, way: str) -> list[str]:
    """Rank correlation, signs that are right, and truths in the interval."""
    told, true = ([r[f"{metric} {part}"] for r in rows] for part in ("told", "true"))
    signs = sum((x > 0) == (y > 0) for x, y in zip(told, true, strict=True))
    inside = sum(_holds(r, metric, 0.0 if way == "next tokens" else MISSES[metric]) for r in rows)
    return [f"{spearman(told, true):.2f}".replace("-", MINUS), f"{signs} of {len(rows)}", f"{inside} of {len(rows)}"]


def _holds(row: Row, metric: str, misses: float) -> bool:
    count = row.get("rows", SOFT_ROWS)
    # The truth of text is measured on few rows too, and its own error is in the difference
    spread = math.hypot(
        row[f"{metric} sampling"] * math.sqrt(1 + count * misses**2), row.get(f"{metric} true sampling", 0)
    )
    reach = student_t_quantile((1 + LEVEL) / 2, count - 1) * spread
    return bool(abs(row[f"{metric} told"] - row[f"{metric} true"]) <= reach)


def signals() -> str:
    """Rank correlation of every signal with the measured gap, by net; and of all of them fitted on other seeds."""
    rows, truths = list(rows_of("signals").values()), rows_of("soft")
    columns: dict[str, list[str]] = {}
    head = ["signal"]
    for case in dict.fromkeys(r["case"] for r in rows):
        of = [r for r in rows if r["case"] == case]
        keys = [f"{case} {r['seed']} {r['start']} {r['epoch']} {max(TRUTHS)}" for r in of]
        if len(of) < FEWEST or any(key not in truths for key in keys):
            continue
        for metric in ("loss", "error"):
            head.append(f"{NETS[case]} ({len(of)} pairs), {metric}")
            true = [truths[key][f"{metric} true"] for key in keys]
            told = {name: [r["signals"][name] for r in of] for name in of[0]["signals"]}
            told |= {
                f"all {len(told)}, fitted on the other seeds": _fitted(of, true),
                "the score of weights": [r["score"] for r in of],
                "rows without labels": [truths[key][f"{metric} told"] for key in keys],
            }  # fmt: skip
            for name, values in told.items():
                columns.setdefault(name, []).append(f"{spearman(values, true):+.2f}".replace("-", MINUS))
    return table(head, [[name, *values] for name, values in columns.items()])


def _fitted(rows: list[Row], true: list[float]) -> list[float]:
    """Predictions of a ridge regression on all signals, for every seed from the other ones."""
    told = torch.tensor([list(r["signals"].values()) for r in rows], dtype=torch.float64)
    told, asked = (told - told.mean(0)) / told.std(0), torch.tensor(true, dtype=torch.float64)
    seeds, found = torch.tensor([r["seed"] for r in rows]), torch.empty(len(rows), dtype=torch.float64)
    for seed in seeds.unique():
        x, y = told[seeds != seed], asked[seeds != seed]
        weights = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1], dtype=x.dtype), x.T @ (y - y.mean()))
        found[seeds == seed] = told[seeds == seed] @ weights
    return found.tolist()


def resnet50() -> str:
    """The line between two halves of a fine-tuning of ResNet-50, by epoch."""
    rows, found = list(rows_of("resnet50").values()), []
    for epoch in sorted({r["epoch"] for r in rows}):
        of = [r for r in rows if r["epoch"] == epoch]
        cells = [mean((50 * (r["error"][0] + r["error"][-1]) for r in of), 1, sign=False)]
        cells += [mean((100 * r["error"][at] for r in of), 1, sign=False) for at in (1, 2, 3)]
        cells += [mean((100 * r["gap"] for r in of), 1), mean((r["gap_loss"] for r in of), 3)]
        cells += [mean((r["told_loss"] for r in of), 3), mean((r["ssr_ab"] for r in of), 3, sign=False).split(" ")[0]]
        found.append([epoch, *cells, len(of)])
    head = [
        "epochs",
        "error of a half, %",
        "error at λ = 0.25",
        "0.5",
        "0.75",
        "gap in error, points",
        "gap in loss, nat",
    ]
    return table([*head, "gap in loss as 256 rows tell it", "SSR", "n"], found)


def steering() -> str:
    """What a step from an average gains on test rows, and what plain scaling of its norm does."""
    rows, found = list(rows_of("steering").values()), []
    for start, along in dict.fromkeys((r["start"], r["along"]) for r in rows):
        of = [r for r in rows if (r["start"], r["along"]) == (start, along)]
        cells = [mean((r["at"]["loss"] for r in of), 3, sign=False)]
        cells += [", ".join(f"{r[name]:g}" for r in of) for name in ("step", "step_norm")]
        cells += [mean((r[name]["loss"] for r in of), 4) for name in ("gain", "gain_norm", "beyond")]
        found.append([f"{start}, {along}", *cells, len(of)])
    head = [
        "start, direction",
        "loss, nat",
        "steps",
        "steps of the norm",
        "gain, nat",
        "gain of the norm",
        "beyond it",
        "n",
    ]
    return table(head, found)


TIMED = {
    "vgg-batch-fashion-mnist 0": "VGG", "vgg-none-fashion-mnist 0": "VGG without norm",
    "resnet-batch-cifar10 0": "ResNet", "vgg-batch-cifar10-x2 0": "VGG twice as wide, in colour",
}  # fmt: skip
"""Nets whose points are timed, by the key of their row."""


def speed() -> str:
    """Points per second of one run in turns."""
    found = []
    for key, row in rows_of("speed").items():
        for name, rates in row["per_second"].items():
            ratios = [a / b for a, b in zip(row["per_second"]["ours"], rates, strict=True)]
            times = f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            alone = "–" if "processes" in name else f"{median(row['per_cpu_second'][name]):.1f}"
            per = f"{median(rates):.1f}"
            apart = f"{row['apart'][name]:.0e}"
            found.append([f"{TIMED[key]}: {name}", per, alone, times, apart, f"{row['load']:.1f}", len(rates)])
    head = ["", "points per second", "per CPU second", "ours against it, ×", "loss differs by", "load", "rounds"]
    return table(head, found)


def precision() -> str:
    """Rows that a stated precision takes, by how they are split, and whether it is reached."""
    found = []
    for row in rows_of("precision").values():
        run = [row[f"run{way}"] for way in ("", "_equal", "_all", "_known")]
        cells = [f"{row['told']:.3f}", f"{row['deviation']:.3f}", f"{100 * row['held']:.1f}"]
        split = f"{row['draws']:.0f} × {row['rows']:.0f}"
        found.append([f"{row['case']}, {row['asked']:g}", *cells, split, *(f"{one / 1000:,.1f}" for one in run)])
    head = [
        "case, error asked", "told", "deviation from the truth", "in the interval, %", "draws × rows of each",
        "thousand rows run", "as many rows as draws", "597 rows a draw", "variances known",
    ]  # fmt: skip
    return table(head, found)


def search() -> str:
    """Searched merges beside the best fixed recipe and the plain average, on rows that chose nothing."""
    found = []
    for row in rows_of("search").values():
        for role in ("searched", "best fixed recipe", "the plain average"):
            one = row[role]
            less = "–"
            if one["searched_less"] is not None:
                ends = [one["searched_less"], one["searched_less_low"], one["searched_less_high"]]
                value, low, high = (f"{1000 * end:+.1f}".replace("-", MINUS) for end in ends)
                less = f"{value} [{low}, {high}]"
            found.append([
                f"{row['books']}: {role}", one["way"], f"{one['loss_validation']:.3f}", f"{one['loss']:.3f}", less,
                row["rows"],
            ])  # fmt: skip
    head = ["books: merge", "way", "nat, choosing rows", "nat, judging rows", "searched less it, thousandths", "rows"]
    return table(head, found)


TABLES: dict[str, Callable[[], str]] = {
    "valley-strangers": strangers, "valley-soft": soft, "valley-signals": signals, "valley-resnet50": resnet50,
    "valley-soups": soups, "valley-predictions": predictions, "valley-line": line, "valley-line-ends": line_ends,
    "valley-merges": merges, "valley-merge-costs": merge_costs, "valley-steering": steering, "valley-speed": speed,
    "valley-precision": precision, "valley-search": search,
}  # fmt: skip
