"""A plan: price every candidate, pick one, and write the page."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparing.errors import require
from sparing.jobs import hub
from sparing.jobs.lm.meta import Source
from sparing.jobs.plan import cluster_page, device
from sparing.jobs.plan.candidates import Candidate, candidates, read_config
from sparing.jobs.plan.cluster import plan_cluster
from sparing.jobs.plan.command import command_of
from sparing.jobs.plan.price import Price, try_price
from sparing.jobs.plan.settings import Settings
from sparing.jobs.run import Run
from sparing.memory import CATEGORIES
from sparing.report import Progress, Record, format_number

UNITS = {
    **dict.fromkeys((*CATEGORIES, "peak", "memory", "host"), "B"), "seconds": "s", "coverage": "%", "longest": "tokens",
    "tokens_per_second": "tokens/s", "operations": "FLOP",
}  # fmt: skip


def run(settings: Settings) -> Record:
    """Price every candidate and pick one: tables "plan", "commands", "about", "advice"; on clusters "best", maps.

    With ``settings.interactive`` only that page is written: table "page".
    """
    if settings.interactive is not None:
        return _interactive(settings, settings.interactive)
    reads = tuple(path for path in (settings.place, settings.topology) if path is not None)
    with Run(settings, reads=reads, resumes=False) as run:
        settings = run.settings
        source, cluster = Source(read_config(settings), settings.attention), settings.cluster
        fits, do = not source.causal or settings.length <= source.positions, f"pass --length {source.positions} or less"
        require(fits, "length", settings.length, f"the model has {source.positions} positions", do)
        ways = list(candidates(settings, source))
        if cluster is None:
            record = _record(settings, source, device.judge(_priced(settings, source, ways), settings.limit))
        else:
            record = plan_cluster(source, settings, cluster, ways)
        run.resume(record)
        run.claim()
        if cluster is None:
            return run.finish(device.PAGE.write)
        return run.finish(lambda record, path: cluster_page.write_page(record, path, cluster))


def show(record: Record) -> None:
    """Print the table, the pick and where the page is."""
    if pages := record.table("page"):
        sys.stdout.write(f"page: {pages[0]['page']}\n")
        return
    (cluster_page if record.table("links") else device).show(record)


def _interactive(settings: Settings, path: Path) -> Record:
    # here, because only this needs its templates
    from sparing.jobs.plan.interactive.write import write_page

    settings = hub.pinned(settings, {})
    written = write_page(settings, path)
    record = Record(question="What fits, and how fast?", settings=settings, seed=0)
    record.add("page", page=str(written), size=written.stat().st_size)
    return record


def _priced(settings: Settings, source: Source, ways: list[Candidate]) -> dict[Candidate, Price]:
    """Price every way."""
    prices: dict[Candidate, Price] = {}
    with Progress("price", total=len(ways), unit="candidate") as bar:
        try:
            for way in ways:
                # modules and models stay: looking at them again is most of what collecting garbage takes
                gc.freeze()
                prices[way] = try_price(source, settings, way)
                bar.advance(method=way.label)
        finally:
            gc.unfreeze()
    return prices


def _ladder(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row per method: without checkpointing if it fits so, else with it; either knows the longest row."""
    for label in dict.fromkeys(row["method"] for row in rows):
        plain, again = (row for row in rows if row["method"] == label)
        yield {**(plain if plain["fits"] or again["peak"] is None else again), "longest": again["longest"]}


def _record(settings: Settings, source: Source, verdicts: list[device.Verdict]) -> Record:
    question = "Which way to fine-tune this model fits this memory?"
    record = Record(question=question, settings=settings, seed=0, units=dict(UNITS))
    for verdict in verdicts:
        price, way = verdict.price, verdict.candidate
        record.add(
            "plan", way=way.name, method=way.label, checkpointing=way.checkpointing, trainable=price.trainable,
            **{part: getattr(price.bytes, part, None) for part in CATEGORIES}, host=price.host,
            peak=getattr(price.bytes, "total", None), operations=price.flops, longest=price.longest,
            seconds=price.seconds, tokens_per_second=way.step.tokens / price.seconds if price.seconds else None,
            coverage=None if price.coverage is None else 100 * price.coverage,
            fits=verdict.fits, picked=verdict.picked, verdict=verdict.why,
        )  # fmt: skip
        if price.bytes is not None and source.causal:
            record.add("commands", way=way.name, command=command_of(settings, way))
    for row in _ladder(record.table("plan")):
        record.add("ladder", **row)
    best = next((verdict for verdict in verdicts if verdict.picked), None)
    record.add(
        "about", model=settings.title, parameters=source.parameters, memory=settings.limit,
        device=f"{settings.room} ({format_number(settings.limit, 'B')})", batch=settings.batch, length=settings.length,
        pick="nothing fits" if best is None else best.candidate.name, why="" if best is None else best.why,
        speed=settings.speed,
    )  # fmt: skip
    for note in dict.fromkeys(f"{v.candidate.label}: {note}" for v in verdicts for note in v.price.advice if v.picked):
        record.add("advice", note=note)
    if settings.accumulate == 1:
        note = (
            "one micro-batch a step; finetune takes 8, and gradients then stay while activations come: --accumulate 8"
        )
        record.add("advice", note=note)
    if settings.card and settings.rate is None:
        record.add(
            "advice",
            note=f"no seconds: {settings.card} has no matrix units for {settings.dtype}; --tflops gives a speed",
        )
    if not source.causal:
        note = "finetune runs causal language models; train this one in a loop of yours, with sparing.layersample"
        record.add("advice", note=note)
    return record
