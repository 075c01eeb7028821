"""Does the best rate of a dense model serve sparse ones? ``python -m benchmarks.transfer_tables --only NAME``.

Each case is a grid of settings of ``sparing.jobs.transfer``; its rows go to results/transfer_NAME.json as they come, so
it may be stopped and run again. Several processes may take parts of a case: ``--part 0/2`` and ``--part 1/2`` write
results/transfer_NAME.part0of2.json …, and ``--merge`` puts them together.

CPU budget of each case, one thread: ``budget`` of ``CASES`` in hours, at ~60 GF/s; ``--list`` prints it with the runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory_tables import table
from sparing.jobs.transfer.analysis import analyse
from sparing.jobs.transfer.figures import TITLES
from sparing.jobs.transfer.inputs import Inputs, gather
from sparing.jobs.transfer.settings import Cell, Transfer, Updates, cells, lines
from sparing.jobs.transfer.train import train
from sparing.report import Progress, Record, environment
from sparing.report.atomic import write_whole

RESULTS = Path(__file__).parent / "results"

FIVE = ("sp", "mup", "supar", "init-only", "rate-only")
HALVES = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)


def steps(first: float, last: float, by: float = 1.0) -> tuple[float, ...]:
    """Rates from first to last."""
    return tuple(first + by * at for at in range(round((last - first) / by) + 1))


MLP = Transfer(
    steps=200, batch=128, base_width=128, layers=3, log2_rates=steps(-11, -3), densities=HALVES, rules=FIVE,
    coordinates=False,
)  # fmt: skip
PARAMETERS = ("128:1", "181:0.5", "256:0.25", "362:0.125", "512:0.0625")
FAN_IN = ("64:1", "128:0.5", "256:0.25", "512:0.125")
"""Widths and densities of equal hidden parameters, and of 64 live inputs each."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One table: studies by name."""

    question: str
    """What it answers."""
    studies: Mapping[str, Transfer]
    """Settings by name of the study."""
    budget: float
    """CPU hours on one thread, estimated."""


def variants(base: Transfer, named: Mapping[str, Mapping[str, Any]]) -> dict[str, Transfer]:
    """Settings that differ from one in a few fields, by name."""
    return {name: dataclasses.replace(base, **changes) for name, changes in named.items()}


def dynamic() -> dict[str, Transfer]:
    """RigL, SET and GMP under every rule and scale."""
    base = dataclasses.replace(
        MLP, widths=(256,), base_width=256, densities=(1.0, 0.0625), mask_updates=Updates(every=10),
        log2_rates=steps(-11, -4), seeds=(0, 1, 2),
    )  # fmt: skip
    named = {}
    for method in ("rigl", "set", "gmp"):
        named[f"{method}, fixed factors"] = {"dynamic": method, "rules": ("sp", "mup", "supar")}
        for scale in ("density", "energy", "spectral")[method != "gmp" :]:  # others keep their density
            named[f"{method}, {scale}"] = {"dynamic": method, "follow": scale, "rules": ("supar",)}
    return variants(base, named) | variants(base, {"static, spectral": {"follow": "spectral", "rules": ("supar",)}})


def decays() -> dict[str, Transfer]:
    """Laws of weight decay: the sweep is over λ in factors of two, at the dense model's best rate."""
    base = dataclasses.replace(
        MLP, widths=(256,), base_width=256, densities=(1.0, 0.0625), log2_rates=(-7.0,), rules=("supar",)
    )
    amounts = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
    return {
        f"{law}, λ = {amount:g}": dataclasses.replace(base, decay=law, weight_decay=amount)  # type: ignore[arg-type]
        for law in ("independent", "coupled", "sqrt")
        for amount in amounts
        if amount or law == "independent"
    }


CASES: Mapping[str, Case] = {
    "mlp": Case(
        "Does the best rate hold over density and width, on the digits?",
        {
            "d = 256": dataclasses.replace(MLP, widths=(256,)),
            "d = 128": dataclasses.replace(MLP, widths=(128,), seeds=(0, 1)),
            "d = 512": dataclasses.replace(
                MLP, widths=(512,), densities=(1.0, 0.25, 0.0625, 0.015625), rules=FIVE[:3], log2_rates=steps(-10, -4),
                seeds=(0,),
            ),
        },
        budget=0.5,
    ),
    "sigma": Case(
        "Does the best initial scale hold over density?",
        variants(MLP, {
            "d = 256": {
                "axis": "std", "log2_rates": (-7.0,), "log2_stds": steps(-4, 4), "widths": (256,), "rules": FIVE[:3],
                "densities": (1.0, 0.25, 0.0625),
            }
        }),
        budget=0.1,
    ),
    "iso": Case(
        "Along equal parameters and equal fan-in?",
        variants(MLP, {
            "equal parameters": {"pairs": PARAMETERS, "rules": FIVE[:3], "log2_rates": steps(-11, -4), "seeds": (0,)},
            "equal fan-in": {
                "pairs": FAN_IN, "base_width": 64, "rules": FIVE[:3], "log2_rates": steps(-11, -4), "seeds": (0,),
            },
        }),
        budget=0.1,
    ),
    "dynamic": Case("With RigL, SET and gradual pruning?", dynamic(), budget=0.25),
    "decay": Case("Which law of weight decay holds over density?", decays(), budget=0.05),
}  # fmt: skip


def path_of(case: str, part: str = "") -> Path:
    """Where the rows of a case, or of a part of it, stand."""
    share = f".part{part.replace('/', 'of')}" if part else ""
    return RESULTS / f"transfer_{case}{share}.json"


def key(study: str, cell: Cell) -> str:
    """Name of a run in the file."""
    return f"{study} | {cell.rule} {cell.width} {cell.density:g} {cell.x:g} {cell.seed}"


def todo(case: Case) -> list[tuple[str, Transfer, Cell]]:
    """Every run of a case, seed by seed over all studies, so that an unfinished one is balanced."""
    every = [(name, settings, cell) for name, settings in case.studies.items() for cell in cells(settings)]
    return sorted(every, key=lambda one: one[2].seed)


def values(result: Mapping[str, Any]) -> list[Any]:
    """What a run leaves in the file: loss, held-out loss, 1 if it diverged, CPU seconds."""
    digits = [None if result[name] is None else float(f"{result[name]:.5g}") for name in ("loss", "held_out_loss")]
    return [*digits, int(result["diverged"]), round(result["seconds"], 2)]


def write(case: str, rows: Mapping[str, Any], part: str = "") -> None:
    """Write the file of a case whole."""
    plain = {
        name: Record(question="", settings=settings, seed=0, environment={}).settings
        for name, settings in CASES[case].studies.items()
    }
    first = next(iter(plain.values()))
    changes = {name: {k: v for k, v in own.items() if v != first[k]} for name, own in plain.items()}
    head = {
        "command": shlex.join(["python", "-m", "benchmarks.transfer_tables", *sys.argv[1:]]),
        "question": CASES[case].question, "environment": dict(environment()), "settings": first, "studies": changes,
        "columns": ["loss, nat", "held-out loss, nat", "diverged", "CPU s"],
    }  # fmt: skip
    text = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
    lines_ = ",\n".join(f"  {json.dumps(name, ensure_ascii=False)}: {json.dumps(row)}" for name, row in rows.items())
    write_whole(path_of(case, part), f'{text},\n "rows": {{\n{lines_}\n }}\n}}\n')


def read(case: str, part: str = "") -> dict[str, Any]:
    """Rows that are there."""
    path = path_of(case, part)
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def fill(case: str, part: str, hours: float) -> None:
    """Do the runs of a case that are not there, until the CPU time is spent."""
    rows, whole = read(case, part), read(case)
    share, of = (int(number) for number in (part or "0/1").split("/"))
    mine = [one for at, one in enumerate(todo(CASES[case])) if at % of == share]
    left = [one for one in mine if key(one[0], one[2]) not in rows and key(one[0], one[2]) not in whole]
    saved = time.monotonic()
    data = functools.lru_cache(_inputs)
    with Progress(f"transfer {case}", total=len(mine), unit="run", resume_at=len(mine) - len(left)) as bar:
        for study, settings, cell in left:
            same = next((twin for twin in twins(study, settings, cell) if twin in rows), None)
            if same is not None:
                rows[key(study, cell)] = rows[same]
            else:
                result = train(settings, data(settings.family, settings.data, settings.length), cell)
                rows[key(study, cell)] = values(result)
            bar.advance(study=study, rule=cell.rule)
            if time.monotonic() - saved > 30:
                write(case, rows, part)
                saved = time.monotonic()
            if time.process_time() > 3600 * hours:
                break
    write(case, rows, part)


def twins(study: str, settings: Transfer, cell: Cell) -> list[str]:
    """Runs that are this one, bit for bit: every rule but SP is μP on a dense net, and SP too at the base width."""
    if cell.density != 1 or (settings.dynamic, settings.follow) != ("none", "none"):
        return []
    rules = FIVE if cell.width == settings.base_width else FIVE[1:]
    return [key(study, dataclasses.replace(cell, rule=rule)) for rule in rules if cell.rule in rules]


def _inputs(model: str, text: str, length: int) -> Inputs:
    return gather(Transfer(family=model, data=text, length=length))  # type: ignore[arg-type]


def merge(case: str) -> None:
    """Put the parts of a case into its file and delete them."""
    rows = read(case)
    parts = sorted(RESULTS.glob(f"transfer_{case}.part*.json"))
    for path in parts:
        rows |= json.loads(path.read_text())["rows"]
    order = {key(study, cell): at for at, (study, _, cell) in enumerate(todo(CASES[case]))}
    write(case, dict(sorted(rows.items(), key=lambda item: order.get(item[0], len(order)))))
    for path in parts:
        path.unlink()


# ---- from rows to tables


@functools.cache
def record_of(case: str, study: str) -> Record:
    """Analyse the finished runs of a study; seeds that are not whole are left out, all of it where none is."""
    settings, rows = CASES[case].studies[study], read(case)
    done = {cell: rows[key(study, cell)] for cell in cells(settings) if key(study, cell) in rows}
    whole = tuple(
        seed for seed in settings.seeds
        if all(cell in done for cell in cells(dataclasses.replace(settings, seeds=(seed,))))
    )  # fmt: skip
    kept = dataclasses.replace(settings, seeds=whole or settings.seeds[:1])
    results = {
        cell: {"loss": row[0], "held_out_loss": row[1], "diverged": bool(row[2]), "seconds": row[3]}
        for cell, row in done.items() if cell.seed in kept.seeds
    }  # fmt: skip
    record = Record(question="", settings=kept, seed=list(kept.seeds), environment={})
    if whole:
        analyse(record, kept, results)
    return record


def signed(row: Mapping[str, Any], name: str, form: str = "+.1f") -> str:
    """A number with its interval; a dash where it is not known."""
    if row[name] is None:
        return "–"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    shown = "∞" if math.isinf(row[name]) else f"{row[name]:{form}}"
    return shown if low is None or math.isinf(row[name]) else f"{shown} [{low:{form}}, {high:{form}}]"


def drifts(case: str) -> str:
    """Drift of the best value in octaves by study and rule, over densities, and the summary of each line."""
    found = []
    for study, settings in CASES[case].studies.items():
        record = record_of(case, study)
        for line in lines(settings):
            if line.along == "width":
                continue
            moved = [row for row in record.table("transfer") if (row["rule"], row["line"]) == (line.rule, line.name)]
            found += [_summary(study, record, line.rule, line.name, moved)] if moved else []
    head = ["", "sparsest drift, octaves", "largest drift", "slope", "largest regret", "collapse", "diverged", "n"]
    return table(head, found)


def _summary(study: str, record: Record, rule: str, line: str, moved: Sequence[Mapping[str, Any]]) -> list[object]:
    (own,) = (row for row in record.table("summary") if (row["rule"], row["line"]) == (rule, line))
    mark = "≥ " if moved[-1]["censored"] else ""
    regret = own["regret"]
    cost = "diverges" if regret == math.inf else "–" if regret is None else f"{100 * regret:.0f} %"
    return [
        f"{TITLES[rule]}, {study}",
        mark + signed(moved[-1], "drift"), signed(own, "drift"), signed(own, "slope", "+.2f"), cost,
        signed(own, "collapse", ".2f"), f"{own['diverged']} of {own['runs']}", moved[-1]["n"],
    ]  # fmt: skip


def losses(case: str) -> str:
    """Loss with the dense rate and re-tuned, by study, rule and density."""
    found = []
    for study in CASES[case].studies:
        record = record_of(case, study)
        for row in record.table("transfer"):
            if row["along"] == "width":
                continue
            place = f"{row['width']} at ρ = {row['density']:.3g}"
            pair = [_loss(row["loss_transferred"]), _loss(row["loss_retuned"])]
            found.append([f"{TITLES[row['rule']]}, {study}, {place}", *pair, signed(row, "regret", ".2f"), row["n"]])
    return table(["training loss, nat", "reference's best", "re-tuned", "regret", "n"], found)


def _loss(value: float | None) -> str:
    return "–" if value is None else "diverges" if math.isinf(value) else f"{value:.3g}"


def decay_losses(case: str = "decay") -> str:
    """Best held-out loss by law and λ over density: the law holds whose best λ is the same at every density."""
    rows, settings = read(case), CASES[case].studies
    densities = next(iter(settings.values())).densities
    found = []
    for study, chosen in settings.items():
        own = [(density, _held_out(rows, study, chosen, density)) for density in densities]
        if any(value is not None for _, value in own):
            found.append([study, *("–" if value is None else f"{value:.4f}" for _, value in own)])
    return table(["held-out loss, nat, at ρ =", *(f"{density:g}" for density in densities)], found)


def _held_out(rows: Mapping[str, Any], study: str, settings: Transfer, density: float) -> float | None:
    """Least mean over seeds, over rates."""
    by: dict[float, list[float]] = {}
    for cell in cells(settings):
        row = rows.get(key(study, cell))
        if row is not None and cell.density == density:
            by.setdefault(cell.x, []).append(math.inf if row[2] or row[1] is None else row[1])
    best = min((statistics.fmean(found) for found in by.values()), default=math.inf)
    return best if math.isfinite(best) else None


def parts(names: Iterable[str] = CASES) -> dict[str, str]:
    """Markdown by the name of its marks, ``<!-- transfer-mlp -->`` and so on, of the cases that have rows."""
    kinds: Mapping[str, Callable[[str], str]] = {"decay": decay_losses}
    found = {}
    for name in names:
        if path_of(name).exists():
            found[f"transfer-{name}"] = kinds.get(name, drifts)(name)
            if name != "decay":
                found[f"transfer-{name}-losses"] = losses(name)
    return found


def filled(page: str) -> str:
    """The page of scaling results with the tables of transfer made anew; marks it does not have are passed over."""
    from benchmarks.marks import marked

    return marked(page, {name: text for name, text in parts().items() if f"<!-- {name} -->\n" in page})


def main() -> None:
    """Fill one case, or say what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="the case to fill")
    parser.add_argument("--part", default="", help="share of it, such as 0/2")
    parser.add_argument("--merge", action="store_true", help="put the parts of the case together")
    parser.add_argument("--hours", type=float, default=1000.0, help="CPU hours after which to stop")
    parser.add_argument("--show", action="store_true", help="print the tables of the case")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    if given.only is None:
        for name, case in CASES.items():
            print(f"{name}: {len(todo(case))} runs, about {case.budget:g} CPU h: {case.question}")
    elif given.merge:
        merge(given.only)
    elif given.show:
        print("\n\n".join(parts([given.only]).values()))
    else:
        fill(given.only, given.part, given.hours)


if __name__ == "__main__":
    main()
