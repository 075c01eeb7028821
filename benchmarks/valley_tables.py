"""Tables of ``docs/results/valley.md`` from the committed JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.marks import marked
from benchmarks.memory_tables import table
from benchmarks.valley import landscape_tables, merge_tables
from benchmarks.valley.numbers import Row, asymmetry, branches, finite, kendall, mean, pearson

RESULTS = Path(__file__).parent / "results"
NOISES = {
    "gaussian": "G(0, 1)", "uniform": "U(−1, 1)", "ternary": "{−1, 0, 1}", "shifted-gaussian": "G(1, 1)",
    "positive-uniform": "U(0, 1)", "binary": "{0, 1}", "one": "{1}",
}  # fmt: skip
NETS = {
    "vgg-batch-fashion-mnist": "VGG, BN, Fashion", "resnet-batch-fashion-mnist": "ResNet, BN, Fashion",
    "vgg-none-fashion-mnist": "VGG, no norm, Fashion", "vgg-group-fashion-mnist": "VGG, GroupNorm, Fashion",
    "vgg-batch-mnist": "VGG, BN, MNIST", "vgg-batch-cifar10": "VGG, BN, CIFAR",
    "resnet-batch-cifar10": "ResNet, BN, CIFAR", "vgg-none-cifar10": "VGG, no norm, CIFAR",
    "gpt2-alice": "GPT-2, characters",
    "gpt2-alice-long": "GPT-2, characters, 2,400 steps",
}  # fmt: skip
INITIAL = {"": "ones", "-uniform": "U(0, 1)", "-normal": "G(0, 0.1)"}
SPECIAL = {
    "initial": "θ₀", "self": "θ", "sign": "sign(θ)", "centred-sign": "sign(θ − μ)", "positive": "sgp(θ)",
    "centred-positive": "sgp(θ − μ)",
}  # fmt: skip
LOW, HIGH = 0.35, 0.7
"""|AI| of raw noise should stay below the one, AI of sign-consistent noise above the other."""
SIGNS = ("raw", "consistent")


def rows_of(part: str) -> dict[str, Row]:
    """Rows of a part by key, empty where it was not measured."""
    path = RESULTS / f"valley_{part}.json"
    return dict(json.loads(path.read_text())["rows"]) if path.exists() else {}


def _cases(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def _noise_rows() -> list[tuple[str, str, str, Row]]:
    """Case, kind of noise, sign and row of every scan of the first table."""
    found = []
    for key, row in (rows_of("noises") | rows_of("text")).items():
        kind, sign = key.split()[-2:]
        found.append((row["case"], kind, sign, row))
    return found


def fits() -> str:
    """Errors of the trained nets."""
    rows = list(rows_of("fits").values())
    found = [
        [NETS[case], *(mean((100 * r[part] for r in of), 1, sign=False) for part in ("test", "train")), len(of)]
        for case in _cases(rows) if case in NETS for of in [[r for r in rows if r["case"] == case]]
    ]  # fmt: skip
    return table(["", "test error, %", "training error, %", "n"], found)


def noises() -> str:
    """Asymmetry index by net, noise and sign."""
    rows, found = _noise_rows(), []
    for case in dict.fromkeys(case for case, *_ in rows):
        for kind, title in NOISES.items():
            of = {s: [r for c, k, sign, r in rows if (c, k, sign) == (case, kind, s)] for s in SIGNS}
            cells = [mean(asymmetry(r, metric) for r in of[s]) for metric in ("error", "loss") for s in SIGNS]
            share = mean((r["scr"] for r in of["raw"]), 2, sign=False).split(" ")[0]
            if of["raw"]:
                found.append([f"{NETS[case]}: {title}", share, *cells, min(len(each) for each in of.values())])
    head = ["", "SCR raw", "AI error, raw", "AI error, consistent", "AI loss, raw", "AI loss, consistent", "n"]
    return table(head, found)


def verdicts() -> str:
    """For how many noises, and for how many single curves, the index lies where it should."""
    rows, found = _noise_rows(), []
    for case in dict.fromkeys(case for case, *_ in rows):
        cells = []
        for metric in ("error", "loss"):
            for sign in SIGNS:
                holds = (lambda v: abs(v) < LOW) if sign == "raw" else (lambda v: v > HIGH)
                by_kind = [
                    finite(asymmetry(r, metric) for c, k, s, r in rows if (c, k, s) == (case, kind, sign))
                    for kind in NOISES
                ]
                by_kind = [each for each in by_kind if each]
                curves = [value for each in by_kind for value in each]
                means = sum(holds(fmean(each)) for each in by_kind)
                cells.append(f"{means} of {len(by_kind)}; {sum(map(holds, curves))} of {len(curves)}")
        found.append([NETS[case], *cells])
    head = ["", "error, raw < .35", "error, consistent > .7", "loss, raw < .35", "loss, consistent > .7"]
    return table([head[0], *(f"{each}" for each in head[1:])], found)


def _by_ratio() -> dict[str, dict[float, dict[int, Row]]]:
    """Rows by case, sign-change ratio and seed; the ends are the raw and the consistent Gaussian."""
    found: dict[str, dict[float, dict[int, Row]]] = {}
    for key, row in rows_of("ratio").items():
        found.setdefault(row["case"], {}).setdefault(float(key.split()[-1]), {})[row["seed"]] = row
    for case, kind, sign, row in _noise_rows():
        if case in found and kind == "gaussian":
            found[case].setdefault(0.0 if sign == "raw" else 1.0, {})[row["seed"]] = row
    return {case: dict(sorted(by.items())) for case, by in found.items()}


def ratio() -> str:
    """Both branches and the index by sign-change ratio."""
    found = []
    for case, by_ratio in _by_ratio().items():
        for share, by_seed in by_ratio.items():
            rows = list(by_seed.values())
            minus, plus = ([branches(r, "error")[side] for r in rows] for side in (0, 1))
            cells = [mean((100 * v for v in side), 1, sign=False) for side in (minus, plus)]
            index = [mean(asymmetry(r, metric) for r in rows) for metric in ("error", "loss")]
            scr = f"{fmean(r['scr'] for r in rows):.2f}"
            found.append([f"{NETS[case]}: r = {share:.1f}", scr, *cells, *index, len(rows)])
    return table(["", "SCR", "mean error −, %", "mean error +, %", "AI error", "AI loss", "n"], found)


def ratio_laws() -> str:
    """Correlation of ratio and index, and whether both branches are monotone, seed by seed."""
    found = []
    for case, by_ratio in _by_ratio().items():
        seeds = [seed for seed in range(5) if all(seed in by for by in by_ratio.values())]
        cells = []
        for metric in ("error", "loss"):
            known = [
                (r["scr"], value) for by in by_ratio.values() for r in by.values()
                if (value := asymmetry(r, metric)) is not None
            ]  # fmt: skip
            cells.append(f"{pearson(*zip(*known, strict=True)):.3f}")
        for side in (0, 1):
            taus = [
                kendall(list(by_ratio), [branches(by[seed], "error")[side] for by in by_ratio.values()])
                for seed in seeds
            ]
            cells.append(mean(taus))
        found.append([NETS[case], *cells, len(seeds)])
    head = ["", "Pearson, AI error", "Pearson, AI loss", "Kendall, error −", "Kendall, error +", "n"]
    return table(head, found)


def groups() -> str:
    """Gaussian noise by group."""
    rows, found = list(rows_of("groups").items()), []
    whole = [(r["case"], "all", sign, r) for case, kind, sign, r in _noise_rows() if kind == "gaussian"]
    known = whole + [(r["case"], *key.split()[-2:], r) for key, r in rows]
    for case in _cases(row for _, row in rows):
        for group in dict.fromkeys(g for _, g, *_ in known):
            of = {s: [r for c, g, sign, r in known if (c, g, sign) == (case, group, s)] for s in SIGNS}
            cells = [mean(asymmetry(r, metric) for r in of[s]) for metric in ("error", "loss") for s in SIGNS]
            if of["raw"]:
                found.append([f"{NETS[case]}: {group}", *cells, min(map(len, of.values()))])
    return table(["", "AI error, raw", "AI error, consistent", "AI loss, raw", "AI loss, consistent", "n"], found)


def special() -> str:
    """Six directions made of the weights."""
    rows, found = list(rows_of("special").items()), []
    for case in _cases(row for _, row in rows):
        for kind, title in SPECIAL.items():
            of = [r for key, r in rows if (r["case"], key.split()[-1]) == (case, kind)]
            cells = [mean(asymmetry(r, metric) for r in of) for metric in ("error", "loss")]
            if of:
                found.append([f"{NETS[case]}: {title}", mean((r["scr"] for r in of), sign=False), *cells, len(of)])
    return table(["", "SCR", "AI error", "AI loss", "n"], found)


def scales() -> str:
    """Initial norm weights."""
    rows, found = list(rows_of("scales").items()), []
    for case in _cases(row for _, row in rows):
        bare = case.removesuffix("-uniform").removesuffix("-normal")
        title = f"{NETS[bare]}: {INITIAL[case.removeprefix(bare)]}"
        of = {
            name: [r for key, r in rows if r["case"] == case and key.endswith(name)]
            for name in (" norm weights", " all", " weights")
        }
        weights = [r for r in of[" weights"] if "positive" in r]
        cells = [mean((r[name] for r in weights), sign=False) for name in ("mean", "std", "positive")]
        cells += [
            mean(asymmetry(r, m) for r in of[name]) for name in (" norm weights", " all") for m in ("error", "loss")
        ]
        found.append([title, *cells, len(of[" all"])])
    head = ["initial norm weights", "mean after training", "deviation", "share > 0", "AI error, norm weights"]
    return table([*head, "AI loss, norm weights", "AI error, all", "AI loss, all", "n"], found)


def hyper() -> str:
    """Training settings: how wide, how lopsided."""
    rows, found = list(rows_of("hyper").items()), []
    for case in _cases(row for _, row in rows):
        fit = [r for key, r in rows if r["case"] == case and key.endswith(" fit")]
        of = {s: [r for key, r in rows if r["case"] == case and key.endswith(f" {s}")] for s in SIGNS}
        widths = [
            mean(
                (fmean(r["loss"]["widths"]) if None not in r["loss"]["widths"] else None for r in of["raw"]), sign=False
            )
        ]
        cells = [
            mean((100 * r["test"] for r in fit), 1, sign=False),
            mean((r["norm"] for r in fit), 1, sign=False),
            *widths,
        ]
        cells += [mean(asymmetry(r, "error") for r in of[s]) for s in SIGNS]
        found.append(
            [case.removeprefix("vgg-batch-fashion-mnist").lstrip("-").replace("_", " ") or "standard", *cells, len(fit)]
        )
    head = ["", "test error, %", "‖θ‖", "raw half-width at +0.5 nat, λ", "AI error, raw", "AI error, consistent", "n"]
    return table(head, found)


def statistics() -> str:
    """Statistics that do not follow the weights."""
    kept = {(r["case"], kind, sign, r["seed"]): r for _, kind, sign, r in _noise_rows()}
    rows, found = list(rows_of("statistics").items()), []
    for case in _cases(row for _, row in rows):
        for how in dict.fromkeys(key.split()[2] for key, _ in rows):
            of = [(kept.get((case, *key.split()[3:], r["seed"])), key.split()[4], r) for key, r in rows
                  if r["case"] == case and key.split()[2] == how]  # fmt: skip
            pairs = [(a, r) for a, sign, r in of if sign == "consistent" and a is not None]
            cells = []
            for metric in ("error", "loss"):
                both = [(asymmetry(a, metric), asymmetry(r, metric)) for a, r in pairs]
                known = [(x, y) for x, y in both if x is not None and y is not None]
                cells += [
                    f"{fmean(x for x, _ in known):+.2f}".replace("-", "−"),
                    f"{fmean(y for _, y in known):+.2f}".replace("-", "−"),
                ]
                cells.append(f"{sum(x * y < 0 for x, y in known)} of {len(known)}")
            found.append([f"{NETS[case]}: {how}", *cells])
    head = [
        "sign-consistent noise",
        "AI error, refreshed",
        "AI error so",
        "sign flips",
        "AI loss, refreshed",
        "AI loss so",
        "sign flips",
    ]
    return table(head, found)


def peers() -> str:
    """Default directions of other tools."""
    rows, found = list(rows_of("peers").values()), []
    for case in _cases(rows):
        for name in dict.fromkeys(r["name"] for r in rows):
            of = [r for r in rows if (r["case"], r["name"]) == (case, name)]
            cells = [mean((r[part] for r in of), sign=False) for part in ("scr_norm", "scr_all")]
            cells += [mean(asymmetry(r, metric) for r in of) for metric in ("error", "loss")]
            cells += [mean(r["stale"][metric] for r in of) for metric in ("error", "loss")]
            found.append([f"{NETS[case]}: {name}", *cells, len(of)])
    head = ["", "SCR, norm weights", "SCR, all", "AI error", "AI loss", "AI error, stale", "AI loss, stale", "n"]
    return table(head, found)


def mergekit() -> str:
    """Our merges beside mergekit's."""
    names = {"gpt2": "GPT-2", "llama": "Llama"}
    rows = rows_of("mergekit").values()
    found = [[names[row["model"]], row["method"], row["what"], f"{row['value']:.1g}"] for row in rows]
    return table(["model", "mergekit's method", "what is compared", "value"], found)


def recipes() -> str:
    """Recipes through ours and mergekit."""
    kinds = {"example": "its example", "method": "method", "random": "method, draws at random"}
    found = []
    for row in rows_of("recipes").values():
        kind, _, name = row["recipe"].partition(": ")
        found.append([name, kinds[kind], row["what"], f"{row['value']:.1g}"])
    return table(["recipe", "what it is", "what is compared", "value"], found)


def coverage() -> str:
    """Share of 95 % intervals of the index that hold the truth, by number of draws."""
    rows = list(rows_of("coverage").values())
    counts = list(dict.fromkeys(row["n"] for row in rows))
    found = [
        [case, f"{of[0]['truth']:+.2f}".replace("-", "−")]
        + [f"{100 * row['held']:.1f} ({100 * row['bootstrap']:.0f})" for row in of]
        for case in _cases(rows) for of in [[row for row in rows if row["case"] == case]]
    ]  # fmt: skip
    return table(["rises of", "AI", *(f"n = {n}" for n in counts)], found)


TABLES: dict[str, Callable[[], str]] = {
    "valley-mergekit": mergekit, "valley-recipes": recipes, "valley-fits": fits,
    "valley-noises": noises, "valley-verdicts": verdicts, "valley-ratio": ratio,
    "valley-ratio-laws": ratio_laws, "valley-groups": groups, "valley-special": special, "valley-scales": scales,
    "valley-hyper": hyper, "valley-statistics": statistics, "valley-peers": peers, "valley-coverage": coverage,
}  # fmt: skip


def filled(page: str) -> str:
    """The page with every table that it has marks for."""
    every = TABLES | merge_tables.TABLES | landscape_tables.TABLES
    return marked(page, {name: make() for name, make in every.items() if f"<!-- {name} -->" in page})


def columns(lines: Sequence[str]) -> int:
    """Number of columns of a table, for tests."""
    return lines[0].count("|") - 1
