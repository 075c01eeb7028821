"""The chapter on layer sampling: losses, bytes, which layers trained, texts, and the paper's figures."""

from __future__ import annotations

from typing import Any, Final

from sparing.jobs.demo.chapter import Chapter, Claim, run_note
from sparing.jobs.demo.settings import Scale
from sparing.memory import CATEGORIES
from sparing.report import Figure, Record, Sample, Section, Table, format_number, plots
from sparing.report.page import Number

ROLES: Final[dict[str, plots.Role]] = {
    "full": "reference", "LISA": "ours", "LISA, embedding frozen": "extension", "LoRA": "rival",
}  # fmt: skip
COLUMNS: Final = (
    "method",
    "lr",
    "loss_before",
    "loss_after",
    "seconds_per_step",
    "faster",
    "peak_measured",
    "peak_predicted",
)
UNITS: Final = {
    "loss_before": "nat/token", "loss_after": "nat/token", "seconds_per_step": "s", "faster": "×",
    "peak_measured": "B", "peak_predicted": "B", "dev_loss": "nat/token",
}  # fmt: skip
FROZEN: Final = "LISA, embedding frozen"


def rows_of(record: Record) -> list[dict[str, Any]]:
    """Rows of the methods, with how many times faster than full fine-tuning a step was."""
    rows = record.table("arms")
    full = next(row["seconds_per_step"] for row in rows if row["method"] == "full")
    return [row | {"faster": full / row["seconds_per_step"]} for row in rows]


def by_method(record: Record) -> dict[str, dict[str, Any]]:
    """The same by name of the method."""
    return {row["method"]: row for row in rows_of(record)}


def largest_memory_error(record: Record) -> float:
    """Largest difference between a predicted and a measured peak (%)."""
    return 100 * max(abs(float(row["peak_predicted"] / row["peak_measured"]) - 1) for row in rows_of(record))


def answer(record: Record) -> str:
    """One sentence with its numbers: losses and bytes."""
    by = by_method(record)
    held = {method: format_number(row["peak_measured"], "B") for method, row in by.items()}
    loss = {method: format_number(row["loss_after"]) for method, row in by.items()}
    return (
        f"LISA ends at a held-out loss of **{loss['LISA']}** nat/token, full fine-tuning at {loss['full']}; at its "
        f"peak a step holds **{held['LISA']}** instead of {held['full']}. With the embedding frozen as well it is "
        f"**{held[FROZEN]}** and {loss[FROZEN]}; LoRA, {held['LoRA']} and {loss['LoRA']}."
    )


def numbers(record: Record) -> tuple[Number, Number, Number]:
    """Bytes, loss, and how well the bytes were predicted."""
    by, note = by_method(record), run_note(record.seed)
    full, lisa, frozen = by["full"], by["LISA"], by[FROZEN]
    saved = 100 * (1 - frozen["peak_measured"] / full["peak_measured"])
    return (
        Number(
            value=f"−{saved:.0f} %", note=note,
            label="memory at the peak of a step: LISA with a frozen embedding against full fine-tuning",
        ),
        Number(
            value=f"{lisa['loss_after']:.2f} nat", note=note,
            label=f"held-out loss per token after LISA; after full fine-tuning {full['loss_after']:.2f}, before "
            f"{full['loss_before']:.2f}",
        ),
        Number(
            value=f"{max(largest_memory_error(record), 0.01):.2g} %", note="4 methods, one step each",
            label="largest gap between bytes predicted from shapes alone and bytes measured",
        ),
    )  # fmt: skip


def claims(record: Record) -> list[Claim]:
    """What the paper states of memory, quality and speed, and what was found here."""
    by = by_method(record)
    held = {name: format_number(by[name]["peak_measured"], "B") for name in by}
    loss = {name: format_number(by[name]["loss_after"]) for name in by}
    return [
        Claim(
            what="peak memory: full · LoRA · LISA",
            paper="59 · 23 · 23 G (LLaMA-2-7B, Table 1)",
            here=f"{held['full']} · {held['LoRA']} · {held['LISA']}",
        ),
        Claim(
            what="quality: full · LoRA · LISA",
            paper="5.18 · 4.86 · 5.42 points of MT-Bench, more is better (LLaMA-2-7B, arXiv v1)",
            here=f"{loss['full']} · {loss['LoRA']} · {loss['LISA']} nat/token held out, less is better",
        ),
        Claim(
            what="a step against full fine-tuning's",
            paper="2.9× as fast (Figure 4)",
            here=f"{format_number(by['LISA']['faster'], '×')} as fast under LISA, "
            f"{format_number(by[FROZEN]['faster'], '×')} with the embedding frozen",
        ),
    ]


def loss_figure(record: Record) -> Figure:
    """Held-out loss against training seconds."""
    best = min(rows_of(record), key=lambda row: row["loss_after"])
    series = plots.series(record.table("curve"), x="seconds", y="loss", by="method", roles=ROLES)
    return plots.lines(
        series, title=f"In the same number of steps, {_named(best['method'])} ends lowest",
        x=plots.Axis("training time", unit="s"), y=plots.Axis("held-out loss", unit="nat/token"),
        caption="Test rows, seen neither in training nor when choosing the rate. One run each (n = 1, one seed).",
    )  # fmt: skip


def bytes_figure(record: Record) -> Figure:
    """Held-out loss against bytes."""
    rows = rows_of(record)
    least, best = min(rows, key=lambda row: row["peak_measured"]), min(rows, key=lambda row: row["loss_after"])
    points = [(row["method"], [row["peak_measured"]], [row["loss_after"]]) for row in rows]
    return plots.scatter(
        [plots.Series(method, peak, loss, role=ROLES[method]) for method, peak, loss in points],
        title=f"{_named(least['method'])} holds least, {_named(best['method'])} ends lowest",
        x=plots.Axis("measured peak of a step", unit="B"), y=plots.Axis("held-out loss at the end", unit="nat/token"),
        caption="Lower left is better. One run each (n = 1, one seed).",
    )  # fmt: skip


def memory_figure(record: Record) -> Figure:
    """Bytes at the peak by category, predicted beside measured."""
    rows = record.table("memory")
    stacks = [plots.Stack(row["method"], {part: row[part] for part in CATEGORIES}, kind=row["kind"]) for row in rows]
    return plots.stacked_bars(
        stacks, title=f"Prediction and measurement agree within {max(largest_memory_error(record), 0.1):.1f} %",
        value=plots.Axis("held at the peak of a step", unit="B"),
        caption="Predicted from shapes alone, with nothing allocated; measured by counting live tensors. Float32.",
    )  # fmt: skip


def layers_figure(record: Record) -> Figure:
    """Which layer trained when, in the LISA run."""
    switches = [row for row in record.table("switches") if row["method"] == "LISA"]
    drawn = [{int(block) for block in str(row["blocks"]).split()} for row in switches]
    layers = 1 + max((block for blocks in drawn for block in blocks), default=0)
    values = [[float(layer in blocks) for blocks in drawn] for layer in range(layers)]
    edges = [row["step"] for row in switches]
    # the last draw gets a cell as wide as the one before
    edges.append(2 * edges[-1] - edges[-2] if len(edges) > 1 else edges[-1] + 1)
    return plots.heatmap(
        values, title="Two layers train at a time; a new pair is drawn every five steps",
        x=plots.Axis("step"), y=plots.Axis("layer"), x_edges=edges, kind="switch",
        caption="The run called LISA; embedding, final norm and head train throughout.",
    )  # fmt: skip


def samples(record: Record) -> list[Sample]:
    """Continuations of the same openings, before and after."""
    texts: dict[str, dict[str, str]] = {}
    for row in record.table("samples"):
        texts.setdefault(str(row["prompt"]), {})[str(row["when"])] = str(row["text"])
    return [Sample(prompt=prompt, texts=by_when) for prompt, by_when in texts.items()]


def _named(method: str) -> str:
    return {"full": "full fine-tuning"}.get(method, method)


def details(record: Record) -> Section:
    """All that a first look can do without."""
    tables = [Table(rows_of(record), "The four methods", UNITS, COLUMNS, roles=ROLES)]
    if tried := record.table("sweep"):
        tables.append(Table(tried, "Learning rates tried, on the development rows", UNITS, roles=ROLES))
    text = (
        "Each learning rate is the best of three, tried for a few steps and judged on development rows; a demo of "
        "scale tiny takes the middle one untried. Where head and embedding share their weights, a frozen embedding "
        "freezes the head with it."
    )
    figures = [loss_figure(record), memory_figure(record), layers_figure(record)]
    title = "More: loss over time, bytes by category, which layers trained, texts that the models write, every number"
    return Section(title, text, figures, tables, samples(record))


def chapter(record: Record, scale: Scale) -> Chapter:
    """The chapter as its page shows it."""
    name = record.table("materials")[0]["name"]
    steps = max(row["step"] for row in record.table("curve"))
    tuned = "each at the best of three learning rates" if scale == "small" else "at rates that are not tuned"
    return Chapter(
        name="memory", topic="Fine-tuning memory · LISA",
        question="Can a language model be fine-tuned in less memory, and learn as much?",
        answer=answer(record), numbers=numbers(record), picture=bytes_figure(record), claims=claims(record),
        story=(
            f"The model and the text: {name}. Four ways to fine-tune start from the same weights and see the same rows "
            f"for {steps} steps, {tuned}. LISA trains the embedding, the head and two layers, drawn anew every five "
            "steps: what is frozen needs no gradient and no optimizer state. With the embedding frozen as well, the "
            "backward pass stops at the lowest drawn layer. LoRA, the usual rival, trains small added matrices."
        ),
        paper='Pan et al., "LISA", NeurIPS 2024, arXiv:2403.17919; its LISA trains two layers',
        limits=(
            "The ratio 59 to 23 is out of reach here: in so small a model most of the peak is logits, which no method "
            "saves; `sparing plan` and docs/results/memory.md have the paper's own models, from shapes. MT-Bench needs "
            "a judge and larger models, so quality here is held-out loss. The paper's 2.9× includes a forward pass "
            "that freezing made faster, which it cannot: docs/results/step-time.md."
        ),
        deeper=("sparing finetune DIR DATA.jsonl --method lisa", "sparing plan DIR --memory 24GB"),
        details=details(record),
    )  # fmt: skip
