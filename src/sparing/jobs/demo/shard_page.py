"""Page of the chapter on sharding: what fits, what was sent, how long a step took, and the paper's statements."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from sparing.jobs.demo.chapter import MADE, Chapter, Row, keyed
from sparing.jobs.demo.finding import Difference
from sparing.jobs.demo.shard import CASES, MEMORY, WORKS
from sparing.report import Figure, Record, Table, format_number, plots
from sparing.report.page import Number

ROLES: Final[dict[str, plots.Role]] = {
    "NNN": "reference", "NNG": "second_rival", "IIG": "ours", "GGG": "rival", "IIG, 8 bits": "extension",
}  # fmt: skip
COLUMNS: Final = ("plan", "known_as", "held", "predicted_held", "seconds", "predicted_seconds", "loss")
SENT: Final = ("plan", "sent_intra", "predicted_intra", "sent_inter", "predicted_inter")
UNITS: Final = {
    "held": "B", "predicted_held": "B", "sent_intra": "B", "predicted_intra": "B", "sent_inter": "B",
    "predicted_inter": "B", "seconds": "s", "predicted_seconds": "s", "guideline": "s", "loss": "nat/byte",
}  # fmt: skip
NOT_COMPARED: Final = ("NNN", "NNI", "NNG", "INI", "ING", "GIG", "GNG")  # by the paper's main comparison


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
        self.few = next((plan for plan in self.ran if "bits" in plan), None)

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
        for row in (row for row in self.record.table("shard_losses") if row["plan"] != self.few):
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

    def faster(self, plan: str, rival: str) -> Difference:
        """How many times as long a step takes under the rival, paired by round."""
        seconds: dict[str, list[float]] = {}
        for row in self.record.table("shard_rounds"):
            seconds.setdefault(row["plan"], []).append(row["seconds"])
        return Difference.of_ratios([b / a for a, b in zip(seconds[plan], seconds[rival], strict=True)])

    @property
    def rounds(self) -> str:
        """What an interval of times is over."""
        n = WORKS[self.scale].rounds
        return f"{n} round{'s' if n > 1 else ''} on this machine"

    def answer(self) -> str:
        """What the processes here sent and held; without them, what fits on the paper's cluster."""
        if not self.comparable:
            return self.fit_sentence()
        same = "to the byte as predicted" if self.exact else "NOT as predicted: a bug"
        return (
            f"On four processes with a slow link between two pairs, the split **IIG** holds **{self.share} %** of what "
            f"plain data parallelism does; the time of a step under ZeRO-3 over that under IIG is "
            f"**{self.faster('IIG', 'GGG').whole}**; bytes sent and held are **{same}**."
        )

    def story(self) -> str:
        """Three letters a plan."""
        here = (
            f"Four processes of this machine then train a small net by {len(WORKS[self.scale].plans)} plans, with "
            "links between two groups held back, and by one of them with eight bits a number on the slow links."
        )
        return (
            "PaRO splits parameters, gradients and optimizer state each on its own: **N** not at all, **I** inside a "
            "group of GPUs, **G** over all of them. What must move often stays inside a group; what moves once a step "
            "goes over all. A plan is three letters, DDP is NNN and ZeRO-3 is GGG; 14 of 27 make sense. All are priced "
            f"for the paper's cluster, 25 times slower between machines than inside. {here if self.ran else ''}"
        )

    def pays(self) -> str:
        """Slow links between groups, and fewer bits on them."""
        if not self.comparable or self.few is None:
            return "Links between groups that are many times slower than those inside, and a model that must be cut."
        share = 100 * self.ran[self.few]["sent_inter"] / self.ran["IIG"]["sent_inter"]
        return (
            "Links between groups that are many times slower than those inside. In eight bits the slow links carry "
            f"{share:.0f} % of the bytes; time of a step with exact links over that with eight bits: "
            f"{self.faster(self.few, 'IIG').whole}. Losses after "
            f"{len(self.record.table('shard_losses', plan='IIG'))} steps differ by "
            f"{format_number(abs(self.ran[self.few]['loss'] - self.ran['IIG']['loss']))} nat/byte, which says nothing "
            "of a long run."
        )

    def fails(self) -> str:
        """Models that fit, and equal links."""
        here = f" (IIG's step over DDP's here: {self.faster('NNN', 'IIG').whole})" if self.comparable else ""
        return (
            f"A model that fits whole on each GPU should stay whole{here}. On links that are equally fast everywhere "
            "collectives in two levels lose to a flat ring (docs/results/sharding.md)."
        )

    def card(self) -> Number:
        """Speed against ZeRO-3; the planner's own ratio where no process could be started."""
        if not self.comparable:
            whole, cut = (format_number(self.full[plan]["held"], "B") for plan in ("NNN", "IIG"))
            return Number(
                value=ratio(self.full, "IIG", "GGG"), label="time that links are busy in a step: ZeRO-3 over IIG, 65B",
                interval="computed from shapes, nothing run", control=f"DDP would hold {whole} a GPU, IIG {cut}",
            )  # fmt: skip
        gain = self.faster("IIG", "GGG")
        label = "time of a step, ZeRO-3 over the split IIG: four processes, a slow link between two pairs"
        plain, ours = (format_number(self.ran[plan]["seconds"], "s") for plan in ("NNN", "IIG"))
        return Number(
            value=gain.headline, label=label, interval=gain.beside("rounds"),
            control=f"DDP {plain}, IIG {ours} in {self.share} % of DDP's bytes",
        )  # fmt: skip

    def brief(self) -> str:
        """The finding in a line."""
        if not self.comparable:
            return f"{len(self.fitting)} of {len(self.full)} plans fit 80 GB"
        return f"step, ZeRO-3 over IIG: {self.faster('IIG', 'GGG').headline}"

    def numbers(self) -> list[Number]:
        """Bytes and what fits."""
        computed = "computed from shapes, nothing run"
        shapes = "ways to split 65 billion parameters that fit 32 GPUs of 80 GB"
        fits = Number(value=f"{len(self.fitting)} of {len(self.full)}", label=shapes, note=computed)
        if not self.comparable:
            held = format_number(self.full["IIG"]["held"], "B")
            return [Number(value=held, label="held by a GPU under IIG", note=computed), fits]
        held = "of the bytes that plain data parallelism (DDP) holds in each process: IIG"
        counted = "counted tensor by tensor, as predicted" if self.exact else "NOT as predicted"
        return [Number(value=f"{self.share} %", label=held, note=counted), fits]

    def licences(self) -> list[tuple[str, str]]:
        """The text that the processes read."""
        return [MADE["alice"]] if self.ran else []

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
            found.append(("the same: small net, four processes", "–", f"{self.faster('IIG', 'GGG').whole} (measured)"))
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
        least = min(rows, key=lambda row: row["held"])["plan"]
        title = f"{least} holds least of {len(rows)}"
        if least != "IIG" and self.comparable:
            title = f"{least} holds least; time of its step over that of IIG's: {self.faster('IIG', least).whole}"
        roles = [ROLES.get(row["plan"], "baseline") for row in rows]
        points = [(in_words(row), [row["held"]], [row["seconds"]]) for row in rows]
        return plots.scatter(
            [plots.Series(*point, role) for point, role in zip(points, roles, strict=True)],
            title=title, x=plots.Axis("held by a process", unit="B"), y=plots.Axis("step", unit="s", low=0),
            caption="Lower left is better. The network is the paper's, a thousand times slower: 80 Mbit/s between "
            "groups, 2000 Mbit/s inside, held back inside the rings. "
            f"Median of {self.rounds}.",
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
                "predicted seconds: links alone; processes on this machine also compute, and share its cores. Median "
                f"of {self.rounds}."
            )
            ran = Table(rows, "Four processes, two groups", UNITS, COLUMNS, here, ROLES)
            tables = [ran, Table(rows, "Sent by a process in a step", UNITS, SENT, roles=ROLES), *tables]
        return tables
