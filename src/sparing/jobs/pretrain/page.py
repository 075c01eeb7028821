"""The page of a training from scratch, made of its record alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sparing.jobs.lm.controls import CONTROLS, failed
from sparing.jobs.lm.page import RANKS, SPEED, loss_curves
from sparing.jobs.pretrain.tables import displayed
from sparing.report import Figure, Record, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage, Samples
from sparing.report.series import columns
from sparing.scaling.plans.entries import layer_pattern

NAMES = {"sp": "the standard parameterization", "mup": "μP", "supar": "SμPar", "init-only": "SμPar's initial weights"}
NAMES |= {"rate-only": "SμPar's rates"}


def sparsity(record: Record) -> str:
    """How sparse the model is, such as "25 % of its hidden weights"."""
    rows = record.table("layers")
    if not rows:
        return "all of its weights"
    sizes = [row["live"] / row["density"] for row in rows]
    return f"{format_number(100 * sum(row['live'] for row in rows) / sum(sizes))} % of its hidden weights"


def answer(record: Record) -> str:
    """The run in one sentence of markup."""
    test, held, speed = record.table("test")[0], record.table("held_out"), record.table("speed")[0]
    took = format_number(speed["seconds"], "s")
    return (
        f"With {sparsity(record)}, it reaches **{format_number(test['loss'])} nat/token** "
        f"({format_number(test['bits_per_byte'])} bits per byte) on text that was set aside for the end, "
        f"from {format_number(held[0]['loss'])} untrained, in {took} of training."
    )


def loss_figure(record: Record) -> Figure:
    """Loss curves, training and held out."""
    held = record.table("held_out")
    best = min(held, key=lambda row: row["loss"])
    title = f"Held-out loss falls to {format_number(best['loss'])} nat/token"
    title += "" if best["step"] == held[-1]["step"] else f" at step {best['step']:,}, then rises"
    return loss_curves(record, title, "ours")


def shorten_rates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table "rates" with short names, equal vectors as one.

    Example:
        >>> same = {"role": "vector", "layers": 1, "peak_rate": 0.1, "decay_per_step": 0.0, "initial_std": 0.0}
        >>> shorten_rates([{"weights": "a.norm.weight"} | same, {"weights": "a.bias"} | same])[0]["weights"]
        'norms and biases (2)'
    """
    vectors: dict[Any, dict[str, Any]] = {}
    found = []
    for row in rows:
        if row["role"] != "vector":
            found.append({**row, "weights": short(row["weights"])})
            continue
        key = (row["peak_rate"], row["decay_per_step"])
        one = vectors.setdefault(key, {**row, "layers": 0, "initial_std": None})
        one["layers"] += row["layers"]
        one["weights"] = f"norms and biases ({one['layers']})"
    return [*found, *vectors.values()]


def short(name: str) -> str:
    """A parameter's name without what all of them share.

    Example:
        >>> short("model.layers.*.mlp.up_proj.weight"), short("transformer.wte.weight"), short("lm_head.weight")
        ('*.mlp.up_proj', 'wte', 'lm_head')
    """
    bare = name.removesuffix(".weight")
    _, star, inside = bare.partition(".*.")
    return f"*.{inside}" if star else bare.rpartition(".")[2]


def by_kind(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table "layers", those of a kind and backend as one."""
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        name = short(layer_pattern(row["weight"]))
        counts = {column: row[column] for column in ("live", "dead_neurons", "unread_inputs")}
        counts |= {"layers": 1, "size": round(row["live"] / row["density"])}
        one = found.setdefault((name, row["backend"]), {"weights": name, "backend": row["backend"]})
        one |= {column: one.get(column, 0) + count for column, count in counts.items()}
        one["density"] = one["live"] / one["size"]
    return list(found.values())


def masks_text(record: Record) -> str:
    """How sparse the model is, and what its masks cut off."""
    dead, densities = sum(row["dead_neurons"] for row in record.table("layers")), record.table("density")
    text = f"The model uses {sparsity(record)}; embeddings, head, norms and biases are dense. "
    text += f"{dead:,} neurons have no live input." if dead else "Every neuron has a live input."
    if len(densities) > 1 and not density_figure(record):
        text += f" Masks were exchanged {len(densities) - 1} times, the number of live weights stayed."
    return text


def density_figure(record: Record) -> Figure | None:
    """Density over steps, if it changes."""
    rows = record.table("density")
    shares = [row["density"] for row in rows]
    if len(set(shares)) < 2:
        return None
    title = f"Density falls from {format_number(shares[0])} to {format_number(shares[-1])}"
    curve = columns(rows, "step", {"density": "ours"}, density="hidden weights")
    return plots.lines(curve, title=title, x="optimizer step", y=plots.Axis("live share"))


LOSS: Final = (
    "Each text gives its beginning to training, then a part that is measured along the way, and its end, which is "
    "measured once, after the last step. Bits per byte do not depend on the tokenizer."
)
RULES: Final = (
    "By {rule}, from one rate of {rate} for a dense model of width {width}. A star stands for the number of the "
    "block. Rates are those after warm-up."
)
COST: Final = (
    "Predicted before the first step from shapes and densities: with all layers as dense matrices with zeros, and "
    "with masked ones sparse; times from single layers timed on this machine. Measured by counting tensors, by "
    "watching the products of a step, and by the clock. Activations come on top."
)
TEXT: Final = "First words of held-out paragraphs, and what the exported model adds, drawn at temperature 0.8 among 40."
FACTORS: Final = "m in and m out: times the base's width; lr, decay, eps: factors on the base's values."
MASKS: Final = ("weights", "density", "live", "dead_neurons", "unread_inputs", "backend")
RATES: Final = ("weights", "role", "initial_std", "peak_rate", "decay_per_step")

PAGE: Final = RunPage(
    lambda record: f"A language model from scratch, by {NAMES[record.settings['rule']]}",
    answer,
    Chapter(
        "Loss",
        LOSS,
        loss_figure,
        Rows("test", "Test loss, on text set aside for the end"),
        CONTROLS,
        SPEED,
        Rows("held_out", "Held-out loss, along the way", folded=6, terminal=True),
    ),
    Chapter("Text", TEXT, Samples("samples", {"after": "the model"}, "Text")),
    Chapter(
        "Learning rates",
        lambda record: RULES.format(
            rule=NAMES[record.settings["rule"]],
            rate=format_number(record.settings["lr"]),
            width=record.settings["base_width"] or record.settings["width"],
        ),
        Rows(
            lambda record: shorten_rates(record.table("rates")),
            "Scale and rate by kind of layer",
            RATES,
            terminal=False,
        ),
        Rows("plan", "The plan, parameter by parameter", note=FACTORS, folded=True),
    ),
    Chapter(
        "Sparsity",
        masks_text,
        density_figure,
        Rows(lambda record: by_kind(record.table("layers")), "Masks by kind of layer", MASKS, terminal=False),
        Rows("layers", "Masks, weight by weight", folded=True),
    ),
    Chapter(
        "Cost of a step",
        COST,
        Rows(
            lambda record: displayed(record.table("cost")),
            lambda record: f"A step, predicted beside measured, backend {record.settings['backend']}",
        ),
    ),
    RANKS,
    caveats=lambda record: [told] if (told := failed(record.table("controls"))) else [],
    facts=lambda record: {"data": ", ".join(Path(name).name for name in record.settings["data"])},
)

write_page = PAGE.write
