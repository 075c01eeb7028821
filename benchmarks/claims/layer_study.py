"""Claims on what LISA's models are worth, held against ``benchmarks.layers``: Pan et al. 2024, arXiv:2403.17919."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from benchmarks.claims.sources import Claim, Found, Pages, rows_of
from benchmarks.layers import continual
from benchmarks.layers.ablations import ABLATIONS
from benchmarks.layers.study import LADDER_1, SEEDS, Study, confirmed
from benchmarks.layers.tables import draws_of, gaps, judged, price_of, shown, verdict

MODEL = "On a Llama of 13.7 million parameters, after 100 steps and each at its best rate,"
RANK_64, WHOLE = "LoRA, rank 64", "LoRA, rank 8, embedding and head whole"
ALONE = "SmolLM2 was not asked."
LARGER = confirmed()


def _less(ours: str, theirs: str, study: Study = LADDER_1) -> list[float]:
    """Test loss of an arm less another's, in thousandths of a nat, run by run."""
    rows = rows_of("layers")
    return gaps(judged(study, rows, ours), judged(study, rows, theirs))


def _mean(values: list[float]) -> str:
    return shown(values).rpartition(",")[0]


def _size(arm: str, study: Study = LADDER_1) -> str:
    return f"{price_of(study, rows_of('layers'), arm) / 1e6:.0f} MB"


def _lora(_: Pages) -> Found:
    small, alone = _less("LISA", "LoRA, rank 8"), _less("embedding and head only", "LoRA, rank 8")
    whole, larger = _less("LISA, 5 blocks", WHOLE), _less("LISA", "LoRA, rank 8", LARGER)
    text = (
        f"{MODEL} LISA's test loss less that of LoRA of rank 8 is {_mean(small)} thousandths of a nat, at "
        f"{_size('LISA')} against {_size('LoRA, rank 8')}. Embedding and head, which LISA always trains, are half of "
        f"that: alone they are {_mean(alone)} from LoRA. Where LoRA trains them whole too ({_size(WHOLE)}), LISA of "
        f"five blocks ({_size('LISA, 5 blocks')}) less LoRA is {_mean(whole)}. On SmolLM2 it is the other way round: "
        f"{_mean(larger)}, at {_size('LISA', LARGER)} against {_size('LoRA, rank 8', LARGER)}."
    )
    stands = verdict(small).startswith("better") and verdict(larger).startswith("worse")
    return Found(text, f"{len(small)} and {len(larger)} seeds", stands)


def _full(_: Pages) -> Found:
    two, ten, larger = _less("LISA", "full"), _less("LISA, 10 blocks", "full"), _less("LISA", "full", LARGER)
    text = (
        f"{MODEL} LISA's test loss less that of full fine-tuning is {_mean(two)} thousandths of a nat with two of "
        f"sixteen blocks, and {_mean(ten)} with ten. On SmolLM2 it is {_mean(larger)} with two of thirty."
    )
    stands = verdict(two).startswith("worse") and verdict(larger).startswith("worse")
    return Found(text, f"{len(two)} and {len(larger)} seeds", stands)


def _alone(_: Pages) -> Found:
    values = _less("embedding and head only", "LISA")
    text = f"{MODEL} embedding and head alone less LISA: {_mean(values)} thousandths of a nat. {ALONE}"
    return Found(text, f"{len(values)} seeds", verdict(values).startswith("worse"))


def _fixed(_: Pages) -> Found:
    values = _less("LISA, fixed blocks", "LISA")
    text = (
        f"{MODEL} two blocks that are drawn once, less LISA, which draws two every ten steps: {_mean(values)} "
        f"thousandths of a nat. {ALONE}"
    )
    return Found(text, f"{len(values)} seeds", verdict(values).startswith("equal"))


def _blocks(_: Pages) -> Found:
    rows, more = rows_of("layers"), {count: f"LISA, {count} blocks" for count in (3, 5, 10)}
    counts = {0: "embedding and head only", 2: "LISA"} | more
    means = {count: fmean(judged(LADDER_1, rows, arm).values()) for count, arm in counts.items()}
    arms = {one.name: one for one in LADDER_1.arms}
    rates = {count: LADDER_1.chosen(rows, arms[arm]) or 0 for count, arm in counts.items()}
    listed = ", ".join(f"{loss:.4f} ({count})" for count, loss in means.items())
    told = ", ".join(f"2^{half / 2:g} ({count})" for count, half in rates.items())
    study = replace(LADDER_1, arms=ABLATIONS, seeds=SEEDS[:4])
    periods = {steps: _less(f"LISA, K {steps}", "LISA", study) for steps in (1, 5, 20, 100)}
    varied = ", ".join(f"{_mean(values)} ({steps})" for steps, values in periods.items())
    text = (
        f"{MODEL} more blocks are better: test loss {listed} by blocks of sixteen. The best rate does not fall with "
        f"their number: {told}. K has no best value that could be told: thousandths of a nat less those of 10 steps, "
        f"four seeds: {varied}. {ALONE}"
    )
    falls = sorted(means.values(), reverse=True) == list(means.values())
    return Found(text, f"{len(judged(LADDER_1, rows, 'LISA, 10 blocks'))} seeds", falls)


def _draws(_: Pages) -> Found:
    losses = draws_of(rows_of("layers"))
    spread = 1000 * (max(losses) - min(losses))
    text = (
        f"{MODEL} {len(losses)} other draws of blocks on the same rows spread over {spread:.1f} thousandths of a nat "
        f"from least to most. {ALONE}"
    )
    return Found(text, f"{len(losses)} draws", spread < 10)


def _continued(_: Pages) -> Found:
    study = continual.study(rows_of("layers"))
    none, two, half, lora = (_less(arm, "full", study) for arm in ("no training", "LISA", "LISA, 8 blocks", RANK_64))
    text = (
        f"{MODEL} having read 1,200 rows of stories by Edgeworth before it is fine-tuned on Bryant's in full, test "
        f"loss on Bryant's less that of a model that read on with all blocks: {_mean(half)} thousandths of a nat with "
        f"eight of sixteen, {_mean(two)} with two, {_mean(lora)} with LoRA of rank 64, {_mean(none)} without "
        f"reading on: what was read did not help here. {ALONE}"
    )
    helped = verdict(none).startswith("worse")
    return Found(text, f"{len(half)} seeds", verdict(half).startswith("equal") and not helped)


CLAIMS = (
    Claim(
        says="Models tuned by LISA are better than LoRA's",
        place="Tables 2 and 3",
        found=_lora,
        verdict="holds in part",
        steps=("layers",),
        page="layers",
    ),
    Claim(
        says="They are as good as full fine-tuning's",
        place="Tables 2 and 3",
        found=_full,
        verdict="does not hold here",
        steps=("layers",),
        page="layers",
    ),
    Claim(
        says="Embedding and head alone are worse than with drawn blocks",
        place="Table 10",
        found=_alone,
        verdict="holds in part",
        steps=("layers",),
        page="layers",
    ),
    Claim(
        says="Drawing anew is better than fixed layers",
        place="Table 12",
        found=_fixed,
        verdict="does not hold here",
        steps=("layers",),
        page="layers",
    ),
    Claim(
        says="More blocks are better if the rate falls with their number; K has a best value",
        place="Tables 6 and 11",
        found=_blocks,
        verdict="holds in part",
        steps=("layers",),
        page="layers",
    ),
    Claim(
        says="The seed of the draws matters little",
        place="Table 7",
        found=_draws,
        verdict="holds",
        steps=("layers",),
        page="layers",
    ),
    Claim(
        says="Continual pre-training with half of the blocks is as good as with all",
        place="Table 4",
        found=_continued,
        verdict="holds in part",
        steps=("layers",),
        page="layers",
    ),
)
