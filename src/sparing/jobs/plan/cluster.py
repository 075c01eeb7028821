"""A plan for a cluster: every way to fine-tune × every way to split it, simulated and judged by a stated rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from sparing.errors import UserError
from sparing.jobs.lm.meta import Source
from sparing.jobs.plan.candidates import Candidate
from sparing.jobs.plan.crossover import crossovers
from sparing.jobs.plan.price import Price, try_price
from sparing.jobs.plan.settings import Settings
from sparing.jobs.plan.workloads import workload
from sparing.jobs.probe import cluster_title, link_row
from sparing.layersample.price.predict import Full
from sparing.memory import format_bytes, parse_bytes
from sparing.report import Progress, Record, format_number
from sparing.report.declared import applicable
from sparing.sharding.planner.choose import TIE, choose
from sparing.sharding.planner.choose import Verdict as Split
from sparing.sharding.planner.config import Topology, Workload
from sparing.sharding.planner.wire_choices import wire_choices

# The rule, in words, for the page.
RULE: Final = (
    "Full fine-tuning if it fits under some plan: it is what the others stand in for. If it does not, LoRA: on "
    "SmolLM2, the one well-trained model that was measured, it led layer sampling (on a small model of our own layer "
    "sampling led). Among equals cost decides: the shortest step, then one that does not compute activations again, "
    "then the fewest bytes."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A way to fine-tune, split by a plan."""

    candidate: Candidate
    work: Workload
    split: Split
    fits: bool  # whether its peak is within the memory, and it survives what it must
    best: bool = False
    picked: bool = False
    why: str

    @property
    def seconds(self) -> float:
        """Time of a step (s)."""
        return self.split.seconds

    @property
    def memory(self) -> int:
        """Peak of a rank (bytes)."""
        return self.split.memory


def options(candidate: Candidate, work: Workload, cluster: Topology, memory: str, survives: int = 0) -> list[Option]:
    """Evaluate all plans for one candidate: those that fit from best to worst, then the others by time.

    ``survives``: groups that may be lost (count).
    """
    copies = "one copy of some state in the world"
    try:
        ranking = choose(work, cluster, memory, survives=survives).ranking
    except UserError:
        # Nothing fits: say by how much each plan is too large, unless the request itself cannot be met.
        if survives >= max(cluster.axes[-1].size, 1):
            raise
        ranking = tuple(
            replace(split, fits=False, why=f"{over / 1e9:.3g} GB too much" if over > 0 else copies)
            for split in choose(work, cluster, None).ranking
            for over in [split.memory - parse_bytes(memory)]
        )
    return [Option(candidate=candidate, work=work, split=split, fits=split.fits, why=split.why) for split in ranking]


def judge(found: Mapping[Candidate, Sequence[Option]]) -> list[Option]:
    """Apply the rule: the best of each method first, the pick at the top; then the others, method by method."""
    labels = list(dict.fromkeys(way.label for way in found))
    leaders = [_leader([rows[0] for way, rows in found.items() if way.label == label]) for label in labels]
    fitting = [option for option in leaders if option.fits]
    pick = max(fitting, key=_rank, default=None)
    heads = [
        replace(option, best=True, picked=option is pick, why=_why(option, pick) if option.fits else option.why)
        for option in leaders
    ]
    heads.sort(key=lambda option: (not option.picked, not option.fits))
    rest = [
        replace(option, why=_beside(option, leader))
        for leader in leaders
        for way, rows in found.items()
        for option in rows
        if way.label == leader.candidate.label and option is not leader
    ]
    return [*heads, *rest]


def _rank(option: Option) -> tuple[int, float, bool, int]:
    """Larger is better, lexicographically."""
    return -option.candidate.tier, -option.seconds, not option.candidate.checkpointing, -option.memory


def _leader(firsts: Iterable[Option]) -> Option:
    """The better of a method with and without checkpointing; if nothing fits, the smaller."""
    rows = list(firsts)
    fitting = [option for option in rows if option.fits]
    if not fitting:
        return min(rows, key=lambda option: option.memory)
    # Times within ``TIE`` count as equal; then the option without checkpointing wins.
    quickest = min(option.seconds for option in fitting)
    near = [option for option in fitting if option.seconds <= quickest * (1 + TIE)]
    return min(near, key=lambda option: (option.candidate.checkpointing, option.seconds))


def _why(option: Option, pick: Option | None) -> str:
    assert pick is not None
    full = isinstance(pick.candidate.method, Full)
    if option is pick:
        return f"the pick: {'the reference' if full else 'the fastest that fits, as full does not'}"
    if full:
        return "full fits, and is what this stands in for"
    if option.candidate.tier > pick.candidate.tier:
        return "LoRA fits, and led where both were measured"
    if option.seconds > pick.seconds * (1 + TIE):
        return f"{option.seconds / pick.seconds:.2g}× slower than {pick.candidate.label}"
    return "computes activations again" if option.candidate.checkpointing else "more bytes for the same time"


def _beside(option: Option, leader: Option) -> str:
    """Why an option of a method is not the method's best."""
    if not option.fits or option.candidate is leader.candidate:
        return option.why
    if option.seconds > leader.seconds * (1 + TIE):
        return f"{option.seconds / leader.seconds:.2g}× slower than {named(leader)}"
    if option.candidate.checkpointing:
        return f"{leader.split.plan} fits without checkpointing"
    more = option.memory - leader.memory
    return f"same time, {format_bytes(abs(more))} {'more' if more > 0 else 'less'} than {named(leader)}"


def named(option: Option) -> str:
    """Plan, and checkpointing if there is."""
    return option.split.plan.name + (", checkpointing" if option.candidate.checkpointing else "")


# Column -> unit.
UNITS: Final = {
    "params": "B", "grads": "B", "optimizer": "B", "transient": "B", "activations": "B", "peak": "B", "memory": "B",
    "leaving": "B", "seconds": "s", "guideline": "s", "compute": "s", "ratio": "×", "rate": "Gbit/s", "latency": "s",
    "overhead": "s", "rows_per_second": "rows/s",
    **{f"{kind}_{axis}": unit for axis in ("intra", "middle", "inter", "global")
       for kind, unit in (("sent", "B"), ("busy", "s"), ("waiting", "s"))},
}  # fmt: skip


def plan_cluster(source: Source, settings: Settings, cluster: Topology, ways: list[Candidate]) -> Record:
    """Compare all ways to fine-tune on a cluster; "advice" says why a way has no price."""
    found: dict[Candidate, list[Option]] = {}
    prices: dict[Candidate, Price] = {}
    with Progress("price and simulate", total=len(ways), unit="way") as bar:
        for way in ways:
            prices[way] = try_price(source, settings, way)
        known = [way for way in ways if prices[way].bytes is not None]
        failed = [f"{way.name}: {prices[way].why}" for way in ways if prices[way].bytes is None]
        if not known:
            why = failed[0] if failed else "there is no candidate"
            do = "pass other --lora.ranks or --lisa.active, or --no-ledger"
            raise UserError("plan", got=f"{len(ways)} ways to fine-tune, none of them priced", why=why, do=do)
        for way in known:
            work = workload(source, settings, way, {other: prices[other] for other in known})
            found[way] = options(way, work, cluster, settings.room, settings.survives)
            bar.advance(method=way.label, plan=found[way][0].split.plan.name)
    judged = judge(found)
    record = Record(
        question="Which way to fine-tune this model, and how to split it, is best on this cluster?",
        settings=settings, seed=0, units=dict(UNITS),
    )  # fmt: skip
    for option in judged:
        row = row_of(option, cluster)
        record.add("plan", **row)
        if option.best:
            record.add("best", **row)
    for axis in cluster.axes:
        record.add("links", **link_row(axis))
    _other_ways(record, settings, cluster, judged[0].work)
    if settings.maps and all(math.isfinite(axis.rate) for axis in cluster.axes):
        for cell in crossovers(judged[0].work, cluster, settings.room):
            record.add("crossover", **cell)
    _about(record, settings, cluster, judged)
    for note in failed:
        record.add("advice", note=note)
    return record


def _other_ways(record: Record, settings: Settings, cluster: Topology, work: Workload) -> None:
    """Add what other ways to use the same links take, and other ways to cut groups of unequal size."""
    for choice in wire_choices(work, cluster, settings.room, survives=settings.survives):
        record.add(
            "wires", wires=choice.name, plan=choice.plan and choice.plan.name, seconds=choice.seconds,
            leaving=choice.leaving, peak=choice.memory, verdict=choice.why,
        )  # fmt: skip
    for one in settings.arrangements:
        plan = seconds = pace = None
        # nothing fits: the row says so by what it lacks
        with suppress(UserError):
            best = choose(work, one.topology, settings.room, top=1, survives=settings.survives).best
            plan, seconds = best.plan.name, best.seconds
            pace = one.ranks * settings.accumulate * settings.batch / seconds if seconds else None
        per_group, groups = one.topology.sizes
        record.add(
            "arrangements", groups=groups, per_group=per_group, left_out=one.left_out, plan=plan, seconds=seconds,
            rows_per_second=pace,
        )  # fmt: skip
    rows = [row for row in record.table("arrangements") if row["rows_per_second"]]
    lead = max(rows, key=lambda row: row["rows_per_second"], default=None)
    if lead is not None and lead["left_out"]:
        note = (
            f"{lead['groups']} groups of {lead['per_group']}, without {lead['left_out']} of the GPUs, take more rows a "
            "second than what is planned here: --groups and --per-group plan them"
        )
        record.add("advice", note=note)


def row_of(option: Option, cluster: Topology) -> dict[str, Any]:
    """All that is known of an option, by column."""
    price, timeline = option.split.price, option.split.timeline
    links: dict[str, Any] = {}
    for at, axis in enumerate(cluster.axes):
        links |= {
            f"sent_{axis.name}": price.traffic.total[at],
            f"busy_{axis.name}": timeline.busy[at],
            f"waiting_{axis.name}": timeline.exposed[at],
        }
    return {
        "method": option.candidate.label, "plan": option.split.plan.name, "known_as": option.split.plan.known_as,
        "checkpointing": option.candidate.checkpointing, "trainable": int(option.work.trainable),
        "params": price.params + price.kept, "grads": price.grads, "optimizer": price.optimizer,
        "activations": price.activations, "transient": price.transient, "peak": price.memory,
        "seconds": option.seconds, "compute": timeline.compute, **links,
        "guideline": price.paper_seconds, "fits": option.fits, "best": option.best, "picked": option.picked,
        "verdict": option.why,
    }  # fmt: skip


def _about(record: Record, settings: Settings, cluster: Topology, judged: list[Option]) -> None:
    first, memory = judged[0], settings.limit
    record.add(
        "about", model=settings.title, parameters=int(first.work.params), memory=memory,
        device=f"{settings.room} ({format_number(memory, 'B')})", batch=settings.batch, length=settings.length,
        ranks=cluster.world, cluster=cluster_title(cluster), engine=settings.runs_on, accumulate=settings.accumulate,
        share=first.work.trainable / first.work.params, timed=settings.tflops is not None,
        pick=f"{first.candidate.label}, {named(first)}" if first.picked else "nothing fits",
    )  # fmt: skip
    size_alone = (
        f"of the model only its size is known: it is divided as a LLaMA of {first.work.blocks} blocks; pass a "
        "directory for its own blocks"
    )
    links_alone = "only the links are timed; with --tflops arithmetic is counted too, and what hides behind it"
    short_sums = (
        "gradients are counted in bfloat16, as in the paper; this library's engine sums them in float32: "
        "--gradients float32"
    )
    no_engine = (
        "three kinds of links are planned, but cannot be run on GPUs yet: fully_shard cuts over two at most, and this "
        "library's own engine, which takes three, runs on processors"
    )
    for note in applicable(
        (settings.params is not None, size_alone),
        (settings.tflops is None, links_alone),
        (settings.dtype == settings.gradients == "bfloat16", short_sums),
        (cluster.tiers > 2 and settings.runs_on == "fsdp2", no_engine),
    ):
        record.add("advice", note=note)
