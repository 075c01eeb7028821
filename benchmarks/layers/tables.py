"""Tables, verdict and pictures of ``docs/results/layers.md``, from rows alone; ``python -m benchmarks.layers.tables``.

Losses are nats per token of the text; differences are thousandths of a nat, paired by seed, with 95 % intervals
(Student's t over seeds). Rates were chosen on development rows; test rows judged once.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.layers import continual, last, rates, rounded, search
from benchmarks.layers.ablations import ABLATIONS, DRAWN
from benchmarks.layers.arms import MATCHED, Arm
from benchmarks.layers.store import Rows, Store
from benchmarks.layers.study import LADDER_1, SEEDS, Study, confirmed, elsewhere
from benchmarks.layers.texts import CORPORA
from benchmarks.marks import marked
from benchmarks.memory_tables import table
from benchmarks.pictures import drawn
from benchmarks.valley.numbers import MINUS, T95, bounds
from sparing.errors import UserError
from sparing.report import Figure
from sparing.report.palette import Role
from sparing.report.plots import Axis, Bar, bars

MARGIN = 10.0
"""Difference that matters (thousandths of a nat)."""
ROLES: Mapping[str, Role] = {"lisa": "ours", "lora": "rival", "full": "reference", "other": "baseline"}
NOTHING = "Not measured yet."


Start = tuple[str, int]
"""Weights and seed of a run: what a pair shares."""


def judged(study: Study, rows: Rows, arm: str, what: str = "test") -> dict[Start, float]:
    """A loss of an arm, or another figure, at the rate that its sweep chose, by the weights and the seed of the run."""
    (found,) = [one for one in study.arms if one.name == arm]
    half = study.chosen(rows, found)
    begun = beginnings(study, rows)
    mine = [r for r in study.own(rows) if (r["arm"], r["kind"], r.get("half")) == (arm, "test", half)]
    # what does not train has one run for every base
    mine = [
        r for r in mine if r["seed"] in study.seeds and (not study.varies(found) or begun[r["seed"]] == r["weights"])
    ]
    return {(r["weights"], r["seed"]): r[what] for r in mine if r[what] is not None}


def beginnings(study: Study, rows: Rows) -> dict[int, str]:
    """Seed -> the weights from which most arms of the study have run it: a seed counts once, for all arms alike."""
    held = Counter((row["seed"], row["weights"]) for row in study.own(rows) if row["kind"] == "test")
    return {seed: max((at for at in held if at[0] == seed), key=held.__getitem__)[1] for seed, _ in held}


def changes(study: Study, rows: Rows, arm: str, what: str = "test") -> list[float]:
    """By how much training changed a loss, run by run (nat)."""
    before = {weights: loss for (weights, _), loss in judged(study, rows, "no training", what).items()}
    return [loss - before[weights] for (weights, _), loss in sorted(judged(study, rows, arm, what).items())]


def gaps(a: Mapping[Start, float], b: Mapping[Start, float]) -> list[float]:
    """A less B in thousandths, of the runs that both have, in order.

    Example:
        >>> gaps({("w", 0): 1.5, ("w", 1): 1.25, ("w", 7): 9.0}, {("w", 1): 1.0, ("w", 0): 1.0, ("v", 7): 3.0})
        [500.0, 250.0]
    """
    return [1000 * (a[start] - b[start]) for start in sorted(a.keys() & b.keys())]


def shown(values: Sequence[float]) -> str:
    """Mean difference with its interval, and how many pairs.

    Example:
        >>> shown([1.0, 2.0, 3.0]), shown([])
        ('+2.0 [−0.5, +4.5], 3', '–')
    """
    if not values:
        return "–"
    text = f"{fmean(values):+.1f}"
    if len(values) in T95:
        low, high = bounds(values)
        text += f" [{low:+.1f}, {high:+.1f}]"
    return f"{text}, {len(values)}".replace("-", MINUS)


def verdict(values: Sequence[float]) -> str:
    """What paired differences (thousandths, ours less theirs) say of ours.

    Example:
        >>> [verdict([at - 1.0, at, at + 1.0]) for at in (-20.0, 0.0, 12.0, 20.0)]
        ['better', 'equal to 10 thousandths', 'worse, perhaps by less than matters', 'worse']
    """
    if len(values) not in T95:
        return "not measured"
    low, high = bounds(values)
    if low >= -MARGIN and high <= MARGIN:
        return f"equal to {MARGIN:g} thousandths"
    word = "better" if high < 0 else "worse" if low > 0 else ""
    clear = high < -MARGIN or low > MARGIN
    return (word if clear else f"{word}, perhaps by less than matters") if word else "undecided"


def price_of(study: Study, rows: Rows, arm: str, what: str = "bytes") -> int:
    """Bytes at the peak of a step, or parameters that train at once."""
    (row,) = [r for r in study.own(rows) if (r["arm"], r["kind"]) == (arm, "price")]
    return int(row[what])


def finished(study: Study, rows: Rows) -> list[Arm]:
    """The arms that have been judged on every seed, best development sweep first."""
    seeds = {arm.name: {seed for _, seed in judged(study, rows, arm.name)} for arm in study.arms if arm.method}
    have = [arm for arm in study.arms if seeds.get(arm.name) == set(study.seeds)]
    return sorted(have, key=lambda arm: dev_of(study, rows, arm))


def so_far(study: Study, rows: Rows) -> Study:
    """The study with the seeds on which all its arms have been judged; as it is where there are none."""
    trained = [arm for arm in study.arms if arm.method]
    if any(study.chosen(rows, arm) is None for arm in trained):
        return study
    seeds = [{seed for _, seed in judged(study, rows, arm.name)} for arm in trained]
    whole = tuple(seed for seed in study.seeds if all(seed in judged_on for judged_on in seeds))
    return replace(study, seeds=whole) if whole else study


def dev_of(study: Study, rows: Rows, arm: Arm) -> float:
    """Development loss at the chosen rate."""
    return min(study.swept(rows, study.source(arm)).values())


def best(study: Study, rows: Rows, family: str, *, within: float = float("inf")) -> Arm | None:
    """The arm of a family that the development rows choose, of no more bytes than a limit."""
    fits = [a for a in finished(study, rows) if a.family == family and price_of(study, rows, a.name) <= within]
    return fits[0] if fits else None


def decision(study: Study, rows: Rows) -> str:
    """What decides: best LISA less best LoRA, at no more bytes."""
    theirs = best(study, rows, "lora")
    ours = theirs and best(study, rows, "lisa", within=price_of(study, rows, theirs.name))
    if not theirs or not ours:
        return "not decided: an arm is not measured yet"
    values = gaps(judged(study, rows, ours.name), judged(study, rows, theirs.name))
    sizes = [f"{price_of(study, rows, arm.name) / 1e6:.0f} MB" for arm in (ours, theirs)]
    return f"{ours.name} ({sizes[0]}) less {theirs.name} ({sizes[1]}): {shown(values)}: {verdict(values)}"


def equal_steps(study: Study, rows: Rows) -> str:
    """Every arm at its best rate, the least test loss first: losses, forgetting, bytes, seconds."""
    lines = []
    means = {arm: fmean(judged(study, rows, arm.name).values()) for arm in finished(study, rows)}
    for arm in sorted(means, key=means.__getitem__):
        test, forgot = judged(study, rows, arm.name), changes(study, rows, arm.name, "old")
        found = study.swept(rows, study.source(arm))
        edge = "" if rates.inside(found) else " (edge)"
        seconds = fmean(judged(study, rows, arm.name, "seconds").values())
        lines.append([
            arm.name, f"2^{rates.best(found) / 2:g}{edge}", f"{fmean(test.values()):.4f}",
            *(shown(gaps(test, judged(study, rows, other))) for other in ("full", "LoRA, rank 8")),
            f"{1000 * fmean(forgot):+.0f}".replace("-", MINUS), f"{price_of(study, rows, arm.name) / 1e6:.0f}",
            f"{price_of(study, rows, arm.name, 'trainable') / 1e6:.2f}", f"{seconds:.0f}",
        ])  # fmt: skip
    if not lines:
        return ""
    head = [f"{study.name}, {study.corpus}", "rate", "test loss, nat", "less full, thousandths", "less LoRA of rank 8",
            "forgetting", "peak, MB", "trained at once, M", "CPU s"]  # fmt: skip
    return table(head, lines)


def equal_bytes(study: Study, rows: Rows) -> str:
    """LoRA beside what fits its bytes, and would not have fitted those of a smaller one."""
    done = finished(study, rows)
    sizes = {arm.name: price_of(study, rows, arm.name) for arm in done}
    limits = sorted({name for name in MATCHED.values() if name in sizes}, key=sizes.__getitem__)
    lines, least = [], 0
    for limit in limits:
        theirs = judged(study, rows, limit)
        for arm in done:
            if arm.name not in limits and least < sizes[arm.name] <= sizes[limit]:
                found = gaps(judged(study, rows, arm.name), theirs)
                mine = f"{sizes[arm.name] / 1e6:.0f}"
                lines.append([f"{limit}, {sizes[limit] / 1e6:.0f} MB", arm.name, mine, shown(found), verdict(found)])
        least = sizes[limit]
    head = ["limit", "within it", "MB", "less LoRA, thousandths", "verdict"]
    return table(head, lines) if lines else ""


def ablations(rows: Rows) -> str:
    """Every change of LISA, or of full fine-tuning, against it."""
    study = replace(LADDER_1, arms=ABLATIONS, seeds=SEEDS[:4])
    lines = []
    for arm in (one for one in ABLATIONS if one.method is not None and one.name not in {"full", "LISA"}):
        base = "full" if arm.family == "full" else "LISA"
        half = study.chosen(rows, arm)
        found = gaps(judged(study, rows, arm.name), judged(study, rows, base))
        if found:
            lines.append([arm.name, "–" if half is None else f"2^{half / 2:g}", shown(found), verdict(found)])
    losses = draws_of(rows)
    if len(losses) > 1:
        spread = f"{1000 * (max(losses) - min(losses)):.1f} from least to most, {len(losses)} draws"
        lines.append(["LISA, other draws, the same rows", "–", spread, "–"])
    head = ["ladder 1", "rate", "less LISA or full, thousandths", "verdict"]
    return table(head, lines) if lines else NOTHING


def draws_of(rows: Rows) -> list[float]:
    """Test losses of the same rows from the same weights with blocks drawn otherwise (nat)."""
    draws = replace(LADDER_1, arms=DRAWN, seeds=SEEDS[:1])
    runs = [pair for arm in DRAWN[1:] for pair in judged(draws, rows, arm.name).items()]
    return max(([loss for at, loss in runs if at == start] for start, _ in runs), key=len, default=[])


def tries(rows: Rows) -> str:
    """Every candidate of the search, on development rows alone, and what the best of them is worth on test rows."""
    known = {arm: gap for arm in search.CANDIDATES if (gap := search.ahead(rows, arm)) is not None}
    if len(known) < len(search.CANDIDATES):
        return NOTHING
    names, theirs = {arm.name for arm in search.best_of(rows)}, search.again(rows, search.LORA)
    lines = []
    for arm in sorted(known, key=known.__getitem__):
        first = f"{1000 * known[arm]:+.1f}".replace("-", MINUS)
        second = shown(gaps(search.again(rows, arm), theirs)) if arm.name in names else "–"
        size, rate = price_of(search.FIRST, rows, arm.name) / 1e6, rates.best(search.FIRST.swept(rows, arm)) / 2
        lines.append([arm.name.removeprefix("search: "), f"2^{rate:g}", f"{size:.0f}", first, second])
    head = ["candidate", "rate", "MB", f"less {search.RIVAL}, one seed", "five other seeds"]
    return "\n\n".join([table(head, lines), *confirmation(rows)])


def confirmation(rows: Rows) -> list[str]:
    """The candidate that was chosen, on test rows, beside LoRA and LISA that draws uniformly; none while unknown."""
    if not all(search.again(rows, arm) for arm in search.best_of(rows)):
        return []
    study = search.confirmed(rows)
    mine, *others = study.arms
    found = {other: gaps(judged(study, rows, mine.name), judged(study, rows, other.name)) for other in others}
    said = [f"less {other.name} {shown(values)}: {verdict(values)}" for other, values in found.items() if values]
    return (
        [f"Chosen: {mine.name.removeprefix('search: ')}. On test rows, thousandths: {'; '.join(said)}."] if said else []
    )


def continued(rows: Rows) -> str:
    """Reading on by each method, and what fine-tuning makes of it."""
    study = continual.study(rows)
    lines = []
    for arm in study.arms:
        after, read = (judged(study, rows, arm.name, what) for what in ("test", "read"))
        if not after:
            continue
        values = [f"{fmean(found.values()):.4f}" for found in (read, after)]
        others = [shown(gaps(after, judged(study, rows, other))) for other in ("no training", "full")]
        lines.append([arm.name, *values, *others])
    if not lines:
        return NOTHING
    head = ["reads on by", "loss on what it read, nat", "after fine-tuning, nat", "less none, thousandths", "less full"]
    return table(head, lines)


def shares(rows: Rows) -> str:
    """What each way gains of the gain of full fine-tuning, study by study: mean over seeds, and from least to most."""
    ways = ("LoRA, rank 64", "LoRA, rank 8", "LISA", "LISA, last 3 blocks")
    renamed = {ways[-1]: "search: last three blocks"}
    lines = []
    for name, study in studies(rows).items():
        study, names = so_far(study, rows), {arm.name for arm in study.arms}
        whole = changes(study, rows, "full") if "no training" in names else []
        if not whole or name in ("ablations", "continual pre-training"):
            continue
        cells = []
        for way in ways:
            known = way if way in names else renamed.get(way, "")
            mine = changes(study, rows, known) if known in names else []
            found = [one / full for one, full in zip(mine, whole, strict=True)] if mine else []
            cells.append(f"{fmean(found):.2f} [{min(found):.2f}, {max(found):.2f}]" if found else "–")
        lines.append([name, f"{fmean(whole):.3f}".replace("-", MINUS), *cells, len(whole)])
    return table(["study", "full changes the loss by, nat", *(f"share of that: {way}" for way in ways), "seeds"], lines)


def picture(study: Study, rows: Rows) -> Figure:
    """How far the test loss of each arm is above that of full fine-tuning, the least first."""
    full = judged(study, rows, "full")
    above = {arm: gaps(judged(study, rows, arm.name), full) for arm in finished(study, rows) if arm.name != "full"}
    above = {arm: found for arm, found in above.items() if found}
    if not above:
        raise UserError("tables", got="no finished arm", why="there is nothing to draw", do="run the study first")
    shapes = []
    for arm in sorted(above, key=lambda arm: fmean(above[arm])):
        low, high = bounds(above[arm]) if len(above[arm]) in T95 else (None, None)
        label = f"{arm.name}, {price_of(study, rows, arm.name) / 1e6:.0f} MB"
        shapes.append(Bar(label, fmean(above[arm]), ROLES[arm.family], low, high, len(above[arm])))
    size, pairs = price_of(study, rows, "full") / 1e6, max(map(len, above.values()))
    title = f"How far full fine-tuning ({size:.0f} MB) is ahead of each arm at its best rate, {pairs} seeds"
    return bars(
        shapes, title=title, value=Axis("test loss above full fine-tuning", "10⁻³ nat"),
        caption=f"{study.corpus}, {study.name}; 95 % intervals over paired seeds",
    )  # fmt: skip


def pictures(study: Study = LADDER_1, rows: Rows | None = None) -> dict[Path, str]:
    """The picture for light and for dark pages, as SVG."""
    return drawn("layers", picture(study, Store().rows() if rows is None else rows))


def state(rows: Rows) -> str:
    """How far each study is."""
    lines = []
    for name, study in studies(rows).items():
        arms = [arm for arm in study.arms if arm.method]
        rated = sum(study.chosen(rows, arm) is not None for arm in arms)
        seconds = sum(row["seconds"] for row in study.own(rows) if "seconds" in row)
        part = so_far(study, rows)
        judged_all = len(finished(part, rows))
        on = f"{judged_all}, {len(part.seeds) if judged_all else 0} of {len(study.seeds)}" if study.seeds else "–"
        lines.append([name, len(arms), rated, on, f"{seconds / 3600:.1f}"])
    return table(["study", "arms", "with a rate", "judged, on seeds", "CPU h"], lines)


def studies(rows: Rows) -> dict[str, Study]:
    """Everything that is measured, in the order of the page."""
    others = {f"ladder 1, {corpus}": replace(LADDER_1, corpus=corpus, arms=elsewhere()) for corpus in CORPORA[1:]}
    found: dict[str, Study] = {f"ladder 1, {CORPORA[0]}": LADDER_1} | others
    found |= {"ablations": replace(LADDER_1, arms=ABLATIONS, seeds=SEEDS[:4]), "search": search.FIRST}
    found |= {"the last blocks alone": last.STUDY, "rounded to four bits": rounded.STUDY}
    if LADDER_1.chosen(rows, next(arm for arm in LADDER_1.arms if arm.name == "full")) is not None:
        found["continual pre-training"] = continual.study(rows)
    return found | {f"ladder 2, {CORPORA[0]}": confirmed()}


def page(study: Study, rows: Rows) -> str:
    """Decision and both tables."""
    parts = [decision(study, rows), equal_steps(study, rows), equal_bytes(study, rows)]
    return "\n\n".join(part for part in parts if part)


def parts_of(rows: Rows) -> dict[str, str]:
    """Each part of the page."""
    all_of = studies(rows)
    found = {f"layers-{corpus}": page(all_of[f"ladder 1, {corpus}"], rows) for corpus in CORPORA}
    found |= {"layers-state": state(rows), "layers-ladder-2": page(so_far(confirmed(), rows), rows)}
    found |= {"layers-ablations": ablations(rows), "layers-tries": tries(rows), "layers-shares": shares(rows)}
    found |= {"layers-last": page(last.STUDY, rows), "layers-rounded": page(rounded.STUDY, rows)}
    return found | {"layers-continued": continued(rows) if "continual pre-training" in all_of else NOTHING}


def filled(text: str) -> str:
    """The page with its tables made anew."""
    return marked(text, parts_of(Store().rows()))


def main() -> None:
    """Print every table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, text in parts_of(Store().rows()).items():
        sys.stdout.write(f"{name}\n\n{text}\n\n")


if __name__ == "__main__":
    main()
