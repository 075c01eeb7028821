"""What was predicted beside what was measured, for every technique, from the committed JSON."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.claims.sources import Row, record, rows_of
from benchmarks.network.predictions import predicted
from sparing import hypergrad as hg
from sparing.jobs.transfer.optimum import mean_curve, optimum
from sparing.sharding.planner.traffic import Traffic

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Predictions of one quantity and its measurements."""

    what: str
    """The quantity, and of what."""
    unit: str
    """Its unit."""
    by: str
    """What predicts it."""
    against: str
    """What measures it, and over how many."""
    steps: tuple[str, ...]
    """Steps of ``benchmarks.steps``."""
    predicted: Sequence[float]
    """Predictions."""
    measured: Sequence[float]
    """Measurements, in their order."""
    ratio: bool = True
    """Whether they are judged by their ratio; else by their difference."""


def _read(name: str, table: str) -> list[Row]:
    return list(record(name).table(table))


# ---- bytes


def step_bytes(column: str, against: str) -> Pairs:
    """A training step of small language models, against the ledger or the process."""
    rows = _read("prices", "memory")
    return Pairs(
        what="bytes of a training step, small Llama and GPT-2: full, LISA, LoRA, checkpointing",
        unit="B",
        by="`memory.predict`, fake tensors",
        against=against,
        steps=("prices",),
        predicted=[row["predicted"] for row in rows],
        measured=[row[column] for row in rows],
    )


def published_bytes() -> Pairs:
    """Six figures that others measured on an H100."""
    plain = {
        "attention": "sdpa",
        "optimizer": "loop",
        "dropout": 0.0,
        "checkpointing": False,
        "mask": False,
        "targets": "all",
    }
    rows = [
        row for row in rows_of("memory_grid").values() if row["h100"] and all(row[k] == v for k, v in plain.items())
    ]
    return Pairs(
        what="bytes of a training step, TinyLlama and LLaMA-2-7B: full, LISA, LoRA",
        unit="B",
        by="`memory.predict`, fake tensors",
        against="Tian et al. 2026 on an H100, 1 figure each; settings not all known",
        steps=("memory_grid",),
        predicted=[row["peak"] for row in rows],
        measured=[GIB * row["h100"] for row in rows],
    )


def unrolling_bytes() -> Pairs:
    """Peak of one hypergradient by arm and depth."""
    known = {(row["arm"], row["steps"]): row["bytes"] for row in _read("prices", "unrolling")}
    rows = [row for row in _read("hypergrad_cost", "memory") if (row["arm"], row["steps"]) in known]
    return Pairs(
        what="bytes of a hypergradient: reverse, checkpointed, (FG)²U, T = 5 to 640",
        unit="B",
        by="`hypergrad.predict`, fake tensors",
        against="growth of a fresh process, 1 each",
        steps=("prices", "hypergrad_cost"),
        predicted=[known[row["arm"], row["steps"]] for row in rows],
        measured=[row["peak"] for row in rows],
    )


def sparse_bytes() -> Pairs:
    """What a sparse Llama holds, dense and as CSR."""
    known = {row["sparsity"]: row for row in _read("prices", "sparse")}
    rows = [
        row for row in _read("scaling_speed", "model")
        if row["arm"] == "masked" or (row["arm"] == "auto" and row["csr"] == row["layers"])
    ]  # fmt: skip
    return Pairs(
        what="bytes of weights, masks, gradients and AdamW of a sparse Llama, masked dense and CSR",
        unit="B",
        by="`scaling.predict`, shapes",
        against="its tensors, 1 each",
        steps=("prices", "scaling_speed"),
        predicted=[known[row["sparsity"]][row["arm"]] for row in rows],
        measured=[row["held"] for row in rows],
    )


def live_weights() -> Pairs:
    """Live parameters of a sparse Llama."""
    known = {row["sparsity"]: row["live"] for row in _read("prices", "sparse")}
    rows = [row for row in _read("scaling_speed", "model") if row["arm"] == "masked"]
    return Pairs(
        what="live parameters of a Llama at density 1/2 to 1/128",
        unit="",
        by="`scaling.predict`, shapes",
        against="its masks, counted",
        steps=("prices", "scaling_speed"),
        predicted=[known[row["sparsity"]] for row in rows],
        measured=[row["live"] for row in rows],
    )


# ---- traffic


@functools.cache
def plan_rows() -> list[Row]:
    """Every measured plan with the bytes and seconds predicted of it, links as probed where they were, else as held."""
    from benchmarks.network.predictions import cell_of, nominal, workload

    found = []
    arms = {(cell_of(row), row["arm"]): row for row in _read("network_plans", "arms")}
    known = {(cell_of(row), row["plan"]): row for row in predicted(record("network_plans"), held=True)}
    known |= {(cell_of(row), row["plan"]): row for row in predicted(record("network_plans"))}
    for (cell, plan), row in known.items():
        buckets = workload(cell, arms.get((cell, "alone"))).buckets()
        wire = {"accumulate": cell.accumulate, "gather_bytes": 4, "reduce_bytes": 4}
        sent = Traffic.of_step(plan, nominal(cell).sizes, buckets, **wire).total
        found.append(row | {"sent": sent, "counted": arms[cell, plan]})
    return found


def plan_bytes() -> Pairs:
    """Bytes on either axis of every plan and cell."""
    pairs = [
        (row["sent"][at], row["counted"][name])
        for row in plan_rows()
        for at, name in enumerate(("payload_intra", "payload_inter"))
    ]
    return Pairs(
        what="bytes of a step inside and between groups, 14 plans",
        unit="B",
        by="`sharding` formula",
        against="counted by every rank, 2 to 5 rounds",
        steps=("network_plans",),
        predicted=[a for a, _ in pairs],
        measured=[b for _, b in pairs],
    )


def plan_wires() -> Pairs:
    """The same where it leaves a group's interface."""
    rows = plan_rows()
    return Pairs(
        what="the same, as the interface that leaves a group counts it",
        unit="B",
        by="`sharding` formula",
        against="interface counters, headers included, 2 to 5 rounds",
        steps=("network_plans",),
        predicted=[row["per_group"] * row["sent"][1] for row in rows],
        measured=[row["counted"]["sent_inter"] for row in rows],
    )


def federated_bytes() -> Pairs:
    """Bytes up in a round, when each of ten clients sends stem, head and the blocks it drew, in float32."""
    stem, block, head = 40 * 64 + 64, 64 * 64 + 64, 64 * 10 + 10
    rows = [row for row in rows_of("federated_bytes").values() if row["on"] == "test" and not row.get("diverged")]
    drawn = [4 if row["blocks"] is None else row["blocks"] for row in rows]
    return Pairs(
        what="bytes that ten clients send in a round, drawing 1, 2 or 4 of four blocks",
        unit="B",
        by="shapes: 10 · 4 · (stem + drawn + head)",
        against="tensors that travelled, mean over 40 rounds, 5 seeds",
        steps=("federated_bytes",),
        predicted=[10 * 4 * (stem + count * block + head) for count in drawn],
        measured=[row["bytes_up"] for row in rows],
    )


# ---- seconds


def plan_seconds() -> Pairs:
    """Step times of every plan and cell."""
    rows = plan_rows()
    return Pairs(
        what="seconds of a step, 14 plans on links of 25 : 1, 5 : 1 and 1 : 1",
        unit="s",
        by="`sharding.simulate`, links as probed",
        against="slowest rank, median of 2 to 5 rounds",
        steps=("network_plans",),
        predicted=[row["predicted"] for row in rows],
        measured=[row["measured"] for row in rows],
    )


def reference_seconds() -> Pairs:
    """The reference cell, whose links were probed."""
    return _probed_seconds("network_reference", "reference cell", "links as probed")


def costed_seconds() -> Pairs:
    """Cells in which the machine's own costs were probed beside the links."""
    return _probed_seconds("network_plans_probed", "eight cells at 25 : 1 and 1 : 1", "links and costs as probed")


def _probed_seconds(file: str, where: str, believed: str) -> Pairs:
    rows = list(predicted(record(file)))
    return Pairs(
        what=f"seconds of a step, 14 plans, {where}",
        unit="s",
        by=f"`sharding.simulate`, {believed}",
        against="slowest rank, median of 5 rounds",
        steps=(file,),
        predicted=[row["predicted"] for row in rows],
        measured=[row["measured"] for row in rows],
    )


def collective_seconds() -> Pairs:
    """Collectives, against the model of bytes alone."""
    rows = [row for row in _read("network_collectives", "collectives") if row["model"] is not None]
    return Pairs(
        what="seconds of a collective, flat, two-level, overlapped",
        unit="s",
        by="`sharding` cost, bytes alone",
        against="slowest rank, median of 11 rounds",
        steps=("network_collectives",),
        predicted=[row["model"] for row in rows],
        measured=[row["seconds"] for row in rows],
    )


def step_speed() -> Pairs:
    """How many times faster LISA's steps are."""
    known = {(row["model"], row["arm"]): row["faster"] for row in _read("prices", "steps")}
    # operations know nothing of a heap that faults
    kept = [row for row in _read("step_time", "warm") if row["heap"] == "buffers kept" and row["arm"] != "full"]
    rows = [row for row in kept if (row["model"], row["arm"]) in known]
    return Pairs(
        what="times as fast as a full step: LISA, with and without embedding",
        unit="×",
        by="`layersample.predict`, operations",
        against="CPU, median of 11 rounds",
        steps=("prices", "step_time"),
        predicted=[known[row["model"], row["arm"]] for row in rows],
        measured=[row["faster"] for row in rows],
    )


def unrolling_work() -> Pairs:
    """Work of a hypergradient, in plain runs."""
    known = {(row["arm"], row["steps"]): row["gradient_steps"] / row["steps"] for row in _read("prices", "unrolling")}
    rows = [row for row in _read("hypergrad_cost", "time") if (row["arm"], row["steps"]) in known]
    return Pairs(
        what="work of a hypergradient in plain runs: reverse, checkpointed, (FG)²U",
        unit="×",
        by="`hypergrad.predict`, factors of the machine it was made on",
        against="CPU seconds, median of 7 rounds",
        steps=("prices", "hypergrad_cost"),
        predicted=[known[row["arm"], row["steps"]] for row in rows],
        measured=[row["against_plain"] for row in rows],
    )


# ---- cosine, merges, rates


def cosines() -> Pairs:
    """Sampled hypergradients on three problems, from four directions on."""
    known = {
        (row["problem"], row["family"], row["dial"]): row["cosine"]
        for row in _read("prices", "directions")
        if row["dial"] >= 4
    }
    rows = [row for row in _read("hypergrad_cosine", "dials") if (row["problem"], row["family"], row["dial"]) in known]
    return Pairs(
        what="cosine of (FG)²U, orthonormal and Hadamard to the exact hypergradient, 4 to 256 directions",
        unit="",
        by="1/√(1 + excess) of the law of directions",
        against="mean of 5 seeds",
        steps=("prices", "hypergrad_cosine"),
        ratio=False,
        predicted=[known[row["problem"], row["family"], row["dial"]] for row in rows],
        measured=[row["cosine"] for row in rows],
    )


def token_cosines(space: str) -> Pairs:
    """Four directions on a language model's token weights."""
    rows = [row for row in rows_of("adapt_table").values() if row["table"] == "cosine"]
    size = "tokens" if space == "psi" else "parameters"
    where = "ψ, the weights of tokens" if space == "psi" else "φ, the parameters behind them"
    return Pairs(
        what=f"cosine of four directions in {where}, stories15M",
        unit="",
        by="1/√(1 + excess)",
        against="single draws, 5 seeds",
        steps=("adapt_table",),
        ratio=False,
        predicted=[hg.Rademacher().cosine(4, row[size]) for row in rows],
        measured=[row[f"{space}_cosine"] for row in rows],
    )


def merges(metric: str) -> Pairs:
    """Gap of an average to its members, on pairs that the fit has not seen."""
    rows = [row for row in rows_of("valley_predictions")["weights"]["pairs"] if row[f"{metric} measured"] is not None]
    unit, times = ("points", 100) if metric == "error" else ("nat", 1)
    return Pairs(
        what=f"gap in {metric} of the average of two models to its members",
        unit=unit,
        by="`valley.predict_merge`'s score, fitted on 40 pairs of another net and data set",
        against="1,000 test images, 5 seeds",
        steps=("valley_soups", "valley_forecast"),
        ratio=False,
        predicted=[times * row[f"{metric} predicted"] for row in rows],
        measured=[times * row[f"{metric} measured"] for row in rows],
    )


def best_rates(rule: str) -> Pairs:
    """The best rate of every sparse place, where the dense net's is the prediction, as powers of two."""
    told: list[float] = []
    found: list[float] = []
    for study, width in (("d = 256", 256), ("d = 128", 128)):
        by: dict[float, dict[int, dict[float, float]]] = {}
        for key, (loss, _, diverged, _) in rows_of("transfer_mlp").items():
            name, cell = key.split(" | ")
            one, wide, density, x, seed = cell.split()
            if (name, one, int(wide)) == (study, rule, width):
                value = float("inf") if diverged else loss
                by.setdefault(float(density), {}).setdefault(int(seed), {})[float(x)] = value
        best = {density: optimum(mean_curve(list(seeds.values()))).x for density, seeds in by.items()}
        told += [best[1.0]] * (len(best) - 1)
        found += [x for density, x in best.items() if density != 1.0]
    names = {"supar": "SμPar", "sp": "SP"}
    return Pairs(
        what=f"best learning rate at density 1/2 to 1/32, octaves, under {names[rule]}",
        unit="octaves",
        by="the best rate of the dense net" + (", which SP does not promise" if rule == "sp" else ""),
        against="sweeps, mean of 2 or 3 seeds",
        steps=("transfer_mlp",),
        ratio=False,
        predicted=told,
        measured=found,
    )
