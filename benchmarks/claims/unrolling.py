"""Claims on (FG)²U: Shen et al. 2024, arXiv:2406.14095."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.claims.sources import Claim, Found, Pages, number, record
from benchmarks.federated.paired import differences
from benchmarks.token_base import SMALL, STORIES
from benchmarks.token_weights_tables import COMPARED, at_best, nll, runs_of
from benchmarks.valley.numbers import bounds, mean

MIB = 2**20
PAPER_DIRECTIONS, EACH = 10_000 * 512, 4  # directions of a run of the paper, and of an outer step of ours


def _constant(_: Pages) -> Found:
    held = {(row["arm"], row["steps"]): row for row in record("hypergrad_cost").table("memory")}

    def growth(arm: str, what: str = "peak") -> float:
        return float(held[arm, 640][what] / held[arm, 10][what])

    ours = {b: f"ForwardGradient b={b}" for b in (1, 8, 32)}
    whole = [growth(arm, "process") for arm in ours.values()]
    peak = {b: growth(arm) for b, arm in ours.items()}
    said = (
        "Holds for the live tensors and for the whole process, which from T = 10 to 640 grows by "
        f"{100 * (min(whole) - 1):.0f} to {100 * (max(whole) - 1):.0f} % with 1, 8 or 32 directions (plain unrolling: "
        f"{growth('Reverse', 'process'):.1f} times, √T checkpoints: {growth('Checkpointed', 'process'):.2f} times). "
        f"Above what the process held before, few directions grow too: {peak[1]:.1f}, {peak[8]:.1f} and "
        f"{peak[32]:.2f} times, where unrolling takes {growth('Reverse'):.0f} times as much, and checkpoints "
        f"{growth('Checkpointed'):.1f} times."
    )
    return Found(said, "1 process a cell", max(whole) < 1.05 and growth("Reverse") > 10)


def _checkpointed(see: Pages) -> Found:
    held = {(row["arm"], row["steps"]): row["peak"] / MIB for row in record("hypergrad_cost").table("memory")}
    time = {(row["arm"], row["steps"]): row for row in record("hypergrad_cost").table("time")}
    exact, one, many = (time[arm, 160] for arm in ("Checkpointed", "ForwardGradient b=1", "ForwardGradient b=32"))
    equal = see.table("hypergradients", "cosines")
    said = (
        f"Exact unrolling with √T checkpoints, which the paper leaves out, takes {held['Checkpointed', 640]:.0f} MiB "
        f"at T = 640 and {exact['against_plain']:.1f} [{exact['against_plain_low']:.1f}, "
        f"{exact['against_plain_high']:.1f}] plain runs at T = 160. One direction takes less, "
        f"{held['ForwardGradient b=1', 640]:.0f} MiB and {one['against_plain']:.1f} runs, for a cosine of "
        f"{one['cosine']:.2f} to the gradient; 32 directions take {held['ForwardGradient b=32', 640]:.0f} MiB and "
        f"{many['against_plain']:.0f} runs for {many['cosine']:.2f}."
    )
    stands = (
        # what is cheaper than exact replay points nowhere, and what points somewhere is dearer in both
        held["Checkpointed", 640] < held["ForwardGradient b=32", 640]
        and exact["cosine"] > 0.999
        and exact["against_plain"] < many["against_plain"]
        and one["cosine"] < 0.1
        and all(
            number(equal[f"{problem}: checkpointed"]["3× plain"]) > 0.99
            for problem in ("condensation", "example weights", "token weights")
        )
    )
    return Found(said, f"{exact['n']} rounds", stands)


def _accurate(see: Pages) -> Found:
    rows, budget = see.table("hypergradients", "cosines"), "30× plain"
    said, facts = [], []
    for problem in ("condensation", "example weights", "token weights"):
        ours, short = rows[f"{problem}: (FG)²U"][budget], rows[f"{problem}: truncated"][budget]
        said.append(f"{problem} {ours} against {short}")
        facts.append(number(ours) < number(short) < number(rows[f"{problem}: checkpointed"][budget]))
    text = (
        "Unbiased, yes. Its cosine to the truth with 30 plain runs to spend is below truncation's: "
        + "; ".join(said)
        + "; exact replay has 1.00 for three."
    )
    return Found(text, "5 seeds", all(facts))


def _table(see: Pages) -> Found:
    rows = see.table("hypergradients", "condensation")
    ours = {name: row["ours"] for name, row in rows.items()}
    exact, sampled = (
        ours["checkpointed, 1 a class"],
        next(cell for name, cell in ours.items() if name.startswith("(FG)²U") and name.endswith(", 1 a class")),
    )
    real = ours["as many real images, one draw, 1 a class"]
    taken = next(number(row["outer steps"]) for row in rows.values() if row["ours"] == sampled)
    more = round(PAPER_DIRECTIONS / (taken * EACH), -3)
    recipe = {name: row["condensed, %"] for name, row in see.table("hypergradients", "condense-methods").items()}
    said = (
        f"Out of reach here: in 20 CPU seconds (FG)²U ends at {sampled}, exact replay at {exact} with one image a "
        f"class, and as many real images of one draw teach {real}; from real images, by a recipe that fits, in a "
        f"minute, exact replay ends at {recipe['reverse']}, (FG)²U at {recipe['(FG)²U b=4']} and they at "
        f"{recipe['as many real images']}. The paper's run takes some {more:,.0f} times as many directions, so its "
        "order of methods is neither confirmed nor refuted."
    )
    return Found(said, "5 seeds", number(sampled) < 20 < number(exact))


def _tokens(_: Pages) -> Found:
    said, lowest, seeds = [], [], []
    for study, model in ((SMALL, "a model of 1.0 M weights"), (STORIES, "stories15M")):
        runs = runs_of(study)
        best = dict(zip(COMPARED, at_best(runs), strict=True))
        above = []
        for arm in ("fg-phi", "fg-psi"):
            rgu, uniform = (differences(nll(runs, best[arm]), nll(runs, best[other])) for other in ("rgu", "uniform"))
            above.append((mean(rgu, 2), mean(uniform, 2)))
            lowest.append(bounds(rgu)[0])
        (phi, phi_uniform), (psi, psi_uniform) = above
        said.append(f"on {model} its answer loss in φ is {phi} nat above RGU's and {phi_uniform} from that of uniform "
                    f"weights, in ψ {psi} and {psi_uniform}")  # fmt: skip
        seeds.append(len(rgu))
    text = f"Not seen at our sizes (12 documents), in equal time and at swept rates: {'; '.join(said)}."
    return Found(text, f"{seeds[0]} and {seeds[1]} seeds", min(lowest) > 0)


def _equations(see: Pages) -> Found:
    rows = see.table("hypergradients", "equations")
    cells = {
        name: rows[f"{name}, solver {grid}"]["ε of ν"]
        for name, grid in (("allen-cahn", 256), ("burgers", 512), ("kdv", 96))
    }
    fields = [row["coefficient_error"] for row in _runs() if "field of 32" in row["name"]]
    starts = [row["coefficient_error"] for row in _runs() if row["name"] == "kdv, solver 96"]
    squares = [row["coefficient_error"] for row in _runs("pde_fields") if row["name"].endswith("field, 1 % noise")]
    said = (
        f"Holds for one number, and better without noise: ε of ν {cells['allen-cahn']} (Allen–Cahn), "
        f"{cells['burgers']} (Burgers), {median(starts):.0e} in the median for KdV, where one of {len(starts)} starts "
        f"is caught in a local minimum ({max(starts):.2f}). A field of 32 is not: ε {min(fields):.2f} to "
        f"{max(fields):.2f} after 80 outer steps (n = {len(fields)} runs); by least squares through the same solver "
        f"one of 64 is, to {max(squares):.3f} or better with 1 % noise (n = {len(squares)})."
    )
    stands = (
        number(cells["allen-cahn"]) < 0.01
        and number(cells["burgers"]) < 0.01
        and median(starts) < 0.01
        and sum(one > 0.1 for one in starts) == 1
        and min(fields) > 0.1
        and max(squares) < 0.1
    )
    return Found(said, f"{len(starts)} seeds", stands)


def _runs(stem: str = "pde_table") -> list[dict[str, Any]]:
    import json

    from benchmarks.claims.sources import RESULTS

    return list(json.loads((RESULTS / f"{stem}.json").read_text())["tables"]["runs"])


CLAIMS = (
    Claim(
        says="Memory is constant in the number of steps where unrolling grows",
        place="§3, Figure 1",
        found=_constant,
        verdict="holds",
        steps=("hypergrad_cost",),
        page="hypergradients",
    ),
    Claim(
        says="Where full unrolling does not fit, (FG)²U is the way",
        place="§1, Figure 1; unrolling with checkpoints is not compared",
        found=_checkpointed,
        verdict="does not hold here",
        steps=("hypergrad_cost", "hypergrad_cosine"),
        page="hypergradients",
    ),
    Claim(
        says="It is more accurate than truncation, Neumann and Hessian-free",
        place="§3, Table 1",
        found=_accurate,
        verdict="does not hold here",
        steps=("hypergrad_cosine",),
        page="hypergradients",
    ),
    Claim(
        says="Condensation: 82.4 % on MNIST at one image a class, ahead of all approximations",
        place="Table 1",
        found=_table,
        verdict="not settled",
        steps=("condense_table",),
        page="hypergradients",
    ),
    Claim(
        says="Token weights: (FG)²U through 24 to 48 documents beats RGU through 6",
        place="Table 2",
        found=_tokens,
        verdict="does not hold here",
        steps=("token_weights", "token_weights_stories"),
        page="hypergradients",
    ),
    Claim(
        says="ν is found through a black-box solver to within 0.7 to 2.3 %",
        place="Figure 2 right",
        found=_equations,
        verdict="holds",
        steps=("pde_table", "pde_fields"),
        page="hypergradients",
    ),
)
