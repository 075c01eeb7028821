"""Chapter on sharding: a model that fits no GPU on a slow network, planned; and four processes that do it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from sparing.errors import RunError
from sparing.jobs.demo import shard_ranks
from sparing.jobs.demo.chapter import Chapter, Row, keyed
from sparing.jobs.demo.settings import Scale, Settings
from sparing.jobs.demo.shard_ranks import Work
from sparing.jobs.run import Run
from sparing.report import Figure, Record, Table, format_number, plots
from sparing.sharding import Plan, Topology, Workload, effective, predict, simulate
from sparing.sharding.planner.config import BucketSpec
from sparing.sharding.planner.prediction import live_bytes
from sparing.sharding.planner.traffic import Traffic

LOG = logging.getLogger("sparing.demo")

CLUSTER: Final = Topology(groups=4, per_group=8, inter="80Gbps", intra="2000Gbps")

MEMORY: Final = 80e9  # of one of its GPUs (bytes)
ACCUMULATE: Final = 10  # micro-steps of its experiments

WORKS: Final[dict[Scale, Work]] = {
    "small": Work(),
    "tiny": Work(plans=("NNN", "IIG", "GGG"), width=256, blocks=2, batch=8, accumulate=2, steps=3),
}

SECONDS: Final = 300.0  # after which the processes are ended


CASES: Final[dict[str, tuple[float, float, int]]] = {
    "65B, full": (65e9, 1, 80), "65B, 1/16": (65e9, 1 / 16, 80), "65B, 3/1000": (65e9, 3 / 1000, 80),
    "7B, full": (7e9, 1, 32), "7B, 1/16": (7e9, 1 / 16, 32),
}  # fmt: skip
"""Models and what of them trains -> parameters (count), share that trains, blocks (count)."""

ROLES: Final[dict[str, plots.Role]] = {
    "NNN": "reference", "NNG": "second_rival", "IIG": "ours", "GGG": "rival", "NIG": "extension", "III": "extension",
}  # fmt: skip
COLUMNS: Final = ("plan", "known_as", "held", "predicted_held", "seconds", "predicted_seconds", "loss")
SENT: Final = ("plan", "sent_intra", "predicted_intra", "sent_inter", "predicted_inter")
UNITS: Final = {
    "held": "B", "predicted_held": "B", "sent_intra": "B", "predicted_intra": "B", "sent_inter": "B",
    "predicted_inter": "B", "seconds": "s", "predicted_seconds": "s", "guideline": "s", "loss": "nat/byte",
}  # fmt: skip
NOT_COMPARED: Final = ("NNN", "NNI", "NNG", "INI", "ING", "GIG", "GNG")  # by the paper's main comparison


def run_chapter(run: Run) -> None:
    """Plan for the paper's cluster, and run a few plans here, if processes can be started."""
    settings: Settings = run.settings
    record, work = run.record, replace(WORKS[settings.scale], seed=settings.seed)

    def price() -> None:
        for row in plan_cases(CASES):
            record.add("shards", **row)

    def run_here() -> None:
        for row in run_ranks(work):
            record.add("shard_runs", **plan_row(work, row))
            for step, loss in enumerate(row["losses"]):
                record.add("shard_losses", plan=row["plan"], step=step, loss=loss)

    run.once("shard: prices", price)
    try:
        run.once("shard: processes", run_here)
    except (OSError, RunError) as failure:
        LOG.warning("demo: no plan is run here, the processes could not work (%s)", failure)


def plan_cases(cases: Mapping[str, tuple[float, float, int]]) -> list[dict[str, Any]]:
    """Every plan for every case on the paper's cluster: bytes held, and seconds by formula and simulation."""
    rows = []
    for case, (params, trainable, blocks) in cases.items():
        work = Workload(params=params, trainable=trainable, blocks=blocks, accumulate=ACCUMULATE)
        for plan in effective():
            price = predict(work, CLUSTER, plan)
            rows.append({
                "case": case, "plan": plan.name, "known_as": plan.known_as, "params": price.params,
                "grads": price.grads, "optimizer": price.optimizer, "held": price.static,
                "fits": price.static <= MEMORY, "guideline": price.paper_seconds,
                "seconds": simulate(work, CLUSTER, plan).seconds,
            })  # fmt: skip
    return rows


def run_ranks(work: Work) -> list[dict[str, Any]]:
    """Start the processes and wait for what they find, a row per plan."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "work.json", Path(folder) / "found.json"
        given.write_text(json.dumps(asdict(work)), encoding="utf-8")
        command = [sys.executable, "-P", str(shard_ranks.__file__), str(given), str(found)]
        # with a launcher's variables the processes would try to join its group
        launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}
        alone = {name: value for name, value in os.environ.items() if name not in launched} | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=alone, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise RunError(f"the processes were not done after {SECONDS:g} s") from None
        if done.returncode or not found.exists():
            raise RunError(f"a process ended with status {done.returncode}")
        rows: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
        return rows


def plan_row(work: Work, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan cost on the processes, beside what was predicted: bytes sent by axis, bytes held, seconds."""
    specs = tuple(BucketSpec(**spec) for spec in found["buckets"])
    here = Topology(groups=work.groups, per_group=work.per_group, inter=work.inter, intra=work.intra)
    plan, sizes = Plan(found["plan"]), here.sizes
    floats = {"param_bytes": 4, "grad_bytes": 4}
    sent = Traffic.of_step(plan, sizes, specs, accumulate=work.accumulate, gather_bytes=4, reduce_bytes=4).total
    load = Workload.of(specs, accumulate=work.accumulate, wire_bytes=4, state_bytes=8, **floats)
    return {
        "plan": plan.name, "known_as": plan.known_as, "sent_intra": found["sent"]["intra"], "predicted_intra": sent[0],
        "sent_inter": found["sent"]["inter"], "predicted_inter": sent[1], "held": found["held"],
        "predicted_held": live_bytes(specs, sizes, plan, views=True, param_bytes=4).total, "seconds": found["seconds"],
        "predicted_seconds": simulate(load, here, plan).seconds, "loss": found["losses"][-1],
    }  # fmt: skip


def in_words(row: Mapping[str, Any]) -> str:
    """A plan with the name that it is known by."""
    return f"{row['plan']} ({row['known_as']})" if row["known_as"] else str(row["plan"])


def ratio(rows: Mapping[str, Row], plan: str, rival: str, column: str = "seconds") -> str:
    """How many times as long the rival takes."""
    return format_number(rows[rival][column] / rows[plan][column], "×")


def case_of(record: Record, name: str) -> dict[str, Row]:
    """Rows of a case by plan."""
    return keyed((row for row in record.table("shards") if row["case"] == name), "plan")


def statements(record: Record) -> list[Row]:
    """The paper's statements, and what the formulas and the simulation say."""
    by_case = {case: case_of(record, case) for case in CASES}
    small = by_case["7B, full"].values()
    # the least communication by the paper's formula, reconstructed, first
    compared = [row for row in small if row["plan"] not in NOT_COMPARED]
    leaders = sorted(compared, key=lambda row: (round(row["guideline"], 6), row["held"]))[:3]
    fitting = sorted(plan for plan, row in by_case["65B, full"].items() if row["fits"])
    rows: list[tuple[str | None, ...]] = [
        ("65B, full: what fits 80 GB", "GGG, IGG, IIG", ", ".join(fitting), None),
        ("7B, full: leaders", "NII, IIG, III", ", ".join(str(row["plan"]) for row in leaders), None),
    ]
    for case, plan, name, rival, paper in (
        ("7B, full", "NII", "ZeRO-2", "NGG", "1.67×"), ("7B, full", "IIG", "ZeRO-3", "GGG", "2.28×"),
        ("65B, full", "IIG", "ZeRO-3", "GGG", "1.86×"), ("65B, 1/16", "IIG", "ZeRO-3", "GGG", "2.66×"),
        ("65B, 3/1000", "ING", "ZeRO-3", "GGG", "1.44×"), ("7B, 1/16", "NII", "ZeRO-2", "NGG", "1.21×"),
        ("7B, 1/16", "NIG", "ZeRO-2", "NGG", "1.15×"),
    ):  # fmt: skip
        gains = [ratio(by_case[case], plan, rival, column) for column in ("guideline", "seconds")]
        rows.append((f"{case}: {plan} over {name}", paper, *gains))
    return [dict(zip(("statement", "paper", "by_formula", "simulated"), row, strict=True)) for row in rows]


class ShardChapter(Chapter):
    """One sentence, what fits, what was sent, the paper's statements beside ours."""

    name, complete = "shard", ("shards", 1)
    saves, topic = "slow networks", "Slow networks · PaRO"
    question = "How should a model be split over machines when the network between them is slow?"
    paper = "Zhang et al., PaRO, NeurIPS 2024, its measurements on 32 A100 GPUs"
    deeper = (
        "sparing plan --params 65e9 --groups 4 --per-group 8 --inter 80Gbps --intra 2000Gbps --memory 80GB "
        "--accumulate 10",
        "torchrun --nproc-per-node 2 -m sparing probe    # the links you have",
    )
    more = "More: what fits and why, bytes on every link, each statement of the paper, every number"
    limits = (
        "Here are two cores and no GPU: the net is small, the network the paper's a thousand times slower. The "
        "paper's ratios contain arithmetic that hides part of the traffic; how long links are busy ranks plans and "
        "bounds the gain, it does not predict it."
    )

    def __init__(self, record: Record, folder: Path) -> None:
        """With the plans that ran here by name, and those of the paper's largest case."""
        super().__init__(record, folder)
        self.ran, self.full = keyed(record.table("shard_runs"), "plan"), case_of(record, "65B, full")
        self.fitting = [row for row in self.full.values() if row["fits"]]
        self.comparable = {"IIG", "NNN", "GGG"} <= self.ran.keys()

    @cached_property
    def exact(self) -> bool:
        """Whether every byte that was sent or held is as predicted."""
        pairs = (("sent_intra", "predicted_intra"), ("sent_inter", "predicted_inter"), ("held", "predicted_held"))
        return all(row[one] == row[other] for row in self.ran.values() for one, other in pairs)

    @property
    def share(self) -> str:
        """Of what DDP holds, by IIG (%)."""
        return format_number(100 * self.ran["IIG"]["held"] / self.ran["NNN"]["held"])

    @property
    def largest_loss_gap(self) -> float:
        """Largest relative difference between the losses of two plans at the same step."""
        by_step: dict[int, list[float]] = {}
        for row in self.record.table("shard_losses"):
            by_step.setdefault(row["step"], []).append(float(row["loss"]))
        return max((max(losses) / min(losses) - 1 for losses in by_step.values()), default=0.0)

    def fit_sentence(self) -> str:
        """What fits on the paper's cluster."""
        best = min(self.fitting, key=lambda row: row["seconds"])
        return (
            f"Of {len(self.full)} ways to split a model of 65 billion parameters over 32 GPUs of 80 GB, "
            f"{len(self.fitting)} fit; the fastest of these, **{best['plan']}**, keeps the links busy for "
            f"**{format_number(best['seconds'], 's')}** a step, ZeRO-3 (GGG) for "
            f"{format_number(self.full['GGG']['seconds'], 's')}."
        )

    def answer(self) -> str:
        """What the processes here sent and held; without them, what fits on the paper's cluster."""
        if not self.comparable:
            return self.fit_sentence()
        same = "to the byte as predicted" if self.exact else "NOT as predicted: a bug"
        return (
            f"On four processes with a slow link between two pairs, the split **IIG** holds **{self.share} %** of what "
            f"plain data parallelism does, and a step is **{ratio(self.ran, 'IIG', 'GGG')}** as fast as ZeRO-3's; "
            f"bytes sent and held are **{same}**."
        )

    def story(self) -> str:
        """Three letters a plan."""
        here = (
            f"Four processes of this machine then train a small net by {len(WORKS[self.scale].plans)} plans, with "
            "links between two groups held back."
        )
        return (
            "PaRO splits parameters, gradients and optimizer state each on its own: **N** not at all, **I** inside a "
            "group of GPUs, **G** over all of them. What must move often stays inside a group; what moves once a step "
            "goes over all. A plan is three letters, DDP is NNN and ZeRO-3 is GGG; 14 of 27 make sense. All are priced "
            f"for the paper's cluster, 25 times slower between machines than inside. {here if self.ran else ''}"
        )

    def numbers(self) -> list[tuple[str, str, str]]:
        """Speed, bytes, and what fits; the planner's own where no process could be started."""
        computed = "computed from shapes, nothing run"
        shapes = "ways to split 65 billion parameters that fit 32 GPUs of 80 GB"
        fits = (f"{len(self.fitting)} of {len(self.full)}", shapes, computed)
        if not self.comparable:
            busy = "time that links are busy in a step: ZeRO-3 over IIG, 65B"
            held = format_number(self.full["IIG"]["held"], "B")
            return [(ratio(self.full, "IIG", "GGG"), busy, computed), (held, "held by a GPU under IIG", computed), fits]
        step = "as fast a step under IIG as under ZeRO-3, four processes, slow link"
        held = "of the bytes that plain data parallelism (DDP) holds in each process: IIG"
        counted = "counted tensor by tensor, as predicted" if self.exact else "NOT as predicted"
        return [
            (ratio(self.ran, "IIG", "GGG"), step, self.runs("quickest of a few steps")),
            (f"{self.share} %", held, counted), fits,
        ]  # fmt: skip

    def claims(self) -> list[tuple[str, str, str]]:
        """What fits, what leads, and how much faster IIG is."""
        by = keyed(statements(self.record), "statement")
        fits, lead = by["65B, full: what fits 80 GB"], by["7B, full: leaders"]
        fitting = f"{fits['by_formula']} (the paper did not try GIG)"
        found = [
            ("plans that fit 80 GB: 65B, all trained", fits["paper"], fitting),
            ("quickest plans: 7B, all trained", lead["paper"], f"{lead['by_formula']} (by formula)"),
        ]
        for size in ("7B", "65B"):
            row = by[f"{size}, full: IIG over ZeRO-3"]
            seen = f"{row['simulated']} in time on the links (simulated)"
            found.append((f"speed of IIG over ZeRO-3: {size}, all trained", row["paper"], seen))
        if self.comparable:
            found.append(("the same: small net, four processes", "–", f"{ratio(self.ran, 'IIG', 'GGG')} (measured)"))
        return found

    @property
    def details(self) -> str:
        """What fits, and that plans agree."""
        if not self.ran:
            return self.fit_sentence()
        return (
            f"{self.fit_sentence()}\n\nEvery plan trains the same: losses differ by at most "
            f"{format_number(self.largest_loss_gap)}, relative, which is the rounding of float32 sums in another order."
        )

    def figures(self) -> list[Figure]:
        """Step over bytes held, what fits, bytes on the wire; without processes, what fits."""
        fits = self.fits_figure()
        return [self.speed_figure(), fits, self.wire_figure()] if self.ran else [fits]

    def fits_figure(self) -> Figure:
        """Bytes that a GPU holds under every plan, against its memory."""
        rows = sorted(self.full.values(), key=lambda row: float(row["held"]))
        # bars of plans that hold many times the memory would flatten all others
        drawn = [row for row in rows if row["held"] <= 4 * MEMORY]
        left = ", ".join(f"{row['plan']} at {format_number(row['held'], 'B')}" for row in rows if row not in drawn)
        parts = ("params", "grads", "optimizer")
        return plots.stacked_bars(
            [plots.Stack(in_words(row), {part: row[part] for part in parts}) for row in drawn],
            title=f"65 billion parameters on 32 GPUs: {', '.join(row['plan'] for row in rows if row['fits'])} fit",
            value=plots.Axis("held by a GPU", unit="B"), mark=(MEMORY, f"80 GB ({format_number(MEMORY, 'B')})"),
            caption="Parameters and gradients in 16 bits, optimizer state in 32, as in the paper; activations come on "
            f"top. Off the picture: {left}. The paper reports that only GGG, IGG and IIG ran, and did not try GIG.",
        )  # fmt: skip

    def wire_figure(self) -> Figure:
        """Bytes that a process sent on each kind of link, beside the prediction."""
        stacks = [
            plots.Stack(
                in_words(row), {"inside a group": row[f"{key}_intra"], "between groups": row[f"{key}_inter"]},
                kind="measured" if key == "sent" else "predicted",
            )
            for row in self.ran.values()
            for key in ("predicted", "sent")
        ]  # fmt: skip
        finding = "Every byte on the wire is where it was predicted" if self.exact else "Bytes differ from prediction"
        return plots.stacked_bars(
            stacks, title=finding, value=plots.Axis("sent by a process in a step", unit="B"),
            caption="Counted in the ring collectives, payload only. Two groups of two processes on this machine.",
        )  # fmt: skip

    def speed_figure(self) -> Figure:
        """Bytes held against seconds of a step."""
        rows = list(self.ran.values())
        least, quickest = (min(rows, key=lambda row: row[column]) for column in ("held", "seconds"))
        title = f"{least['plan']} holds least and takes {ratio(self.ran, 'IIG', least['plan'])} as long as IIG"
        if least["plan"] == "IIG":
            title = f"IIG holds least, {ratio(self.ran, quickest['plan'], 'IIG')} the quickest step"
        roles = [ROLES.get(row["plan"], "baseline") for row in rows]
        points = [(in_words(row), [row["held"]], [row["seconds"]]) for row in rows]
        return plots.scatter(
            [plots.Series(*point, role) for point, role in zip(points, roles, strict=True)],
            title=title, x=plots.Axis("held by a process", unit="B"), y=plots.Axis("step", unit="s", low=0),
            caption="Lower left is better. The network is the paper's, a thousand times slower: 80 Mbit/s between "
            "groups, 2000 Mbit/s inside, held back inside the rings. The quickest of three steps.",
        )  # fmt: skip

    def tables(self) -> list[Table]:
        """What ran here, and the paper's statements."""
        note = (
            'paper: measured on A100 GPUs, throughput over the rival\'s (1/16: "266 % that of ZeRO-3" in its '
            "abstract). by formula, simulated: how much longer the rival's links are busy, by the paper's formula "
            "(reconstructed) and for what our engine sends. Arithmetic hides part of that, so these rank "
            "plans and bound the gain."
        )
        tables = [Table(statements(self.record), "The paper's statements", note=note)]
        if rows := list(self.ran.values()):
            here = (
                "predicted seconds: links alone; processes on this machine also compute, and share its cores. One run."
            )
            ran = Table(rows, "Four processes, two groups", UNITS, COLUMNS, here, ROLES)
            tables = [ran, Table(rows, "Sent by a process in a step", UNITS, SENT, roles=ROLES), *tables]
        return tables
