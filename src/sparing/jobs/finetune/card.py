"""The model card of a run, in the form of the Hugging Face hub: what it was made of, how, and what came of it.

https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, Literal

from sparing.jobs import hub
from sparing.jobs.finetune.page import NAMES, ends
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.limits import Group
from sparing.jobs.lm.adapters import Lora
from sparing.report import Record, format_number

CARD: Final = "README.md"  # where the hub looks for it
_VERSIONS: Final = ("sparing", "python", "torch", "transformers", "peft", "datasets")
_PLACES: Final = {"out", "resume", "overwrite"}  # settings that say nothing about the model


def _words(value: Any, *, whole: bool = False) -> str:
    if isinstance(value, tuple):
        return " ".join(_words(part, whole=whole) for part in value)
    short = isinstance(value, Path) and not whole and hub.name_of(value) is None
    return shlex.quote(value.name if short else str(value))


def _flags(settings: Any, prefix: str = "", *, whole: bool = False) -> list[str]:
    """The settings that are not as usual, as the command line spells them."""
    found: list[str] = []
    for field in fields(settings):
        value, usual = getattr(settings, field.name), field.default
        if isinstance(value, Group):
            found += _flags(value, f"{field.name}.", whole=whole) if value.in_use(settings) else []
        elif value != usual and usual is not MISSING and (whole or field.name not in _PLACES):
            name = f"{prefix}{field.name}".replace("_", "-")
            plain = f"--{prefix}{'' if value else 'no-'}{field.name}".replace("_", "-")
            found.append(plain if isinstance(value, bool) else f"--{name} {_words(value, whole=whole)}")
    return found


def command_of(settings: Finetune, *, whole: bool = False) -> str:
    """What to type for the same run: with the names of files and folders or, ``whole``, their paths, OUT too."""
    reads = [_words(place, whole=whole) for place in (settings.model, settings.data)]
    return " ".join(["sparing finetune", *reads, *_flags(settings, whole=whole)])


def licence_of(model: Path) -> str | None:
    """The licence that a model's own card names, if it has one."""
    from huggingface_hub import ModelCard

    try:
        found = ModelCard.load(hub.folder_of(model) / CARD, ignore_metadata_errors=True).data.license
    except Exception:  # noqa: BLE001 - a card of others may be anything, and none is no fault
        return None
    return found if isinstance(found, str) else None


def _header(settings: Finetune, kind: Literal["model", "adapter"]) -> str:
    licence, tags = licence_of(settings.model), ["sparing", settings.method]
    # JSON is YAML, and its quotes keep a name with a colon in it one name
    known: dict[str, Any] = {
        "base_model": hub.source(settings.model),
        "base_model_relation": "finetune" if kind == "model" else "adapter",
        "library_name": "transformers" if kind == "model" else "peft",
        "pipeline_tag": "text-generation",
        "datasets": [hub.source(path) for path in settings.data],
        "tags": tags,
    }
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in known.items()]
    lines.append(
        f"license: {json.dumps(licence)}" if licence else "# license: not known here; name it before you share"
    )
    return "\n".join(["---", *lines, "---"])


def _table(rows: list[tuple[str, object]]) -> str:
    body = (f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows if value not in (None, ""))
    return "\n".join(["| | |", "|---|---|", *body])


def _method(settings: Finetune, lora: Lora | None) -> str:
    """The settings of the method in use, usual ones too; of an adapter that goes on, its own."""
    group = lora or getattr(settings, settings.method, None)
    known = [(f.name, getattr(group, f.name)) for f in fields(group)] if isinstance(group, Group) else []
    if lora is not None:
        known.append(("adapter", settings.lora.adapter))
    return ", ".join(f"{name} {_words(value)}" for name, value in known if value not in (None, (), ""))


def _data(record: Record) -> str:
    names = {"file": "file", "records": "records", "rows": "rows", "held_out": "rows held out", "left_out": "left out"}
    rows = [f"| {' | '.join(str(row[name]) for name in names)} |" for row in record.table("data")]
    return "\n".join([f"| {' | '.join(names.values())} |", f"|{'---|' * len(names)}", *rows]) if rows else ""


def _results(settings: Finetune, record: Record) -> list[tuple[str, object]]:
    exact = settings.method == "lisa" and settings.weights is not None and settings.lisa.exact
    rounded = f", frozen blocks rounded to {settings.weights}" if exact else ""
    total = next((row for row in record.table("memory") if row["category"] == "total"), {})
    found: list[tuple[str, object]] = []
    # a run that diverges at its first step has none where nothing is held out
    if record.table("held_out") or record.table("train"):
        before, last, name = ends(record)
        # the loss of what is saved, which trained beside rounded blocks
        after = next(iter([*record.table("saved"), *record.table("exported")]), last)
        exported = f" (step {after['step']:,}, the best)" if record.table("exported") else ""
        found += [
            (f"{name} before{rounded} (nat/token)", format_number(before["loss"])),
            (
                f"{name} after{'' if record.table('saved') else rounded} (nat/token)",
                f"{format_number(after['loss'])}{exported}",
            ),
        ]
    for kind in ("predicted", "measured"):
        size = total.get(kind)
        found.append((f"Memory of a step, {kind}", size and f"{format_number(size, 'B')} ({size:,} bytes)"))
    return found


def card(
    settings: Finetune, record: Record, kind: Literal["model", "adapter"] = "model", lora: Lora | None = None
) -> str:
    """The card of a model or of its adapter, from the rows of its run; ``lora`` is what its additions are."""
    results = [row for row in _results(settings, record) if row[1]]
    how, pace, steps = NAMES[settings.method], settings.training(), len(record.table("train"))
    title = f"{hub.title(settings.model)}, fine-tuned" + (" (LoRA adapter)" if kind == "adapter" else "")
    made = [
        ("Base model", _words(settings.model)), ("Method", how), (f"Settings of {how}", _method(settings, lora)),
        ("Optimizer steps", f"{steps:,}"),
        ("Rows per step", pace.batch * pace.accumulate), ("Tokens per row", settings.length),
        ("Packing", "yes" if settings.packing else "no"), ("Peak learning rate", f"{pace.peak:g}"),
        ("Schedule", f"{pace.schedule}, {pace.warmup} steps of warm-up"), ("Weight decay", f"{pace.weight_decay:g}"),
        ("Number format", settings.dtype), ("Seed", settings.seed),
    ]  # fmt: skip
    versions = [(name, record.environment[name]) for name in _VERSIONS if name in record.environment]
    return "\n\n".join(
        part
        for part in (
            _header(settings, kind),
            f"# {title}",
            f"Trained with `sparing`: {how}. Intended use, limits and licence are for its author to fill in.",
            "## Data", _data(record),
            "## Training", _table([*made]),
            f"```\n{command_of(settings)}\n```",
            *(("## Results", _table(results), "One run with one seed: no spread is known.") if results else ()),
            "## Versions", _table([*versions]),
        )
        if part
    ) + "\n"  # fmt: skip
