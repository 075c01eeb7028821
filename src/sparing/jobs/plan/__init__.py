"""``sparing plan``: what fits on this hardware, before anything is loaded; the pick, and why each other lost.

On one device the ways to fine-tune compete; on a cluster each of them with every way to split it over groups of GPUs.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sparing.errors import UserError
from sparing.jobs.plan import cluster_page, device
from sparing.jobs.plan.cluster import plan_cluster
from sparing.jobs.plan.price import (
    Candidate,
    Price,
    Pricer,
    by_formula,
    by_ledger,
    candidates,
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
            prices: dict[Candidate, Price] = {}
            with Progress("price", total=len(ways), unit="candidate") as bar:
                for way in ways:
                    prices[way] = try_price(pricer, config, settings, way)
                    bar.advance(method=way.label)
            record = _record(settings, device.judge(prices, parse_bytes(settings.memory)), parameters)
        else:
            record = plan_cluster(config, settings, cluster, ways, pricer)
        run.resume(record)
        run.claim()
        if cluster is None:
            return run.finish(device.PAGE.write)
        return run.finish(lambda record, path: cluster_page.write_page(record, path, cluster))


def show(record: Record) -> None:
    """Print the table, the pick and where the page is."""
    (cluster_page if record.table("links") else device).show(record)


def _way(config: Any, settings: Settings) -> tuple[Pricer, int, bool, int]:
    """How to price this model, its number of blocks, whether its head is tied, and its number of parameters."""
    if not (settings.ledger or has_dropout(config)):
        # no closed formula for this family
        with contextlib.suppress(UserError):
            shape = shape_of(config)
            return by_formula, shape.layers, shape.tied, shape.total
    return by_ledger, *sizes(config, settings.attention)


def _record(settings: Settings, verdicts: list[device.Verdict], parameters: int) -> Record:
    question, memory = "Which way to fine-tune this model fits this memory?", parse_bytes(settings.memory)
    record = Record(question=question, settings=settings, seed=0, units=dict(UNITS))
    for verdict in verdicts:
        price, way = verdict.price, verdict.candidate
        record.add(
            "plan", way=way.name, method=way.label, checkpointing=way.checkpointing, trainable=price.trainable,
            **{part: getattr(price.bytes, part, None) for part in CATEGORIES},
            peak=getattr(price.bytes, "total", None), speed=price.speed,
            coverage=None if price.coverage is None else 100 * price.coverage,
            fits=verdict.fits, picked=verdict.picked, verdict=verdict.why,
        )  # fmt: skip
    best = next((verdict for verdict in verdicts if verdict.picked), None)
    record.add(
        "about", model=settings.title, parameters=parameters, memory=memory,
        device=f"{settings.memory} ({format_number(memory, 'B')})", batch=settings.batch, length=settings.length,
        pick="nothing fits" if best is None else best.candidate.name, why="" if best is None else best.why,
        page=str(settings.out / "report.html"),
    )  # fmt: skip
    for note in dict.fromkeys(f"{v.candidate.label}: {note}" for v in verdicts for note in v.price.advice if v.picked):
        record.add("advice", note=note)
    if settings.accumulate == 1:
        note = (
            "one micro-batch a step; finetune takes 8, and gradients then stay while activations come: --accumulate 8"
        )
        record.add("advice", note=note)
    return record
