"""Tables of ``docs/results/hypergradients.md`` about the recipe of ``condense``, from ``condense_recipe.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.condense_recipe import DEFAULT, SHIFTED
from benchmarks.memory_tables import table

RESULT = Path(__file__).parent / "results" / "condense_recipe.json"
REAL = Path(__file__).parent / "results" / "condense_real.json"
NUMBERS = {"1": "one", "2": "two", "3": "three", "4": "four"}
GOALS = {
    ("2", "1", 600.0): 85, ("3", "1", 600.0): 80, ("2", "1", 3600.0): 90, ("3", "1", 3600.0): 85,
    ("2", "10", 3600.0): 95, ("3", "10", 3600.0): 95,
}  # fmt: skip
"""Accuracy (%) asked of MNIST, by blocks, images a class and CPU seconds."""
Rows = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class Arm:
    """Runs of one arm of one block, by seed, and what as many real images teach."""

    data: str
    depth: str
    each: str  # images a class
    seconds: float
    name: str
    block: str
    runs: list[Mapping[str, Any]] = field(default_factory=list)
    real: Mapping[str, Any] | None = None
    tried: list[float] = field(default_factory=list)  # outer rates, in runs that chose one

    def score(self) -> str:
        """Mean over seeds with the ends over seeds, of one seed those over its nets."""
        done = [run for run in self.runs if "accuracy" in run]
        if not done:
            return "failed" if self.runs else "–"
        if len(done) == 1:
            return ends(done[0]["accuracy"], [done[0]["accuracy_low"], done[0]["accuracy_high"]])
        scores = [run["accuracy"] for run in done]
        return ends(fmean(scores), scores)


def ends(mean: float, over: Sequence[float]) -> str:
    """``81.2 [80.1, 82.3]``."""
    return f"{mean:.1f} [{min(over):.1f}, {max(over):.1f}]"


def ten(name: str) -> str:
    """Name of an arm that is not the default; those of ten inner steps say so."""
    return name if name == "wide and long" or name.startswith("T = ") else f"T = 10, {name}"


def arms(rows: Rows, part: str) -> list[Arm]:
    """Every arm of a part of the study, in the order of the file."""
    found: dict[tuple[str, str], Arm] = {}
    for key, row in rows.items():
        block, name, *seed = key.split(" | ")
        kind, data, depth, each, seconds = block.split(", ")
        if kind == part and seed:
            words = (data, depth.split()[0], each.split()[0], float(seconds.split()[0]))
            arm = found.setdefault((block, name), Arm(*words, name, block))
            if seed == ["real images"]:
                arm.real = row
            elif seed[0].isdigit():
                arm.runs.append(row)
            else:
                arm.tried.append(float(seed[0].removeprefix("rate ")))
    return list(found.values())


def bars(rows: Rows, *, mnist: bool) -> str:
    """The recipe and changes of it on the test images of MNIST, which has goals, or of other data, and real ones."""
    lines = []
    for arm in sorted(arms(rows, "bars"), key=lambda arm: (arm.name != DEFAULT, arm.name != SHIFTED)):
        # real images alone are those of nets that are taught other nets' images
        if not arm.runs or (arm.data == "mnist") != mnist:
            continue
        assert arm.real is not None
        goal = str(GOALS.get((arm.depth, arm.each, arm.seconds), "–"))
        change = "" if arm.name == DEFAULT else f", {ten(arm.name)}"
        lines.append([
            f"{arm.data}, {NUMBERS[arm.depth]} blocks{change}, {arm.each} a class, {arm.seconds:g} s", arm.score(),
            ends(arm.real["accuracy"], arm.real["accuracies"]), *([goal] if mnist else []),
            f"{arm.runs[0]['steps']:,}", took(arm), len(arm.runs),
        ])  # fmt: skip
    goals = ["goal, %"] if mnist else []
    return table(["", "condensed, %", "as many real images, %", *goals, "outer steps", "CPU s", "seeds"], lines)


def transfer(rows: Rows) -> str:
    """Nets taught images that were condensed for another net, and as many real ones; a row a net and origin."""
    known = arms(rows, "bars")
    lines = []
    for arm in known:
        real = {other.name: other.real for other in known if other.block == arm.block}
        made = [run["transfer"] for run in arm.runs if "transfer" in run]
        origin = f"{NUMBERS[arm.depth]} blocks, {ten(arm.name)}, {arm.seconds:g} s"
        for name in made[0] if made else ():
            control = real[name]
            assert control is not None
            scores = [each[name]["accuracy"] for each in made] if len(made) > 1 else made[0][name]["accuracies"]
            lines.append([
                origin, name, ends(fmean(scores), scores), ends(control["accuracy"], control["accuracies"]), len(made),
            ])  # fmt: skip
    return table(["condensed for", "taught to", "condensed, %", "as many real images, %", "seeds"], lines)


def compared(rows: Rows, part: str, seconds: float, each: str = "1") -> str:
    """A part of the study at one budget and number of images a class, with a row an arm and a column a net."""
    known = [arm for arm in arms(rows, part) if (arm.data, arm.each, arm.seconds) == ("mnist", each, seconds)]
    depths = list(dict.fromkeys(arm.depth for arm in known))
    lines = []
    for name in dict.fromkeys(arm.name for arm in known):
        of = {arm.depth: arm for arm in known if arm.name == name}
        lines.append([name, *(cell for depth in depths for cell in _cells(of.get(depth)))])
    for arm in known:
        if arm.real is not None:
            what = "as many real images" + ("" if arm.name == known[0].name else f", {arm.name}")
            line = next((line for line in lines if line[0] == what), None) or [what, *["–"] * (2 * len(depths))]
            line[1 + 2 * depths.index(arm.depth)] = ends(arm.real["accuracy"], arm.real["accuracies"])
            if line not in lines:
                lines.append(line)
    heads = [head for depth in depths for head in (f"{NUMBERS[depth]} blocks, %", "outer steps")]
    return table(["", *heads], lines)


def paired(rows: Rows, part: str, seconds: float) -> str:
    """Each arm of three blocks against the first, which they change in one part, of the same seed; the best first."""
    wanted, lines = ("mnist", "3", "1", seconds), []
    known = [arm for arm in arms(rows, part) if (arm.data, arm.depth, arm.each, arm.seconds) == wanted]
    for arm in known:
        # rows are made seed by seed, so that runs of equal number have equal seeds
        both = zip(arm.runs, known[0].runs, strict=False) if arm is not known[0] else ()
        apart = [one["accuracy"] - two["accuracy"] for one, two in both if "accuracy" in one and "accuracy" in two]
        spread = f" [{min(apart):+.1f}, {max(apart):+.1f}]" if len(apart) > 1 else ""
        less = f"{fmean(apart):+.1f}{spread}".replace("-", "−") if apart else "–"
        score, steps = _cells(arm)
        lines.append((-fmean(apart or [0.0]), [arm.name, score, less, steps, took(arm), len(arm.runs)]))
    real = [
        ["as many real images" + (f", {arm.name}" if arm is not known[0] else ""),
         ends(arm.real["accuracy"], arm.real["accuracies"]), *["–"] * 4]
        for arm in known if arm.real is not None
    ]  # fmt: skip
    base = known[0].name if known else "–"
    heads = ["", "condensed, %", f"against {base}, points", "outer steps", "CPU s", "seeds"]
    return table(heads, [*(line for _, line in sorted(lines, key=lambda each: each[0])), *real])


def methods(rows: Rows) -> str:
    """Every method at its best outer rate, and as many real images; MNIST, three blocks, 60 seconds."""
    wanted, lines = ("mnist", "3", "1", 60.0), []
    known = [arm for arm in arms(rows, "methods") if (arm.data, arm.depth, arm.each, arm.seconds) == wanted]
    for arm in known:
        tried = ", ".join(f"{rate:g}" for rate in sorted(arm.tried)) or "–"
        rates = {run["outer_lr"] for run in arm.runs if "outer_lr" in run}  # a run that failed has none
        if len(rates) > 1:
            raise ValueError(f"{arm.name}: runs at outer rates {sorted(rates)} stand in one row; remove those of old")
        rate = ", ".join(f"{rate:g}" for rate in rates) or "–"
        lines.append([arm.name, *_cells(arm), took(arm), rate, tried, len(arm.runs)])
    real = next((arm.real for arm in known if arm.real is not None), None)
    if real is not None:
        lines.append(["as many real images", ends(real["accuracy"], real["accuracies"]), *["–"] * 5])
    return table(["", "condensed, %", "outer steps", "CPU s", "outer rate", "tried", "seeds"], lines)


def real_at_best(rows: Rows) -> str:
    """Real images by the best of several lengths of training and shifts, beside what the other tables hold them to."""
    lines = []
    for name, row in rows.items():
        best = row["best"]
        usual = next(way for way in row["tried"] if (way["steps"], way["shift"]) == (300, 1))
        lines.append([
            name, ends(row["accuracy"], row["accuracies"]), f"{best['steps']:,}", best["shift"], f"{best['lr']:g}",
            f"{best['held_out']:.1f}", f"{usual['held_out']:.1f}",
        ])  # fmt: skip
    held = "on held-out images, %"
    heads = ["real images", "test images, %", "steps", "shift", "rate", held, f"{held}: 300 steps, shifts of 1 pixel"]
    return table(heads, lines)


def took(arm: Arm) -> str:
    """CPU seconds that the runs took, lowest and highest: steps are timed beforehand, and stretch beside other work."""
    found = sorted(run["seconds"] for run in arm.runs if "seconds" in run)
    return " to ".join(dict.fromkeys(f"{found[at]:.0f}" for at in (0, -1))) if found else "–"


def _cells(arm: Arm | None) -> tuple[str, str]:
    if arm is None or not arm.runs:
        return "–", "–"
    return arm.score(), f"{arm.runs[0]['steps']:,}" if "accuracy" in arm.runs[0] else "–"


def parts() -> dict[str, str]:
    """Each marked part of the page."""
    rows = json.loads(RESULT.read_text())["rows"]
    return {
        "condense-bars": bars(rows, mnist=True), "condense-other": bars(rows, mnist=False),
        "condense-parts": paired(rows, "ablation", 80.0), "condense-shifted": paired(rows, "shifted", 600.0),
        "condense-short": paired(rows, "shifted", 80.0),
        "condense-changes": compared(rows, "ablation", 60.0),
        "condense-wider": compared(rows, "ablation", 120.0), "condense-ten": compared(rows, "ablation", 240.0, "10"),
        "condense-methods": methods(rows), "condense-transfer": transfer(rows),
        "condense-real": real_at_best(json.loads(REAL.read_text())["rows"]),
    }  # fmt: skip
