"""Claims on LISA: Pan et al. 2024, arXiv:2403.17919."""

from __future__ import annotations

import json
from statistics import fmean, median

from benchmarks.claims import layer_study
from benchmarks.claims.sources import RESULTS, Claim, Found, Pages, Row, ends, number, rows_of

GB = 1e9
SMALL, LARGE = "Llama 12x384, 2 threads", "Llama 12x768, 2 threads"
TWO, HIGH = "LISA, 2 blocks", "LISA, embedding frozen, high blocks"


def _speed(see: Pages) -> Found:
    warm = see.table("step-time", "warm")
    first, later, _ = see.table("step-time", "cold")["full"].values()
    forward = [warm[f"{SMALL}, {arm}"]["forward"] for arm in ("full", TWO)]
    trained, frozen = ([warm[f"{size}, {arm}"]["against full"] for size in (SMALL, LARGE)] for arm in (TWO, HIGH))
    alike = [
        number(warm[f"{size}, {TWO}"]["forward"]) / number(warm[f"{size}, full"]["forward"]) for size in (SMALL, LARGE)
    ]
    kept = [see.table("step-time", "kept")[f"{size}, {TWO}"]["against full"] for size in (SMALL, LARGE)]
    text = (
        f"Warm forward passes take the same time: {forward[0]} ms (full) and {forward[1]} ms (LISA) at 12×384. A step "
        f"is {trained[0]} and {trained[1]} as fast at widths 384 and 768, {kept[0]} and {kept[1]} where the heap keeps "
        f"its buffers; with the embedding frozen and the active blocks on top {frozen[0]} and {frozen[1]}. A cold "
        f"start explains the paper's forward pass in kind: the first of a process takes {first} ms, later ones "
        f"{later} ms."
    )
    stands = max(ends(cell)[1] for cell in trained) < 2.9 and max(alike) < 1.2 and number(first) > 1.3 * number(later)
    return Found(text, f"{warm[f'{SMALL}, full']['n']} rounds", stands)


def _cells(model: str) -> dict[str, Row]:
    plain = (" | sdpa | loop | 0.0 | False | False | all |",)
    return {
        row["method"]: row for key, row in rows_of("memory_grid").items() if row["model"] == model and plain[0] in key
    }


def _fits(_: Pages) -> Found:
    two, four = (_cells("LLaMA-2-7B")[f"LISA E+H+{count}L"]["peak"] / GB for count in (2, 4))
    text = (
        f"By prediction {two:.1f} GB for LLaMA-2-7B with two active blocks and {four:.1f} GB with four (batch 1, 1024 "
        "tokens, bf16), blocks spread evenly and without the device's context; 21.4 GB for the dearest two. An H100 "
        "held 21.3 GB for two blocks, 17.7 GB with checkpointing and 20.6 GB with a frozen embedding, each within 1 % "
        "of its prediction."
    )
    return Found(text, "2 predictions", four < 24)


def _against_lora(_: Pages) -> Found:
    names = ("LLaMA-2-7B", "Llama-3.1-8B")
    pairs = [[_cells(name)[way]["peak"] / GB for way in ("LISA E+H+2L", "LoRA r=128")] for name in names]
    text = (
        f"By prediction about the same with 32,000 tokens of vocabulary: {pairs[0][0]:.1f} GB against "
        f"{pairs[0][1]:.1f} (r = 128). With 128,000, more: {pairs[1][0]:.1f} GB against {pairs[1][1]:.1f} for "
        "Llama-3.1-8B."
    )
    return Found(text, "2 pairs of predictions", pairs[0][0] < pairs[0][1] and pairs[1][0] > pairs[1][1])


def _table(_: Pages) -> Found:
    seven, other = (
        {name: row for name, row in _cells(model).items() if row["paper_g"]} for model in ("Mistral-7B", "LLaMA-2-7B")
    )
    off = [abs(row["peak"] / GB / row["paper_g"] - 1) for row in seven.values()]
    repeats = all(seven[name]["paper_g"] == other[name]["paper_g"] for name in seven)
    apart = (seven["full"]["peak"] - other["full"]["peak"]) / GB
    text = (
        f"Mistral-7B is predicted within {100 * max(off):.1f} % in all {len(off)} cells. The row of LLaMA-2-7B repeats "
        f"Mistral-7B's cell by cell, though full fine-tuning of it takes {apart:.1f} GB less; small models have a "
        "surplus in the paper that does not depend on the method."
    )
    return Found(text, f"{len(off) + len(other)} cells", repeats and max(off) < 0.06 and apart > 3)


def _runs(arm: str, model: str) -> list[Row]:
    return [row for row in rows_of("norm_skew").values() if (row["arm"], row["model"]) == (arm, model)]


def _skew(row: Row, kind: str) -> float:
    """Norm of the embedding over the median block's."""
    return float(row[kind]["embedding"] / median(v for name, v in row[kind].items() if name.startswith("block")))


MODELS = {"stories15m": "stories15M", "smollm2-135m-instruct": "SmolLM2-135M"}


def _spread(values: list[float], digits: int = 1) -> str:
    return f"{fmean(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"


def _figure() -> tuple[str, float]:
    """How near the paper's figure is to what peft draws before any step, in words and at most."""
    known = json.loads((RESULTS / "norm_skew.json").read_text())["paper"]
    pairs = {name: (each["read"], each["drawn"]) for name, each in known.items() if name != "source"}
    far = max(abs(read / drawn - 1) for read, drawn in pairs.values())
    (one, drawn), (two, also) = pairs["LLaMA-2-7B, embedding"], pairs["LLaMA-2-7B, a block"]
    text = (
        f"All {len(pairs)} norms of the figure are within {100 * far:.0f} % of what peft draws before any step: N(0, "
        f"1) for the embedding's adapter gives √(d·r) = {drawn:.0f} for LLaMA-2-7B, where {one:.0f} is read, a block's "
        f"seven give √(7r/3) = {also:.1f}, where {two:.1f} is read."
    )
    return text, far


def _norms(_: Pages) -> Found:
    text, far = _figure()
    said, facts = [text], [far < 0.03]
    for model, title in MODELS.items():
        drawn, scaled, full = (_runs(arm, model) for arm in ("LoRA", "LoRA, scaled", "full"))
        if not (drawn and scaled and full):
            continue
        start, mean = ([_skew(row, kind) for row in drawn] for kind in ("start", "mean"))
        other, whole, moved = (
            [_skew(r, "mean") for r in scaled],
            [_skew(r, "mean") for r in full],
            [_skew(r, "moved") for r in drawn],
        )
        said.append(
            f"{title}, {drawn[0]['steps']} steps: the adapters of the embedding are {_spread(start)} times as long as "
            f"a block's before training and {_spread(mean)} times in its mean; {_spread(other)} times when drawn on "
            f"the scale of the others. What LoRA adds to the weights themselves: {_spread(moved)} times; fully trained "
            f"weights {_spread(whole)} times."
        )
        facts.append(
            max(abs(b / a - 1) for a, b in zip(start, mean, strict=True)) < 0.1 and max(other) < 0.25 * min(mean)
        )
    return Found(" ".join(said), f"{len(_runs('LoRA', 'stories15m'))} seeds", all(facts) and len(facts) > 1)


def _head(_: Pages) -> Found:
    said, most = [], []
    for model, title in MODELS.items():
        pairs = list(zip(_runs("LoRA", model), _runs("full", model), strict=False))
        if not pairs:
            continue
        shares = {
            layer: [lora["mean"][layer] / full["mean"][own] for lora, full in pairs]
            for layer, own in (("embedding", "embedding"), ("block 0", "block 0"), ("head", "embedding"))
        }  # fmt: skip
        said.append(f"{title} " + ", ".join(f"{_spread(found, 2)} ({layer})" for layer, found in shares.items()))
        most.append(max(shares["head"]))
    text = (
        "The ratio of norms that the paper reads as the chance of a layer, LoRA's over full training's: "
        + "; ".join(said)
        + ". That of the head is small, not one "
        "(head and embedding are one matrix in this model)."
    )
    return Found(text, f"{len(_runs('LoRA', 'stories15m'))} seeds", bool(most) and max(most) < 0.5)


CLAIMS = (
    Claim(
        says="LISA is 2.9× as fast as full fine-tuning, its forward pass alone 2.8×",
        place="Figure 4",
        found=_speed,
        verdict="does not hold here",
        steps=("step_time",),
        page="step-time",
    ),
    Claim(
        says="A 7B model is fine-tuned within 24 GB",
        place="abstract, Table 1",
        found=_fits,
        verdict="holds",
        steps=("memory_grid",),
        page="memory",
    ),
    Claim(
        says="LISA needs no more memory than LoRA",
        place="Table 1",
        found=_against_lora,
        verdict="holds in part",
        steps=("memory_grid",),
        page="memory",
    ),
    Claim(
        says="The figures of Table 1",
        place="Table 1",
        found=_table,
        verdict="holds in part",
        steps=("memory_grid",),
        page="memory",
    ),
    Claim(
        says="Under LoRA the norms of embedding and head are far above the blocks', which shows what fine-tuning needs",
        place="Figure 2",
        found=_norms,
        verdict="does not hold here",
        steps=("norm_skew",),
        page="",
    ),
    Claim(
        says="Embedding and head must always train, since their norms under LoRA say so",
        place="§3.2",
        found=_head,
        verdict="does not hold here",
        steps=("norm_skew",),
        page="",
    ),
    *layer_study.CLAIMS,
)
