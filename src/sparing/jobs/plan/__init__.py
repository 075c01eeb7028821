"""``sparing plan``: what fits on this hardware, before anything is loaded; the pick, and why each other lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparing.errors import UserError
from sparing.jobs.plan.candidates import Candidate, candidates
from sparing.jobs.plan.page import show, write_page
from sparing.jobs.plan.pick import Verdict, judge, picked
from sparing.jobs.plan.price import Price, by_formula, by_ledger, read_config, sizes
from sparing.jobs.plan.settings import Settings
from sparing.layersample.shape import Shape
from sparing.memory import CATEGORIES, parse_bytes
from sparing.report import Progress, Record, format_number

__all__ = ["Settings", "run", "show"]

UNITS = {**dict.fromkeys((*CATEGORIES, "peak", "memory"), "B"), "speed": "×", "coverage": "%"}


def run(settings: Settings) -> Record:
    """Price every candidate and pick one.

    Args:
        settings: Model, memory, batch.

    Returns:
        Tables "plan" (a row per candidate), "about" (one row) and "advice".

    Raises:
        UserError: If the model's configuration is missing or broken, or has no repeated blocks.
    """
    config = read_config(settings)
    pricer, layers, tied = _way(config, settings)
    ways = list(candidates(settings, layers=layers, tied=tied))
    prices: dict[Candidate, Price] = {}
    with Progress("price", total=len(ways), unit="candidate") as bar:
        for way in ways:
            prices[way] = pricer(config, settings, way)
            bar.advance(method=way.label)
    record = _record(settings, judge(prices, parse_bytes(settings.memory)))
    settings.out.mkdir(parents=True, exist_ok=True)
    record.write(settings.out / "record.jsonl")
    write_page(record, settings.out / "report.html")
    return record


def _way(config: Any, settings: Settings) -> tuple[Callable[[Any, Settings, Candidate], Price], int, bool]:
    """How to price this model, its number of blocks, and whether its head is tied."""
    if settings.ledger:
        return by_ledger, *sizes(config)
    try:
        shape = Shape.from_config(config)
    except UserError:  # no closed formula for this family
        return by_ledger, *sizes(config)
    return by_formula, shape.layers, shape.tied


def _record(settings: Settings, verdicts: list[Verdict]) -> Record:
    record = Record(
        question="Which way to fine-tune this model fits this memory?", settings=settings, seed=0, units=dict(UNITS)
    )
    for verdict in verdicts:
        record.add("plan", **_row(verdict))
    best = picked(verdicts)
    record.add(
        "about",
        model=settings.model.name if settings.model.name != "config.json" else settings.model.parent.name,
        parameters=verdicts[0].price.trainable,
        memory=parse_bytes(settings.memory),
        device=f"{settings.memory} ({format_number(parse_bytes(settings.memory), 'B')})",
        batch=settings.batch,
        length=settings.length,
        pick="nothing fits" if best is None else _named(best.candidate),
        page=str(settings.out / "report.html"),
    )
    for note in dict.fromkeys(f"{v.candidate.label}: {note}" for v in verdicts for note in v.price.advice if v.picked):
        record.add("advice", note=note)
    return record


def _named(candidate: Candidate) -> str:
    return candidate.label + (", checkpointing" if candidate.checkpointing else "")


def _row(verdict: Verdict) -> dict[str, Any]:
    price = verdict.price
    return {
        "way": _named(verdict.candidate),
        "method": verdict.candidate.label,
        "checkpointing": verdict.candidate.checkpointing,
        "trainable": price.trainable,
        **{part: getattr(price.bytes, part) for part in CATEGORIES},
        "peak": price.bytes.total,
        "speed": price.speed,
        "coverage": None if price.coverage is None else 100 * price.coverage,
        "fits": verdict.fits,
        "picked": verdict.picked,
        "verdict": verdict.why,
    }
