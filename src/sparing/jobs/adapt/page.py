"""The page of a run, made of its record alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparing.jobs.adapt.arms import LABELS, ROLES
from sparing.report import Page, Record, Sample, Section, Table, format_number, plots

HEAVY = 0.2  # share of a passage's tokens that is set in bold

RULE = (
    "Documents are consecutive sentences of one chapter. A sentence gives a question when it holds a proper name or a "
    "number that is not its beginning and is not named earlier in it: the question is the sentence up to there, at "
    "least four words, the answer that name or number; a proper name is a run of capitalised words none of which the "
    "book ever writes in small letters. Each book is cut into three runs of documents: the first 60 % for "
    "meta-training, the next 15 % for choosing rates, the last 25 % for the answers below. Before all else the base "
    "model passes over the documents of the first part about which nothing can be asked."
)

CAVEATS = (
    "One run with one seed: no spread is known.",
    "Time is CPU time of the process, since machines are shared; every method has the same budget of it.",
    "Inner gradients are clipped by their norm, in meta-training and in adapting alike; the papers train with plain "
    "SGD, and evaluate with Adam and beam search where this job keeps SGD and greedy answers.",
    "A book's names come back in its later parts, so an unseen document is not one about unseen persons.",
    "θ is reset for every window of meta-training: the gradient is exact for windows of that many documents, and the "
    "test stream is longer.",
)


def _rows(record: Record, name: str) -> list[dict[str, Any]]:
    return [{**row, "method": LABELS[row["method"]]} for row in record.table(name)]


def answer(record: Record) -> str:
    """The result in one sentence of marked-up text."""
    rows = {row["method"]: row for row in record.table("answers")}
    base = rows["base"]
    best = min((row for row in rows.values() if row is not base), key=lambda row: row["nll"])
    text = (
        f"With {LABELS[best['method']]}, one pass over the documents takes the answers from "
        f"{format_number(base['nll'])} to **{format_number(best['nll'])} nat/token** "
        f"and exact match from {format_number(base['em'])} % to "
        f"**{format_number(best['em'])} %**"
    )
    if best["method"] != "uniform" and "uniform" in rows:
        plain = rows["uniform"]
        text += f"; uniform weights reach {format_number(plain['nll'])} nat/token and {format_number(plain['em'])} %"
    return text + "."


def result_section(record: Record) -> Section:
    """Marks by method."""
    rows = record.table("answers")
    bars = [plots.Bar(LABELS[row["method"]], row["nll"], ROLES[row["method"]]) for row in rows]
    least = format_number(min(row["nll"] for row in rows))
    first = [LABELS[row["method"]] for row in rows if format_number(row["nll"]) == least]
    title = f"Least surprise about the answers: {first[0]}" if len(first) == 1 else "Surprise about the answers"
    figure = plots.bars(bars, title=title, value=plots.Axis("loss of the answers", "nat/token"))
    note = "em: exact match, f1: overlap of words, both as SQuAD counts; kl: change on other text; seconds: CPU time."
    return Section("Answers", RULE, [figure], [Table(_rows(record, "answers"), "By method", record.units, note=note)])


def time_section(record: Record) -> Section:
    """Validation marks against CPU seconds."""
    rows, figures = record.table("curve"), []
    for column, label, unit in (("nll", "loss of the answers", "nat/token"), ("f1", "F1", "%")):
        curves = [
            plots.Series(LABELS[name], [r["seconds"] for r in own], [r[column] for r in own], role=ROLES[name])
            for name in dict.fromkeys(row["method"] for row in rows)
            if (own := [row for row in rows if row["method"] == name])
        ]
        title = f"{label.capitalize()} on the validation stream while the weights are learnt"
        axis = plots.Axis("meta-training", "s"), plots.Axis(label, unit)
        figures.append(plots.lines(curves, title=title, x=axis[0], y=axis[1]))
    return Section("Against time", "Seconds of CPU time, evaluation excluded.", figures)


def marked(rows: list[dict[str, Any]], name: str) -> str:
    """A document with its heaviest tokens in bold."""
    heavy = sorted((row[name] for row in rows), reverse=True)[max(0, round(HEAVY * len(rows)) - 1)]
    shaded = (_bold(row["token"].replace("*", "")) if row[name] >= heavy else row["token"] for row in rows)
    # two heavy tokens in a row are one run of bold
    return "".join(shaded).replace("****", "").strip()


def _bold(token: str) -> str:
    """A token in bold, the blank before it outside."""
    bare = token.strip()
    return token.replace(bare, f"**{bare}**", 1) if bare else token


def weights_section(record: Record) -> Section:
    """What the learnt weights look like."""
    rows, names = record.table("passage"), [r["method"] for r in record.table("answers")[1:]]
    learnt = [name for name in names if name != "uniform"]
    texts = [f"{LABELS[name]}: {marked(rows, name)}" for name in learnt]
    lead = "A document of the test stream; the fifth of its tokens with the highest weights is set in bold."
    tables = []
    for name in learnt:
        bare = [
            {k: v for k, v in row.items() if k != "method"} for row in record.table("tokens") if row["method"] == name
        ]
        title = f"Highest and lowest mean weights: {LABELS[name]}"
        tables.append(Table(bare, title, record.units, folded=name != learnt[-1]))
    named = [{LABELS.get(key, key): value for key, value in row.items()} for row in rows]
    units = {LABELS[name]: "× mean" for name in names}
    tables.append(Table(named, "Every token of the document", units, folded=True))
    return Section("What is weighed", "\n\n".join([lead, *texts]), tables=tables)


def samples_section(record: Record) -> Section:
    """Questions with the answers of each method."""
    samples = [
        Sample(
            f"… {row['prompt']}",
            {"right": row["answer"]} | {LABELS[key]: str(value) for key, value in row.items() if key in LABELS},
            f"Question {at}",
        )
        for at, row in enumerate(record.table("samples"), start=1)
    ]
    text = "Those that some method answers rightly first, and among them those on which the methods differ most."
    return Section("Questions", text, samples=samples)


def write_page(record: Record, path: Path) -> Path:
    """Write the page."""
    sections = [result_section(record)]
    if record.table("curve"):
        sections.append(time_section(record))
    if any(row["method"] not in {"base", "uniform"} for row in record.table("answers")):
        sections.append(weights_section(record))
    sections.append(samples_section(record))
    return Page(
        title="Which tokens to learn from",
        question=record.question,
        answer=answer(record),
        sections=sections,
        record=record,
        reproduce={"model": Path(record.settings["model"]).name, "data": "two public-domain children's books"},
        caveats=list(CAVEATS),
    ).write(path)
