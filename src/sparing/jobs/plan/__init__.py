"""``sparing plan``: what fits on this hardware, before anything is loaded; the pick, and why each other lost.

On one device the ways to fine-tune compete; on a cluster each of them with every way to split it over groups of GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparing.errors import UserError
from sparing.jobs.plan import cluster_page, page
from sparing.jobs.plan.candidates import Candidate, candidates
from sparing.jobs.plan.cluster import plan_cluster
from sparing.jobs.plan.pick import Verdict, judge, picked
from sparing.jobs.plan.price import (
    Price,
    Pricer,
    by_formula,
    by_ledger,
    has_dropout,
    read_config,
    shape_of,
    sizes,
    try_price,
)
from sparing.jobs.plan.settings import Settings
from sparing.jobs.run import Run
from sparing.memory import CATEGORIES, parse_bytes
from sparing.report import Progress, Record, format_number

__all__ = ["Settings", "run", "show"]

UNITS = {**dict.fromkeys((*CATEGORIES, "peak", "memory"), "B"), "speed": "×", "coverage": "%"}


def run(settings: Settings) -> Record:
    """Price every candidate and pick one: tables "plan", "about", "advice"; on a cluster also "best" and maps."""
    reads = tuple(path for path in (settings.place, settings.topology) if path is not None)
    with Run(settings, reads=reads, resumes=False) as run:
        config, cluster = read_config(settings), settings.cluster
        pricer, layers, tied, parameters = _way(config, settings)
        ways = list(candidates(settings, layers=layers, tied=tied))
        if cluster is None:
            verdicts = judge(_prices(config, settings, ways, pricer), parse_bytes(settings.memory))
            record = _record(settings, verdicts, parameters)
        else:
            record = plan_cluster(config, settings, cluster, ways, pricer)
        run.resume(record)
        run.claim()
        if cluster is None:
            return run.finish(page.write_page)
        return run.finish(lambda record, path: cluster_page.write_page(record, path, cluster))


def show(record: Record) -> None:
    """Print the table, the pick and where the page is."""
    (cluster_page if record.table("links") else page).show(record)


def _prices(config: Any, settings: Settings, ways: Sequence[Candidate], pricer: Pricer) -> dict[Candidate, Price]:
    prices: dict[Candidate, Price] = {}
    with Progress("price", total=len(ways), unit="candidate") as bar:
        for way in ways:
            prices[way] = try_price(pricer, config, settings, way)
            bar.advance(method=way.label)
    return prices


def _way(config: Any, settings: Settings) -> tuple[Pricer, int, bool, int]:
    """How to price this model, its number of blocks, whether its head is tied, and its number of parameters."""
    if settings.ledger or has_dropout(config):
        return by_ledger, *sizes(config, settings.attention)
    try:
        shape = shape_of(config)
    except UserError:  # no closed formula for this family
        return by_ledger, *sizes(config, settings.attention)
    return by_formula, shape.layers, shape.tied, shape.total


def _record(settings: Settings, verdicts: list[Verdict], parameters: int) -> Record:
    record = Record(
        question="Which way to fine-tune this model fits this memory?", settings=settings, seed=0, units=dict(UNITS)
    )
    for verdict in verdicts:
        record.add("plan", **_row(verdict))
    best = picked(verdicts)
    record.add(
        "about",
        model=settings.title,
        parameters=parameters,
        memory=parse_bytes(settings.memory),
        device=f"{settings.memory} ({format_number(parse_bytes(settings.memory), 'B')})",
        batch=settings.batch,
        length=settings.length,
        pick="nothing fits" if best is None else best.candidate.name,
        why="" if best is None else best.why,
        page=str(settings.out / "report.html"),
    )
    for note in dict.fromkeys(f"{v.candidate.label}: {note}" for v in verdicts for note in v.price.advice if v.picked):
        record.add("advice", note=note)
    if settings.accumulate == 1:
        note = (
            "one micro-batch a step; finetune takes 8, and gradients then stay while activations come: --accumulate 8"
        )
        record.add("advice", note=note)
    return record


def _row(verdict: Verdict) -> dict[str, Any]:
    price = verdict.price
    return {
        "way": verdict.candidate.name,
        "method": verdict.candidate.label,
        "checkpointing": verdict.candidate.checkpointing,
        "trainable": price.trainable,
        **{part: getattr(price.bytes, part, None) for part in CATEGORIES},
        "peak": getattr(price.bytes, "total", None),
        "speed": price.speed,
        "coverage": None if price.coverage is None else 100 * price.coverage,
        "fits": verdict.fits,
        "picked": verdict.picked,
        "verdict": verdict.why,
    }
