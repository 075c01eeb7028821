"""Tables of ``docs/results/federated.md`` from the committed JSON."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks.federated.arms import MATCHED, METHODS, SWAPPED, Setting, Sweep
from benchmarks.federated.cases import CASES
from benchmarks.federated.defences import ATTACKS, OWN_RATE, TUNED
from benchmarks.federated.lora import SEEDS as LORA_SEEDS
from benchmarks.federated.paired import differences, shown, verdict
from benchmarks.federated.store import Store
from benchmarks.federated.study import same, tuned
from benchmarks.federated_scale_tables import TABLES as SCALE
from benchmarks.marks import marked
from benchmarks.memory_tables import table
from benchmarks.valley.numbers import MINUS, Row, mean

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "fedavg": "FedAvg", "fedsign": "FedSign", "own-sign": "own-sign", "hinge": "hinge",
    "own-sign, FedSign's setting": "own-sign at FedSign's setting",
    "fedsign, own-sign's setting": "FedSign at own-sign's setting",
    "fedavg, same rate": "FedAvg, FedSign's rate", "fedavg, grown": "the same at FedSign's norms",
    "fedsign, held": "FedSign at FedAvg's norms", "fedprox": "FedProx", "feddyn": "FedDyn", "scaffold": "SCAFFOLD",
    "fedpan": "FedPAN", "moon": "MOON",
}  # fmt: skip
QUESTIONS = (
    ("fedsign", "fedavg"), ("own-sign", "fedavg"), ("hinge", "fedavg"), ("fedsign", "own-sign"),
    ("fedsign", "own-sign, FedSign's setting"), ("fedsign, own-sign's setting", "own-sign"),
    ("fedsign", "fedavg, same rate"), ("fedavg, grown", "fedavg, same rate"), ("fedsign, held", "fedavg, same rate"),
    ("fedsign", "fedavg, grown"),
)  # fmt: skip
"""Pairs whose difference says what FedSign's gain is made of."""

MB = 1e6


def rows_of(part: str) -> list[Row]:
    """Rows of a part, none where it was not measured."""
    path = RESULTS / f"federated_{part}.json"
    return list(json.loads(path.read_text())["rows"].values()) if path.exists() else []


@dataclass(frozen=True, slots=True)
class Used:
    """The setting at which a method is shown."""

    setting: Setting
    sweep: Sweep
    """Of the method whose setting it is."""

    @property
    def mark(self) -> str:
        """What a reader must know of the choice; empty if the best was found, and inside its sweep."""
        best = self.sweep.best
        if (best.lr, best.strength) != (self.setting.lr, self.setting.strength):
            return f"a wider sweep found {best.label}, not measured on test rows"
        return f"best at the edge of its sweep: {_listed(self.sweep.open)} untried" if self.sweep.open else ""


def _listed(settings: Iterable[Setting]) -> str:
    return ", ".join(one.label for one in settings)


@functools.cache
def used() -> dict[tuple[str, str], Used]:
    """Case and arm -> the setting shown: the sweep's best where all of its test runs are done, else the one before."""
    store, found = Store("methods"), {}
    done = Counter(
        (r["case"], r["arm"], r.get("lr"), r.get("strength")) for r in rows_of("methods") if r["on"] == "test"
    )
    for case, arm in itertools.product(CASES, METHODS):
        if not any((row["case"], row["arm"]) == (case.name, arm) for row in store.rows.values()):
            continue
        tried = tuned(store, case, arm, measure=False)
        runs = {s: done[case.name, arm, s.lr, s.strength] for s in tried.scores}
        whole = max(runs.values())
        best = tried.best if runs[tried.best] == whole else max(runs, key=runs.__getitem__)
        found[case.name, arm] = Used(best, tried)
    for case in CASES:
        for arm in (*SWAPPED, *MATCHED):
            source = SWAPPED.get(arm, (arm, "fedsign"))[1]
            if (case.name, source) in found:
                found[case.name, arm] = found[case.name, source]
    return found


def _tested() -> list[Row]:
    """Test rows at the settings that are shown."""
    known = used()
    return [
        row
        for row in rows_of("methods")
        if row["on"] == "test" and same(row, known[str(row["case"]), str(row["arm"])].setting)
    ]


def _distinct(values: Iterable[object]) -> list[object]:
    return list(dict.fromkeys(values))


def _by_seed(rows: list[Row], case: object, alpha: object, arm: str) -> dict[int, float]:
    """Accuracy in points, by seed."""
    wanted = (case, alpha, arm)
    return {row["seed"]: 100 * row["accuracy"] for row in rows if (row["case"], row["alpha"], row["arm"]) == wanted}


def tuning() -> str:
    """What each method chose, of how many settings and runs, how well it did on validation rows, and what to mind."""
    found, seeds = [], {case.name: len(case.tuning_seeds) for case in CASES}
    for (case, arm), one in used().items():
        if arm in METHODS:
            setting, runs = one.setting, len(one.sweep.scores) * seeds[case]
            strength = "–" if setting.strength is None else setting.strength
            best = f"{100 * one.sweep.scores[setting]:.1f}"
            cells = [f"{setting.lr:g}", strength, best, len(one.sweep.scores), runs, one.mark or "inside"]
            found.append([f"{case}: {NAMES[arm]}", *cells])
    return table(["", "rate", "strength", "validation accuracy, %", "settings", "runs", "its best lies"], found)


def _marked(case: object, arm: str) -> str:
    """The method's name, with a star where something must be minded."""
    return NAMES[arm] + ("\\*" if used()[str(case), arm].mark else "")


def accuracy() -> str:
    """Test accuracy by method and alpha."""
    rows, found = _tested(), []
    for case in _distinct(row["case"] for row in rows):
        alphas = _distinct(row["alpha"] for row in rows if row["case"] == case)
        for arm in NAMES:
            of = [_by_seed(rows, case, alpha, arm) for alpha in alphas]
            if any(of):
                cells = {alpha: mean(seeds.values(), 1, sign=False) for alpha, seeds in zip(alphas, of, strict=True)}
                found.append(
                    [
                        f"{case}: {_marked(case, arm)}",
                        *(cells.get(a, "–") for a in (10.0, 1.0, 0.5, 0.1)),
                        max(map(len, of)),
                    ]
                )
    return table(["accuracy, %", "α = 10", "α = 1", "α = 0.5", "α = 0.1", "n"], found)


def differences_table() -> str:
    """Every method less FedAvg, seed by seed."""
    return _contrasts([(arm, "fedavg") for arm in NAMES if arm != "fedavg"])


def questions() -> str:
    """The differences that tell alignment from an outward push."""
    return _contrasts(QUESTIONS)


def _contrasts(pairs: Iterable[tuple[str, str]]) -> str:
    rows, found = _tested(), []
    for case in _distinct(row["case"] for row in rows):
        alphas = _distinct(row["alpha"] for row in rows if row["case"] == case)
        for one, other in pairs:
            by_alpha = {
                a: differences(_by_seed(rows, case, a, one), _by_seed(rows, case, a, other)) for a in alphas
            }  # fmt: skip
            whole = min(map(len, by_alpha.values()))
            if not whole:  # not run, or begun and not one seed at every α
                continue
            over_all = [fmean(each[at] for each in by_alpha.values()) for at in range(whole)]
            cells = [shown(by_alpha.get(a, [])) for a in (10.0, 1.0, 0.5, 0.1)]
            name = f"{case}: {NAMES[one]} − {NAMES[other]}"
            edge = "edge" if used()[str(case), one].mark or used()[str(case), other].mark else "–"
            found.append([name, *cells, shown(over_all), verdict(over_all), edge, whole])
    head = ["points of accuracy", "α = 10", "α = 1", "α = 0.5", "α = 0.1", "mean over α", "its interval", "a best at"]
    head.append("n")
    return table(head, found)


def weights() -> str:
    """Signs, norms and the gap, by method, at the smallest alpha."""
    rows, found = [row for row in _tested() if not row.get("diverged")], []
    for case in _distinct(row["case"] for row in rows):
        alpha = min(row["alpha"] for row in rows if row["case"] == case)
        for arm, title in NAMES.items():
            of = [row for row in rows if (row["case"], row["alpha"], row["arm"]) == (case, alpha, arm)]
            cells = [mean((row[name] for row in of), 3, sign=False) for name in ("ssr_global", "ssr_pairs")]
            cells += [mean((row["growth"] for row in of), 2, sign=False)]
            cells += [mean((100 * row["fusion_gap"] for row in of), 1)]
            if of:
                found.append([f"{case}, α = {alpha:g}: {title}", *cells, len(of)])
    head = ["", "SSR, client and global", "SSR, pairs", "‖θ_T‖/‖θ₀‖", "fusion gap, points", "n"]
    return table(head, found)


def faults() -> str:
    """Accuracy under each attack by rule."""
    rows, found = [row for row in rows_of("faults") if row["rule"] != "length"], []
    attacks = _distinct((row["kind"], row["share"]) for row in rows)
    clean = {(row["rule"], row["seed"]): row["accuracy"] for row in rows if row["kind"] == "none"}
    for rule in _distinct(row["rule"] for row in rows):
        for kind, share in attacks:
            of = [row for row in rows if (row["rule"], row["kind"], row["share"]) == (rule, kind, share)]
            if not of:
                continue
            held = [100 * (r["accuracy"] - clean["mean", r["seed"]]) for r in of if ("mean", r["seed"]) in clean]
            answered = mean((r["answered"] for r in of if "answered" in r), 1, sign=False).split(" ")[0]
            name = f"{rule}: {kind}" + (f", {share:.0%}" if share else "")
            cells = [mean((100 * r["accuracy"] for r in of), 1, sign=False), shown(held), answered]
            found.append([name, *cells, len(of)])
    head = ["", "accuracy, %", "less the mean without faults, points", "models counted of 20", "n"]
    return table(head, found)


def _defended() -> tuple[list[Row], dict[tuple[float, int], float]]:
    """Runs of the defences whose seed is whole, and what the plain mean reaches with nobody attacking."""
    rows = [row for row in rows_of("defences") if row["rule"] != "length" and row["kind"] in ATTACKS]
    counts = Counter(row["seed"] for row in rows)
    rows = [row for row in rows if counts[row["seed"]] == max(counts.values())]
    clean = {(r["alpha"], r["seed"]): r["accuracy"] for r in rows if (r["rule"], r["kind"]) == ("mean", "none")}
    return rows, clean


def local_steps() -> str:
    """FLTrust less the mean, nobody attacking, by what clients do in a round."""
    runs = [row for row in rows_of("defences") if row.get("kind") == "local"]
    runs += [
        row | {"epochs": 5, "momentum": 0.9} for row in _defended()[0] if (row["kind"], row["alpha"]) == ("none", 10.0)
    ]
    found = []
    for epochs, momentum in sorted({(row["epochs"], row["momentum"]) for row in runs}):
        one, other = (
            {
                r["seed"]: 100 * r["accuracy"]
                for r in runs
                if (r["epochs"], r["momentum"], r["rule"]) == (epochs, momentum, rule)
            }
            for rule in ("FLTrust", "mean")
        )
        cells = [mean(each.values(), 1, sign=False) for each in (other, one)]
        found.append(
            [f"local epochs {epochs}, momentum {momentum:g}", *cells, shown(differences(one, other)), len(one)]
        )
    return table(
        ["α = 10, nobody attacks", "mean, accuracy %", "FLTrust, accuracy %", "difference, points", "n"], found
    )


def defences() -> str:
    """Every rule under every attack, less the plain mean with nobody attacking, by α; of seeds that are whole."""
    (rows, clean), found = _defended(), []
    kinds = [kind for kind in ATTACKS if kind != "none"]
    for alpha, rule in itertools.product(*(_distinct(row[name] for row in rows) for name in ("alpha", "rule"))):
        of = [row for row in rows if (row["alpha"], row["rule"]) == (alpha, rule)]
        less = {
            kind: [100 * (r["accuracy"] - clean[alpha, r["seed"]]) for r in of if r["kind"] == kind]
            for kind in ("none", *kinds)
        }
        worst = min(fmean(less[kind]) for kind in kinds)
        taken = mean((100 * r["backdoor"] for r in of if "backdoor" in r), 0, sign=False).split(" ")[0]
        cells = [shown(less[kind]) for kind in less]
        found.append([f"α = {alpha:g}: {rule}", *cells, f"{worst:+.1f}".replace("-", MINUS), taken, len(less["none"])])
    return table(["points", "nobody", *kinds, "worst", "marked rows taken, %", "n"], found)


def recommended() -> str:
    """By α and attack: what the plain mean loses, what FLTrust and the best rule without clean rows lose."""
    (rows, clean), found = _defended(), []
    seeing = ("mean", "FLTrust", OWN_RATE)
    blind = [rule for rule in _distinct(row["rule"] for row in rows) if rule not in seeing]
    for alpha, kind in itertools.product(_distinct(row["alpha"] for row in rows), ATTACKS):
        of = [row for row in rows if (row["alpha"], row["kind"]) == (alpha, kind)]
        less = {
            rule: [100 * (r["accuracy"] - clean[alpha, r["seed"]]) for r in of if r["rule"] == rule]
            for rule in (*seeing, *blind)
        }
        best = max(blind, key=lambda rule: fmean(less[str(rule)]))
        ahead = [one - other for one, other in zip(less[OWN_RATE], less["mean"], strict=True)]
        cells = [*(shown(less[rule]) for rule in seeing), shown(ahead), f"{best}: {shown(less[str(best)])}"]
        found.append([f"α = {alpha:g}: {kind if kind != 'none' else 'nobody'}", *cells, len(less["mean"])])
    head = ["points", "mean", "FLTrust at FedAvg's rate", "FLTrust at its own", "the latter less the mean"]
    return table([*head, "best of the others, picked from this table", "n"], found)


def trust_rate() -> str:
    """Validation accuracy of FLTrust and of the mean by rate, nobody attacking."""
    rows, found = [row for row in rows_of("defences") if row.get("kind") == "tune"], []
    for lr in sorted({row["lr"] for row in rows}):
        of = [[100 * row["accuracy"] for row in rows if (row["rule"], row["lr"]) == (rule, lr)] for rule in TUNED]
        found.append([f"{lr:g}", *(f"{fmean(each):.1f}" if each else "–" for each in of), len(of[0])])
    return table(["rate", *(f"{rule}, %" for rule in TUNED), "n"], found)


def traffic() -> str:
    """Bytes by number of blocks drawn."""
    rows, found = [row for row in rows_of("bytes") if row["on"] == "test"], []
    whole = {row["seed"]: row for row in rows if row["blocks"] is None}
    for blocks in _distinct(row["blocks"] for row in rows):
        of = [row for row in rows if row["blocks"] == blocks and not row.get("diverged")]
        both = [100 * (r["accuracy"] - whole[r["seed"]]["accuracy"]) for r in of if r["seed"] in whole]
        up, down = (fmean(row[f"bytes_{way}"] for row in of) / MB for way in ("up", "down"))
        share = up / (fmean(row["bytes_up"] for row in whole.values()) / MB)
        cells = [f"{up:.3f}", f"{share:.2f}", f"{down:.3f}", f"{of[0]['lr']:g}"]
        cells += [mean((100 * row["accuracy"] for row in of), 1, sign=False), shown(both) if blocks else "–"]
        found.append(["all four" if blocks is None else f"{blocks} of four", *cells, len(of)])
    head = ["blocks drawn", "MB up a round", "share", "MB down", "rate", "accuracy, %", "less all four, points", "n"]
    return table(head, found)


def speed() -> str:
    """Client updates per second, and ratios turn by turn."""
    path, found = RESULTS / "federated_speed.json", []
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for net, row in rows.items():
        for arm, rates in row["per_second"].items():
            ratios = [a / b for a, b in zip(row["per_second"]["batched"], rates, strict=True)]
            bounds = f"{median(ratios):.1f} [{min(ratios):.1f}, {max(ratios):.1f}]"
            found.append([f"{net}: {arm}", f"{median(rates):.0f}", bounds, f"{row['load']:.1f}", len(rates)])
        found += [[f"{net}: {arm}", "–", why, "–", 0] for arm, why in row["missing"].items()]
    head = ["", "client updates per second", "batched against it, ×", "load"]
    return table([*head, "turns"], found)


def distances() -> str:
    """The largest distance of an honest client in medians of its round, by what travels."""
    rows, found = rows_of("distances"), []
    for case, method in _distinct((row["case"], row["method"]) for row in rows):  # type: ignore[misc]
        of = [row for row in rows if (row["case"], row["method"]) == (case, method)]
        parts = _distinct(name for row in of for name in row["largest"])
        told = ", ".join(f"{part} {max(row['largest'].get(part, 0) for row in of):.1f}" for part in parts)
        found.append([f"{case}: {NAMES[method]}", told, sum(row["updates"] for row in of)])
    return table(["", "largest distance, medians of its round", "updates"], found)


def lora(clients: str = "") -> str:
    """Ways to average LoRA: loss of a byte, and paired differences from averaging the factors apart."""
    kept, found = rows_of("lora"), []
    rates = {row["of"]: row["lr"] for row in kept if row["way"] == "rate"}
    told = [row for row in kept if row.get("seed") in LORA_SEEDS]
    by = {
        way.removeprefix(clients): {
            row["seed"]: row for row in told if row["way"] == way and row.get("lr") == rates.get(way)
        }
        for way in ("start", *(clients + name for name in ("alone", "FedAvg", "FedEx-LoRA", "FLoRA", "FFA-LoRA")))
        if way in rates or way == "start"
    }
    rates = {way.removeprefix(clients): lr for way, lr in rates.items() if way.startswith(clients)}
    losses = {way: {seed: row["loss"] for seed, row in rows.items()} for way, rows in by.items()}
    # all clients have equally many test rows, so the mean over clients of their own is a mean over all
    own = {seed: row["own"] for seed, row in by.get("alone", {}).items()}
    for way, rows in by.items():
        apart = differences(losses[way], losses["FedAvg"])
        first = next(iter(rows.values()))
        sent = [f"{first[name] / 1e6:.2f}" if name in first else "–" for name in ("bytes_up", "bytes_down")]
        cells = [mean(losses[way].values(), 3, sign=False), "–" if way == "FedAvg" else shown(apart, 3), *sent]
        found.append([way, *cells, f"{rates[way]:g}" if way in rates else "–", len(rows)])
        if way == "alone":
            told_own = mean(own.values(), 3, sign=False), shown(differences(own, losses["FedAvg"]), 3)
            found.append(["alone, each on its own test rows", *told_own, "–", "–", f"{rates[way]:g}", len(own)])
    head = ["", "loss, nats a byte", "less FedAvg's", "MB up a round", "MB down", "rate", "n"]
    return table(head, found)


TABLES: dict[str, Callable[[], str]] = {
    "federated-tuning": tuning, "federated-accuracy": accuracy, "federated-differences": differences_table,
    "federated-questions": questions, "federated-weights": weights, "federated-faults": faults,
    "federated-distances": distances, "federated-defences": defences, "federated-recommended": recommended,
    "federated-local": local_steps, "federated-trust-rate": trust_rate,
    "federated-lora": lora,
    "federated-lora-adamw": functools.partial(lora, "AdamW "), "federated-bytes": traffic, "federated-speed": speed,
    **SCALE,
}  # fmt: skip


def filled(page: str) -> str:
    """The page with every table that it has marks for."""
    return marked(page, {name: make() for name, make in TABLES.items() if f"<!-- {name} -->" in page})
