"""The page of a training from scratch, made of its record alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparing.jobs.pretrain.prices import displayed
from sparing.jobs.ranks_page import ranks_section
from sparing.report import Page, Record, Sample, Section, Table, format_number, plots
from sparing.report.series import binned
from sparing.scaling.entries import layer_pattern

NAMES = {"sp": "the standard parameterization", "mup": "μP", "supar": "SμPar", "init-only": "SμPar's initial weights"}
NAMES |= {"rate-only": "SμPar's rates"}


def _table(record: Record, name: str) -> list[Any]:
    """Rows whose cells have the types that this job gave them."""
    return list(record.table(name))


def sparsity(record: Record) -> str:
    """How sparse the model is, such as "25 % of its hidden weights"."""
    rows = _table(record, "layers")
    if not rows:
        return "all of its weights"
    sizes = [row["live"] / row["density"] for row in rows]
    return f"{format_number(100 * sum(row['live'] for row in rows) / sum(sizes))} % of its hidden weights"


def answer(record: Record) -> str:
    """The run in one sentence of markup."""
    test, held, speed = _table(record, "test")[0], _table(record, "held_out"), _table(record, "speed")[0]
    took = format_number(speed["seconds"], "s")
    return (
        f"With {sparsity(record)}, it reaches **{format_number(test['loss'])} nat/token** "
        f"({format_number(test['bits_per_byte'])} bits per byte) on text that was set aside for the end, "
        f"from {format_number(held[0]['loss'])} untrained, in {took} of training."
    )


def loss_section(record: Record) -> Section:
    """Loss curves, training and held out, and the test at the end."""
    held, train, test = (_table(record, name) for name in ("held_out", "train", "test"))
    curves = [
        plots.Series("training", *binned(train, "loss"), role="baseline"),
        plots.Series("held out", [row["step"] for row in held], [row["loss"] for row in held], role="ours"),
    ]
    best = min(held, key=lambda row: row["loss"])
    title = f"Held-out loss falls to {format_number(best['loss'])} nat/token"
    title += "" if best["step"] == held[-1]["step"] else f" at step {best['step']:,}, then rises"
    figure = plots.lines(curves, title=title, x="optimizer step", y=plots.Axis("loss", "nat/token"))
    speed = _table(record, "speed")[0]
    text = (
        "Each text gives its beginning to training, then a part that is measured along the way, and its end, which is "
        "measured once, after the last step. Bits per byte do not depend on the tokenizer."
    )
    note = f"Training ran at {speed['tokens_per_second']:,.0f} tokens/s, evaluation excluded."
    tables = [
        Table(test, "At the end, on text set aside", record.units, note=note),
        Table(held, "Along the way", record.units, folded=len(held) > 6),
    ]
    return Section("Loss", text, [figure], tables)


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
        one = found.setdefault(
            (name, row["backend"]),
            {"weights": name, "layers": 0, "live": 0, "size": 0, "dead_neurons": 0, "unread_inputs": 0},
        )
        for column in ("live", "dead_neurons", "unread_inputs"):
            one[column] += row[column]
        one["layers"] += 1
        one["size"] += round(row["live"] / row["density"])
        one |= {"density": one["live"] / one["size"], "backend": row["backend"]}
    return list(found.values())


def rates_section(record: Record) -> Section:
    """Initial scale and learning rate of every kind of layer, and the whole plan."""
    settings = record.settings
    base = settings["base_width"] or settings["width"]
    text = (
        f"By {NAMES[settings['rule']]}, from one rate of {format_number(settings['lr'])} for a dense model of width "
        f"{base}. A star stands for the number of the block. Rates are those after warm-up."
    )
    rows, plan = _table(record, "rates"), _table(record, "plan")
    note = "m in and m out: times the base's width; lr, decay, eps: factors on the base's values."
    columns = ["weights", "role", "initial_std", "peak_rate", "decay_per_step"]
    tables = [
        Table(shorten_rates(rows), "Scale and rate by kind of layer", record.units, columns=columns),
        Table(plan, "The plan, parameter by parameter", record.units, folded=True, note=note),
    ]
    return Section("Learning rates", text, tables=tables)


def masks_section(record: Record) -> Section:
    """Density of every masked weight, and how it changed."""
    layers, densities = _table(record, "layers"), _table(record, "density")
    dead = sum(row["dead_neurons"] for row in layers)
    text = f"The model uses {sparsity(record)}; embeddings, head, norms and biases are dense. "
    text += f"{dead:,} neurons have no live input." if dead else "Every neuron has a live input."
    figures = []
    steps, shares = [row["step"] for row in densities], [row["density"] for row in densities]
    if len(set(shares)) > 1:
        title = f"Density falls from {format_number(shares[0])} to {format_number(shares[-1])}"
        curve = plots.Series("hidden weights", steps, shares, role="ours")
        figures.append(plots.lines([curve], title=title, x="optimizer step", y=plots.Axis("live share")))
    elif len(densities) > 1:
        text += f" Masks were exchanged {len(densities) - 1} times, the number of live weights stayed."
    columns = ["weights", "density", "live", "dead_neurons", "unread_inputs"]
    columns += ["backend"] if len({row["backend"] for row in layers}) > 1 else []
    tables = [
        Table(by_kind(layers), "Masks by kind of layer", record.units, columns=columns),
        Table(layers, "Masks, weight by weight", record.units, folded=True),
    ]
    return Section("Sparsity", text, figures, tables)


def cost_section(record: Record) -> Section:
    """What a step was predicted to cost, beside what it did."""
    text = (
        "Predicted before the first step from shapes and densities: with all layers as dense matrices with zeros, and "
        "with masked ones sparse; times from single layers timed on this machine. Measured by counting tensors, by "
        "watching the products of a step, and by the clock. Activations come on top."
    )
    return Section(
        "Cost of a step",
        text,
        tables=[Table(displayed(_table(record, "cost")), f"A step, backend {record.settings['backend']}")],
    )


def samples_section(record: Record) -> Section:
    """Text that the exported model wrote."""
    rows = _table(record, "samples")
    samples = [Sample(row["prompt"], {"the model": row["after"]}, f"Text {n}") for n, row in enumerate(rows, start=1)]
    text = "First words of held-out paragraphs, and what the exported model adds, drawn at temperature 0.8 among 40."
    return Section("Text", text, samples=samples)


def write_page(record: Record, path: Path, caveats: Sequence[str]) -> Path:
    """Write the page of a run."""
    sections = [loss_section(record)]
    chapters = {"samples": samples_section, "rates": rates_section, "layers": masks_section, "cost": cost_section}
    chapters["sharding"] = ranks_section
    sections += [chapter(record) for name, chapter in chapters.items() if record.table(name)]
    settings = record.settings
    return Page(
        title=f"A language model from scratch, by {NAMES[settings['rule']]}",
        question=record.question,
        answer=answer(record),
        sections=sections,
        record=record,
        reproduce={"data": ", ".join(Path(name).name for name in settings["data"])},
        caveats=caveats,
    ).write(path)
