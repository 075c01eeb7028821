"""Claims on SμPar: Dey et al. 2024, arXiv:2405.15743."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.claims.sources import Claim, Found, Pages, Verdict, ends, number
from benchmarks.scaling_transfer.tables import (
    SPARSE,
    above,
    admission,
    finished,
    retuned,
    seen_there,
    shown,
    transferred,
)
from benchmarks.scaling_transfer.tables import drift as drift_of
from benchmarks.valley.numbers import bounds
from sparing.jobs.transfer.figures import TITLES

MEASURED = "Being measured on a Llama that has passed its bigram."


FAILED = "Nothing to compare: the dense Llama has not passed its controls."


def _done() -> bool:
    """Whether all is measured, and the dense net has passed its controls."""
    return finished(seen_there()) and admission(seen_there())[1] is True


def _waits() -> Found:
    """What to say until then."""
    return Found(FAILED if finished(seen_there()) else MEASURED, "–", stands=True)


def _shifts(see: Pages) -> Found:
    digits = see.table("scaling", "transfer-mlp")
    drift = "sparsest drift, octaves"
    ours, narrow = digits["SμPar, d = 256"][drift], digits["SμPar, d = 128"]
    rivals = [digits[f"{rule}, d = 256"][drift] for rule in ("SP", "μP")]
    said = (
        f"The best rate of SμPar moves by {ours} octaves on digits (width 256, ρ = 1/32), SP's by {rivals[0]}, μP's by "
        f"{rivals[1]}. With 8 live inputs a neuron (width 128) SμPar over-corrects: {narrow[drift]} (n = "
        f"{narrow['n']}). "
    )
    if _done():
        places = []
        for density in SPARSE:
            found = {rule: drift_of(seen_there(), rule, density) for rule in ("supar", "sp", "mup")}
            moved = (f"{TITLES[rule]} {one[0]:+.2f}" for rule, one in found.items() if one)
            places.append(f"{', '.join(moved)} octaves at ρ = {density}")
        said += f"On a Llama of width 256: {'; '.join(places)} (two seeds; four live inputs at the last)."
    else:
        said += f"On language models: {_waits().text[0].lower()}{_waits().text[1:]}"
    stands = abs(number(ours)) < 1 < 3 < min(map(number, rivals)) and number(narrow[drift]) < -1
    return Found(said, f"{digits['SμPar, d = 256']['n']} seeds", stands)


def _above(theirs: Callable[..., dict[int, float]], rule: str, densities: Sequence[str]) -> list[float]:
    """By how much SμPar at the base's rate is above another (percent), mean over densities, seed by seed."""
    seen = seen_there()
    by = [above(transferred(seen, "supar", d), theirs(seen, rule, d)) for d in densities]
    return [fmean(one) for one in zip(*by, strict=True)]


def _headline(_: Pages) -> Found:
    if not _done():
        return _waits()
    untuned, tuned = (_above(of, "sp", ("1/64",)) for of in (transferred, retuned))
    said = (
        "At ρ = 1/64 of width 256, with four live inputs a neuron, SμPar at the "
        f"rate of the base ends {shown(untuned)} % above SP at that rate, and {shown(tuned)} % above SP with its rate "
        "and embedding tuned anew (negative: SμPar is better; of two seeds both are given)."
    )
    return Found(said, f"{len(untuned)} and {len(tuned)} seeds", stands=True)


def headline_verdict() -> Verdict:
    """Better than untuned SP: in part; than tuned SP too: holds."""
    if not _done():
        return "not settled"
    if fmean(_above(transferred, "sp", ("1/64",))) >= 0:
        return "does not hold here"
    return "holds" if max(bounds(_above(retuned, "sp", ("1/64",)))) < 0 else "holds in part"


def _retuned(_: Pages) -> Found:
    if not _done():
        return _waits()
    rules = ("sp", "mup")

    def told(densities: Sequence[str]) -> str:
        return ", ".join(f"{shown(_above(retuned, rule, densities))} % above {TITLES[rule]}" for rule in rules)

    each = "; ".join(f"at ρ = {density} {told((density,))}" for density in SPARSE)
    said = f"SμPar at the rate of the base, the others re-tuned: {each}; in the mean of the three {told(SPARSE)}"
    return Found(f"{said} (negative: SμPar is better). The verdict is on the mean.", "3 seeds", stands=True)


def retuned_verdict() -> Verdict:
    """By the 95 % intervals of the mean over densities, against SP and against μP."""
    if not _done():
        return "not settled"
    ends = [bounds(_above(retuned, rule, SPARSE)) for rule in ("sp", "mup")]
    better, worse = sum(high < 0 for _, high in ends), sum(low > 0 for low, _ in ends)
    if better:
        return "holds" if better == len(ends) else "holds in part"
    return "does not hold here" if worse else "not settled"


def _moving(see: Pages) -> Found:
    rows, drift = see.table("scaling", "transfer-dynamic"), "sparsest drift, octaves"
    held = {name: rows[f"SμPar, {name}, fixed factors"][drift] for name in ("rigl", "set")}
    best = min((rows[f"SμPar, gmp, {scale}"][drift] for scale in ("density", "energy", "spectral")), key=number)
    said = (
        f"Not so for RigL ({held['rigl']} octaves) and SET ({held['set']}) here, in the mean of 200 steps, though the "
        f"intervals span one to two octaves; SP moves by {rows['SP, rigl, fixed factors'][drift]}. For gradual pruning "
        f"it holds: the best of our rules moves by {best}."
    )
    stands = max(abs(number(cell)) for cell in held.values()) < 0.5 and number(best) > 1
    return Found(said, f"{rows['SμPar, rigl, fixed factors']['n']} seeds", stands)


def _halves(see: Pages) -> Found:
    digits, drift = see.table("scaling", "transfer-mlp"), "sparsest drift, octaves"
    alone, rate = digits["μP + init only, d = 256"], digits["μP + rate only, d = 256"]
    said = (
        f"Init alone moves by {alone[drift]} octaves on digits. The rate alone moves little in the mean "
        f"({rate[drift]}), but its curves lie apart: collapse {rate['collapse']} against "
        f"{digits['SμPar, d = 256']['collapse']}."
    )
    stands = number(alone[drift]) > 1.5 and number(rate["collapse"]) > 1
    return Found(said, f"{rate['n']} seeds", stands)


def _scale(see: Pages) -> Found:
    rows, drift = see.table("scaling", "transfer-sigma"), "sparsest drift, octaves"
    ours = rows["SμPar, d = 256"][drift]
    said = (
        f"Flat and noisy on digits: {ours} octaves under SμPar, {rows['SP, d = 256'][drift]} under SP, "
        f"{rows['μP, d = 256'][drift]} under μP; half an octave can be neither shown nor refuted."
    )
    low, high = ends(ours)
    return Found(said, f"{rows['SμPar, d = 256']['n']} seeds", low < 0 < high and high - low > 2)


def _lines(see: Pages) -> Found:
    rows, drift = see.table("scaling", "transfer-iso"), "sparsest drift, octaves"
    parameters, inputs = (
        {rule: rows[f"{rule}, {line}"] for rule in ("SP", "μP", "SμPar")}
        for line in ("equal parameters", "equal fan-in")
    )
    said = (
        f"Along equal parameters SμPar moves by {parameters['SμPar'][drift]} octaves, SP and μP by "
        f"{parameters['SP']['largest drift']} and {parameters['μP']['largest drift']} at most. Along equal fan-in none "
        f"is still: {inputs['SP']['largest drift']}, {inputs['μP']['largest drift']} and "
        f"{inputs['SμPar']['largest drift']} (SP, μP, SμPar). One seed decides nothing."
    )
    return Found(said, "1 seed", parameters["SμPar"]["n"] == "1" and inputs["SμPar"]["n"] == "1")


CLAIMS = (
    Claim(
        says="The best rate of a dense model serves sparse ones under SμPar, not under SP and μP",
        place="Figures 1 and 6",
        found=_shifts,
        verdict="holds in part",
        steps=("transfer_mlp", "scaling_transfer"),
        page="scaling",
    ),
    Claim(
        says="SμPar is 11.9 % better than SP at 99.2 % sparsity",
        place="abstract, Figure 3; SP there keeps one rate and is not tuned",
        found=_headline,
        verdict=headline_verdict(),
        steps=("scaling_transfer",),
        page="scaling",
    ),
    Claim(
        says="Against re-tuned baselines SμPar gains 0.8 % (SP) and 2.1 % (μP)",
        place="Figure 8",
        found=_retuned,
        verdict=retuned_verdict(),
        steps=("scaling_transfer",),
        page="scaling",
    ),
    Claim(
        says="No parameterization transfers under RigL or gradual pruning",
        place="Figure 12",
        found=_moving,
        verdict="holds in part",
        steps=("transfer_dynamic",),
        page="scaling",
    ),
    Claim(
        says="Both corrections, of the initial scale and of the rate, are needed",
        place="Figures 13 and 14",
        found=_halves,
        verdict="holds",
        steps=("transfer_mlp",),
        page="scaling",
    ),
    Claim(
        says="The best initial scale is the same at every density under SμPar",
        place="Figure 7",
        found=_scale,
        verdict="not settled",
        steps=("transfer_sigma",),
        page="scaling",
    ),
    Claim(
        says="The best rate is stable along equal parameters; along equal fan-in under SP too",
        place="Figures 9 and 11",
        found=_lines,
        verdict="not settled",
        steps=("transfer_iso",),
        page="scaling",
    ),
)
