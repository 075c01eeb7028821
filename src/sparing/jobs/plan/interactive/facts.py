"""What the page knows: models with their candidates, cards, and where its sliders begin."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from sparing.errors import UserError
from sparing.jobs.lm import formula
from sparing.jobs.lm.meta import Source
from sparing.jobs.plan.candidates import ROUNDED, Candidate, candidates, read_config
from sparing.jobs.plan.cards import CARDS, REACHED
from sparing.jobs.plan.command import method_flags
from sparing.jobs.plan.interactive.models import MODELS
from sparing.jobs.plan.settings import Settings
from sparing.layersample import LayerSampling
from sparing.layersample.price.activations import LoRA
from sparing.layersample.price.shape import Shape
from sparing.memory import parse_bytes
from sparing.report import format_number
from sparing.sharding.planner.config import parse_rate

# Bytes that a frozen 16-bit weight no longer takes in nf4: half a byte, and a 16-bit scale for 64 of them, stay.
SAVED: Final = 2 - (1 / 2 + 2 / 64)


def facts(settings: Settings) -> dict[str, Any]:
    """Everything that the page shows and computes with, as JSON."""
    own = _own(settings)
    models = dict([own] if own else []) | {name: one for name, one in MODELS.items() if own is None or name != own[0]}
    # a model of so many parameters has no folder that a command could name
    path = str(settings.place) if settings.place is not None else "MODEL" if settings.model is None else None
    return {
        "models": [_model(name, shape, settings, path if own and name == own[0] else None)
                   for name, shape in models.items()],
        "cards": {
            name: {"memory": parse_bytes(card.memory), "peak": card.peak("bfloat16"), "bandwidth": card.bandwidth}
            for name, card in CARDS.items()
        },
        "reached": REACHED,
        "start": {
            "model": own[0] if own else "Llama-3.1-8B", "card": settings.card or "rtx4090", "length": settings.length,
            "batch": settings.batch, "accumulate": settings.accumulate, "groups": settings.groups,
            "per_group": settings.per_group, **_speeds(settings),
        },
    }  # fmt: skip


def _speeds(settings: Settings) -> dict[str, float]:
    """Speeds of links that were told, as the page writes them: GB/s inside a machine, Gbit/s between machines."""
    told = {}
    if settings.intra is not None:
        told["intra"] = parse_rate(settings.intra) / 1e9
    if settings.inter is not None:
        told["inter"] = 8 * parse_rate(settings.inter) / 1e9
    return told


def _own(settings: Settings) -> tuple[str, Shape] | None:
    """The user's model, if one was told."""
    if settings.model is None and settings.params is None:
        return None
    shape = formula.shape_of(read_config(settings))
    if shape is None:
        why = "the page computes with closed formulas, and this family has none"
        raise UserError("interactive", got=settings.title, why=why, do="omit --interactive: a plan runs any model")
    return (settings.title if settings.params is None else f"{format_number(settings.params)} parameters"), shape


def _model(name: str, shape: Shape, settings: Settings, path: str | None) -> dict[str, Any]:
    plain = Settings(
        params=float(shape.total), weights=None, masters=settings.masters, lisa=settings.lisa, lora=settings.lora
    )
    least = min(map(min, shape.linears))
    ways = [
        way for way in candidates(plain, Source(shape, "auto"))
        if not way.checkpointing and _is_runnable(way, shape.layers, least)
    ]  # fmt: skip
    return {
        "name": name, "path": path or name, "shape": asdict(shape), "total": shape.total,
        "ways": [row for way in ways for row in _rows(way, shape)],
    }  # fmt: skip


def _is_runnable(way: Candidate, layers: int, least: int) -> bool:
    """Whether `finetune` takes it: no more blocks than there are, and no adapter wider than its layer."""
    method = way.method
    if isinstance(method, LoRA):
        return method.rank <= least
    return not isinstance(method, LayerSampling) or method.active <= layers


def _rows(way: Candidate, shape: Shape) -> list[dict[str, Any]]:
    """A candidate as the formulas of the page take it, and its twin with rounded frozen weights."""
    on = formula.trained(shape, way.method)
    rank = on.lora.rank if on.lora else 0
    row = {
        "label": way.label, "tier": way.tier, "optimizer": way.optimizer, "embed": int(on.embed), "tail": int(on.tail),
        "head": int(on.head), "blocks": len(on.blocks), "rank": rank, "masters": int(way.step.masters),
        "flags": " ".join(method_flags(way)),
    }  # fmt: skip
    label = way.label
    if not (rank or (label.startswith("LISA") and not on.embed)):
        return [row]
    stored = {
        "label": f"QLoRA, nf4, rank {rank}" if rank else label.replace("LISA,", "QLISA, nf4,"), "tier": ROUNDED,
        "flags": f"{row['flags']} --weights nf4", "saved": SAVED * (shape.layers - len(on.blocks)) * shape.block_matmul,
        # two matrices at most are whole at once, and a mebibyte is more than any mask or scale beside them
        "cushion": 2**20 + 2 * 2 * max(inputs * outputs for inputs, outputs in shape.linears),
    }  # fmt: skip
    return [row, {**row, **stored}]
