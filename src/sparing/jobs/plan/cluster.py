"""A plan for a cluster: every way to fine-tune, priced, split by every plan, simulated and judged."""

from __future__ import annotations

import math
from typing import Any, Final

from sparing.errors import UserError
from sparing.jobs.plan.candidates import Candidate
from sparing.jobs.plan.crossover import crossovers
from sparing.jobs.plan.price import Price, Pricer, try_price
from sparing.jobs.plan.settings import Settings
from sparing.jobs.plan.shards import Option, judge, named, options
from sparing.jobs.plan.workloads import workload
from sparing.jobs.probe import cluster_title, link_row
from sparing.memory import parse_bytes
from sparing.report import Progress, Record, format_number
from sparing.sharding.config import Topology

# Column -> unit.
UNITS: Final = {
    "params": "B", "grads": "B", "optimizer": "B", "transient": "B", "activations": "B", "peak": "B", "memory": "B",
    "seconds": "s", "guideline": "s", "compute": "s", "ratio": "×", "rate": "Gbit/s", "latency": "s",
    **{f"{kind}_{axis}": unit for axis in ("intra", "middle", "inter", "global")
       for kind, unit in (("sent", "B"), ("busy", "s"), ("waiting", "s"))},
}  # fmt: skip


def plan_cluster(config: Any, settings: Settings, cluster: Topology, ways: list[Candidate], pricer: Pricer) -> Record:
    """Compare all ways to fine-tune on a cluster; "advice" says why a way has no price."""
    found: dict[Candidate, list[Option]] = {}
    prices: dict[Candidate, Price] = {}
    with Progress("price and simulate", total=len(ways), unit="way") as bar:
        for way in ways:
            prices[way] = try_price(pricer, config, settings, way)
        known = [way for way in ways if prices[way].bytes is not None]
        failed = [f"{way.name}: {prices[way].why}" for way in ways if prices[way].bytes is None]
        if not known:
            why, do = failed[0] if failed else "there is no candidate", "pass other --ranks or --active, or --no-ledger"
            raise UserError("plan", got=f"{len(ways)} ways to fine-tune, none of them priced", why=why, do=do)
        for way in known:
            work = workload(config, settings, way, {other: prices[other] for other in known})
            found[way] = options(way, work, cluster, settings.memory, settings.survives)
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
    if settings.maps and all(math.isfinite(axis.rate) for axis in cluster.axes):
        for cell in crossovers(judged[0].work, cluster, settings.memory):
            record.add("crossover", **cell)
    _about(record, settings, cluster, judged)
    for note in failed:
        record.add("advice", note=note)
    return record


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
        "params": price.params, "grads": price.grads, "optimizer": price.optimizer, "activations": price.activations,
        "transient": price.transient, "peak": price.memory, "seconds": option.seconds, "compute": timeline.compute,
        **links, "guideline": price.paper_seconds, "fits": option.fits, "best": option.best, "picked": option.picked,
        "verdict": option.why,
    }  # fmt: skip


def _about(record: Record, settings: Settings, cluster: Topology, judged: list[Option]) -> None:
    first = judged[0]
    memory = parse_bytes(settings.memory)
    picked = f"{first.candidate.label}, {named(first)}"
    record.add(
        "about", model=settings.title, parameters=int(first.work.params), memory=memory,
        device=f"{settings.memory} ({format_number(memory, 'B')})", batch=settings.batch, length=settings.length,
        ranks=cluster.world, cluster=cluster_title(cluster), accumulate=settings.accumulate,
        share=first.work.trainable / first.work.params, timed=settings.tflops is not None,
        pick=picked if first.picked else "nothing fits", page=str(settings.out / "report.html"),
    )  # fmt: skip
    for note in _notes(settings, first):
        record.add("advice", note=note)


def _notes(settings: Settings, first: Option) -> list[str]:
    notes = []
    if settings.params is not None:
        notes.append(
            f"of the model only its size is known: it is divided as a LLaMA of {first.work.blocks} blocks; pass a "
            "directory for its own blocks"
        )
    if settings.tflops is None:
        notes.append("only the links are timed; with --tflops arithmetic is counted too, and what hides behind it")
    if settings.dtype == "bfloat16" and settings.gradients == "bfloat16":
        notes.append(
            "gradients are counted in bfloat16, as in the paper; this library's engine sums them in float32: "
            "--gradients float32"
        )
    return notes
