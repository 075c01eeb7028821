"""Tables, bars and picture of the study, from rows alone; ``python -m benchmarks.scaling_transfer.tables``.

Losses are nats per token. Rates and multipliers were chosen by training loss on two seeds; held-out loss judges, with
a third. Brackets are 95 % intervals of paired differences over three seeds (Student's t), else least and most.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.marks import marked
from benchmarks.memory_tables import table
from benchmarks.pictures import drawn, markdown
from benchmarks.scaling_transfer.study import DENSITIES, FACTOR, Place, Seen, Study, store_of
from benchmarks.valley.numbers import MINUS, T95, bounds
from sparing.jobs.lm.controls import NAMES
from sparing.jobs.transfer.figures import TITLES
from sparing.jobs.transfer.optimum import Optimum, optimum
from sparing.report import Figure, plots

NOTHING = "Not measured yet."
NEAR, DRIFT, MOVES, BELOW = 1.0, 0.5, 1.0, 0.3
"""Bars: percent of loss, octaves that SμPar may and that SP must drift, nat below the control without blocks."""
SPARSE = DENSITIES[1:]
Setting = tuple[int, int]
Losses = Mapping[int, float]


# ---- what rows say


def held_out(seen: Seen, place: Place, setting: Setting | None) -> dict[int, float]:
    """Seed -> held-out loss of a setting, of the runs that converged."""
    found = {} if setting is None else seen.runs(place, *setting, what="held_out_loss")
    return {seed: loss for seed, loss in found.items() if math.isfinite(loss)}


def place_of(rule: str, density: str) -> Place:
    """Where a rule was swept at a density: a dense net is the same under μP and SμPar."""
    return "supar" if rule == "mup" and density == "1" else rule, density  # type: ignore[return-value]


def retuned(seen: Seen, rule: str, density: str) -> dict[int, float]:
    """Seed -> held-out loss at the best setting."""
    place = place_of(rule, density)
    return held_out(seen, place, seen.chosen(place))


def transferred(seen: Seen, rule: str, density: str) -> dict[int, float]:
    """Seed -> held-out loss at the rate and multipliers of the base's best draw."""
    return held_out(seen, place_of(rule, density), (0, 0))


def best_rate(seen: Seen, place: Place) -> Optimum | None:
    """The vertex of the sweep at the base's multiplier; None while it goes on."""
    found = {float(octave): loss for octave, loss in seen.curve(place).items()}
    return None if seen.swept(place) is None else optimum(found)


def drift(seen: Seen, rule: str, density: str) -> tuple[float, list[float]] | None:
    """Octaves from the rule's dense best rate to that at a density: of mean losses, and seed by seed."""
    here, there = place_of(rule, density), place_of(rule, "1")
    ends = [best_rate(seen, place) for place in (here, there)]
    if None in ends:
        return None
    by = []
    for seed in seen.study.target.seeds:
        one, other = (
            optimum({float(octave): seen.runs(place, octave)[seed] for octave in seen.curve(place)})
            for place in (here, there)
        )
        by.append(one.x - other.x)
    return ends[0].x - ends[1].x, by  # type: ignore[union-attr]


def above(ours: Losses, theirs: Losses) -> list[float]:
    """By how much a loss is above another (percent), seed by seed of those that both have.

    Example:
        >>> above({0: 2.02, 1: 3.0, 2: 9.0}, {1: 3.0, 0: 2.0})
        [1.0, 0.0]
    """
    return [round(100 * (ours[seed] / theirs[seed] - 1), 9) for seed in sorted(ours.keys() & theirs.keys())]


def shown(values: Sequence[float], form: str = "+.2f") -> str:
    """Mean, with its interval where three are there, else with the ends of two.

    Example:
        >>> shown([1.0, 2.0, 3.0]), shown([1.0, 2.0]), shown([1.0]), shown([])
        ('+2.00 [−0.48, +4.48]', '+1.50 [+1.00, +2.00]', '+1.00', '–')
    """
    if not values:
        return "–"
    text = f"{fmean(values):{form}}"
    if len(values) > 1:
        low, high = bounds(values) if len(values) in T95 else (min(values), max(values))
        text += f" [{low:{form}}, {high:{form}}]"
    return text.replace("-", MINUS)


def loss_cell(found: Losses) -> str:
    """Mean of a loss, least and most."""
    values = list(found.values())
    ends = f" [{min(values):.3f}, {max(values):.3f}]" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{ends}" if values else "–"


# ---- bars


Bar = tuple[str, bool | None]


def admission(seen: Seen) -> Bar:
    """Whether the dense net may be compared at all: 0.3 nat below its control without blocks, and below the bigram."""
    text = seen.rows.get(seen.study.text().key)
    ours, bare = retuned(seen, "supar", "1"), retuned(seen, "no body", "1")
    if text is None or not ours or not bare:
        return "", None
    mean, control = fmean(ours.values()), fmean(bare.values())
    said = (
        f"{mean:.3f} nat/token; {NAMES['no body']} {control:.3f}, {NAMES['bigram']} {text['bigram']:.3f}, "
        f"{NAMES['unigram']} {text['unigram']:.3f}"
    )
    return said, mean <= control - BELOW and mean < text["bigram"]


def still(seen: Seen) -> Bar:
    """Whether SμPar's best rate stays within half an octave, none at the end of its sweep."""
    found = {density: drift(seen, "supar", density) for density in SPARSE}
    if None in found.values():
        return "", None
    rates = [best_rate(seen, ("supar", density)) for density in DENSITIES]
    cells = [f"{one[0]:+.2f} at {density}" for density, one in found.items() if one]
    most = max(abs(one[0]) for one in found.values() if one)
    return ", ".join(cells) + " octaves", most <= DRIFT and not any(one.censored for one in rates if one)


def near(seen: Seen) -> Bar:
    """Whether SμPar at the base's rate is within 1 % of itself and of SP re-tuned, at every density."""
    worst: dict[str, float] = {}
    for rule in ("supar", "sp"):
        pairs = [(transferred(seen, "supar", d), retuned(seen, rule, d)) for d in DENSITIES]
        gaps = [above(*pair) for pair in pairs]
        if not all(gaps):
            return "", None
        worst[rule] = max(map(fmean, gaps))
    said = ", ".join(f"{gap:+.2f} % above {TITLES[rule]} re-tuned" for rule, gap in worst.items())
    return f"at worst {said}", max(worst.values()) <= NEAR


def moves(seen: Seen) -> Bar:
    """Whether SP's best rate moves by an octave or more."""
    found = drift(seen, "sp", SPARSE[-1])
    rate = best_rate(seen, ("sp", SPARSE[-1]))
    if found is None or rate is None:
        return "", None
    return f"{'at least ' if rate.censored else ''}{found[0]:+.2f} octaves at {SPARSE[-1]}", abs(found[0]) >= MOVES


BARS: Final[Mapping[str, Callable[[Seen], Bar]]] = {
    "The dense net is 0.3 nat below its control without blocks, and below the bigram": admission,
    "SμPar's best rate drifts by half an octave at most, none at a sweep's end": still,
    "SμPar at the base's rate is within 1 % of SμPar and of SP re-tuned": near,
    "SP's best rate drifts by an octave or more": moves,
}


def bars(seen: Seen) -> str:
    """Each bar, what was measured, and whether it is met."""
    words = {None: "not measured yet", True: "met", False: "not met"}
    found = {says: judge(seen) for says, judge in BARS.items()}
    lines = [[says, re.sub(r"-(?=\d)", MINUS, text) or "–", words[met]] for says, (text, met) in found.items()]
    return table(["bar", "measured", "verdict"], lines)


# ---- tables


def state(seen: Seen) -> str:
    """How far the study is, in a sentence."""
    own = list(seen.own.values())
    spent, left = sum(row.get("seconds", 0.0) for row in own) / 3600, seen.left()
    if finished(seen):
        return f"The study is done: {len(own)} rows, {spent:.1f} CPU hours."
    done = f"{len(own)} rows are there ({spent:.1f} CPU hours)" if own else "No row is there yet"
    hours = seen.hours_left()
    return f"**Being measured**: {done}; about {len(left)} runs and {hours:.1f} CPU hours are left if no sweep widens."


def finished(seen: Seen) -> bool:
    """Whether nothing is left to do."""
    return bool(seen.own) and not seen.plan()


def drifts(seen: Seen) -> str:
    """Best rate of every rule and density, what it costs to keep the base's, and how the sweep ended."""
    lines = []
    for rule in ("supar", "sp", "mup"):
        for density in DENSITIES:
            place = place_of(rule, density)
            best, moved = best_rate(seen, place), drift(seen, rule, density)
            if best is None or moved is None:
                continue
            kept = seen.curve(place).get(0)
            cost = "–" if kept is None else "diverges" if kept == math.inf else f"{100 * (kept / best.loss - 1):+.2f}"
            ends = f" [{min(moved[1]):+.2f}, {max(moved[1]):+.2f}]"
            cells = [f"{best.x:+.2f}", best.kind, f"{moved[0]:+.2f}{ends}", f"{best.loss:.3f}", cost]
            lines.append([f"{TITLES[rule]}, ρ = {density}", *(cell.replace("-", MINUS) for cell in cells)])
    head = ["", "best rate over the base's, octaves", "optimum", "drift from dense, octaves", "training loss at best",
            "loss at the base's rate above it, %"]  # fmt: skip
    return table(head, lines) if lines else NOTHING


def losses(seen: Seen) -> str:
    """Held-out loss over density; the paper's Figure 8."""
    lines = []
    for density in DENSITIES:
        kinds = [transferred(seen, "supar", density)]
        kinds += [retuned(seen, rule, density) for rule in ("supar", "sp", "mup")]
        if not any(kinds):
            continue
        picked = seen.chosen(("sp", density))
        sp = "–" if picked is None else f"2^{picked[0]:+d}, {FACTOR}^{picked[1]:+d}".replace("-", MINUS)
        lines.append([density, *map(loss_cell, kinds), sp])
    head = ["held-out nat/token at ρ =", "SμPar, base's rate", "SμPar re-tuned", "SP re-tuned", "μP re-tuned",
            "SP's rate and embedding over the base's"]  # fmt: skip
    return table(head, lines) if lines else NOTHING


def margins(seen: Seen) -> str:
    """By how much SμPar at the base's rate is above the others, paired by seed."""
    lines = []
    for density in DENSITIES:
        ours = transferred(seen, "supar", density)
        theirs = [retuned(seen, rule, density) for rule in ("supar", "sp", "mup")]
        theirs += [transferred(seen, rule, density) for rule in ("sp", "mup")]
        cells = [above(ours, one) for one in theirs]
        if any(cells):
            lines.append([density, *map(shown, cells)])
    names = ["SμPar re-tuned", "SP re-tuned", "μP re-tuned", "SP, base's rate", "μP, base's rate"]
    return table(["SμPar at the base's rate above, %, at ρ =", *names], lines) if lines else NOTHING


def searched(seen: Seen) -> str:
    """The draws on the base, the best first."""
    found = [row for row in seen.own.values() if row["who"] == "draw"]
    lines = [
        [row["draw"], *(f"{2 ** row[name]:.3g}" for name in ("log2_rate", "log2_std", "log2_input", "log2_output")),
         "diverged" if row["diverged"] or row["loss"] is None else f"{row['loss']:.3f}"]
        for row in sorted(found, key=lambda row: math.inf if row["diverged"] else row["loss"])
    ]  # fmt: skip
    head = ["draw", "η", "σ over the model's own", "α_in", "α_out", "training loss, nat"]
    return table(head, lines) if lines else NOTHING


SYMBOLS = {"log2_rate": "η", "log2_std": "σ", "log2_input": "α_in", "log2_output": "α_out"}


def search(seen: Seen) -> str:
    """How near the best draw lies to an end of what was searched, and at how many settings each rule was tried."""
    base = next((row for row in seen.own.values() if row["who"] == "draw" and row["draw"] == seen.base), None)
    if base is None:
        return NOTHING
    boxes = {name: getattr(seen.study.target.tune, name) for name in SYMBOLS}
    shares = {name: (base[name] - low) / (high - low) for name, (low, high) in boxes.items()}
    far = max(shares, key=lambda name: abs(shares[name] - 0.5))
    others = sorted(round(100 * share) for name, share in shares.items() if name != far)
    tried = []
    for rule in ("supar", "sp", "mup"):
        counts = [len({key[1:] for key in seen._settings if key[0] == place_of(rule, d)}) for d in DENSITIES]
        tried.append(f"{TITLES[rule]} {', '.join(map(str, counts))}")
    low, high = (f"{2**end:g}" for end in boxes[far])
    return (
        f"The best draw's {SYMBOLS[far]}, {2 ** base[far]:.3g}, lies {100 * shares[far]:.0f} % of the way (in logs) "
        f"through what was searched, {low} to {high}; the other three lie {others[0]} to {others[-1]} % of theirs.\n"
        f"The base had {len(seen.draws)} draws of all four; then, at ρ = {', '.join(DENSITIES)}, this many settings "
        f"were tried: {'; '.join(tried)}."
    )


# ---- picture


def picture(seen: Seen) -> Figure:
    """Held-out loss over density, re-tuned and transferred."""
    kinds: Sequence[tuple[str, plots.Role, Callable[..., dict[int, float]], str]] = (
        ("SμPar, base's rate", "ours", transferred, "supar"), ("SμPar re-tuned", "extension", retuned, "supar"),
        ("SP re-tuned", "baseline", retuned, "sp"), ("μP re-tuned", "rival", retuned, "mup"),
    )  # fmt: skip
    series = []
    for label, role, of, rule in kinds:
        known = {density: list(of(seen, rule, density).values()) for density in DENSITIES}
        xs = [float(1 / Fraction(density)) for density, values in known.items() if values]
        mean, low, high = ([f(v) for v in known.values() if v] for f in (fmean, min, max))
        series.append(plots.Series(label, xs, mean, role, low, high, max(map(len, known.values()))))
    return plots.lines(
        series, title="Loss over density, the base's rate against rates tuned at every density",
        x=plots.Axis("weights per live weight, 1/ρ", log=2), y=plots.Axis("held-out loss", "nat/token"),
    )  # fmt: skip


def pictures() -> dict[Path, str]:
    """The picture for light and for dark pages, as SVG, once the study is done."""
    seen = seen_there()
    if not finished(seen):
        return {}
    return drawn("scaling-transfer", picture(seen))


def parts_of(seen: Seen) -> dict[str, str]:
    """Each part of the page."""
    drawing = markdown("scaling-transfer", "Held-out loss over density of SμPar, SP and μP") if finished(seen) else ""
    return {
        "decides-state": state(seen), "decides-bars": bars(seen),
        "decides-losses": drawing + losses(seen), "decides-margins": margins(seen),
        "decides-drifts": drifts(seen), "decides-draws": searched(seen),
        "decides-search": search(seen),
    }  # fmt: skip


@functools.cache
def seen_there() -> Seen:
    """The study and its committed rows."""
    return Seen(Study(), store_of().rows())


def filled(text: str) -> str:
    """The page with its tables made anew."""
    return marked(text, parts_of(seen_there()))


def main() -> None:
    """Print every table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, text in parts_of(seen_there()).items():
        sys.stdout.write(f"{name}\n\n{text}\n\n")


if __name__ == "__main__":
    main()
