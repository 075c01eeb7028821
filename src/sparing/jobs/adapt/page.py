"""The page of a run, made of its record alone."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, Final

from sparing.jobs import hub
from sparing.jobs.adapt.meta import LABELS, ROLES
from sparing.report import Figure, Record, Table, format_number, plots
from sparing.report.declared import Chapter, Rows, RunPage, Samples

HEAVY = 0.2  # share of a passage's tokens that is set in bold

RULE = (
    "Documents are consecutive sentences of one chapter. A sentence gives a question when it holds a proper name or a "
    "number that is not its beginning and is not named earlier in it: the question is the sentence up to there, at "
    "least four words, the answer that name or number; a proper name is a run of capitalised words none of which the "
    "book ever writes in small letters. Each book is cut into three runs of documents: the first 60 % for "
    "meta-training, the next 15 % for choosing rates, the last 25 % for the answers below."
)

LOSS: Final = plots.Axis("loss of the answers", "nat/token")

SCORES = "em: exact match, f1: overlap of words, both as SQuAD counts; kl: change on other text; seconds: CPU time."

CAVEATS = (
    "One run with one seed: no spread is known.",
    "Time is CPU time of the process, since machines are shared; every method has the same budget of it.",
    "Inner gradients are clipped by their norm, in meta-training and in adapting alike; the papers train with plain "
    "SGD, and evaluate with Adam and beam search where this job keeps SGD and greedy answers.",
    "A book's names come back in its later parts, so an unseen document is not one about unseen persons.",
    "θ is reset for every window of meta-training: the gradient is exact for windows of that many documents, and the "
    "test stream is longer.",
)


def rule(record: Record) -> str:
    """How documents and questions are made, and what the base model has read of them."""
    # records of older versions have no such rows
    plain = [row["there"] for row in record.table("documents")[:1]]
    if not record.settings["tune"]:
        return f"{RULE} The base model passed over none of them before."
    if plain == [0]:
        return f"{RULE} The base model was not tuned: every document of the first part has a question."
    return f"{RULE} Before all else the base model passes over the documents of the first part without a question."


def answer(record: Record) -> str:
    """The result in one sentence of marked-up text."""
    rows = {row["method"]: row for row in record.table("answers")}
    base = rows["base"]
    ended = [row for row in rows.values() if row is not base and math.isfinite(row["nll"])]
    if not ended:
        return "One pass over the documents diverged with every method: no loss of the answers is finite."
    best = min(ended, key=lambda row: row["nll"])
    text = (
        f"With {LABELS[best['method']]}, one pass over the documents takes the answers from "
        f"{format_number(base['nll'])} to **{format_number(best['nll'])} nat/token** and exact match from "
        f"{format_number(base['em'])} % to **{format_number(best['em'])} %**"
    )
    if best["method"] != "uniform" and "uniform" in rows:
        plain = rows["uniform"]
        text += f"; uniform weights reach {format_number(plain['nll'])} nat/token and {format_number(plain['em'])} %"
    return f"{text}.{no_better(record)}"


def no_better(record: Record) -> str:
    """A sentence on methods whose weights validation does not tell from uniform ones, each at its best rate."""
    least: dict[str, float] = {}
    for row in record.table("sweep"):
        least[row["method"]] = min(least.get(row["method"], math.inf), row["objective"])
    start = least.get("uniform", -math.inf)
    # NaN is not below either
    found = [LABELS[name] for name, objective in least.items() if name != "uniform" and not objective < start]
    if not found or "uniform" not in least:
        return ""
    return f" On the validation documents these weights are no better than uniform ones: {', '.join(found)}."


def loss_bars(record: Record) -> Figure:
    """Loss of the answers by method; the title names whose is least, if one's is."""
    rows = record.table("answers")
    finite = [row["nll"] for row in rows if math.isfinite(row["nll"])]
    least = format_number(min(finite, default=None))
    first = [LABELS[row["method"]] for row in rows if format_number(row["nll"]) == least]
    title = f"Least surprise about the answers: {first[0]}" if len(first) == 1 else "Surprise about the answers"
    bars = [plots.Bar(LABELS[row["method"]], row["nll"], ROLES[row["method"]]) for row in rows]
    return plots.bars(bars, title=title, value=LOSS)


def time_figures(record: Record) -> list[Figure]:
    """Validation marks against CPU seconds, where a method has any."""
    rows, seconds = record.table("curve"), plots.Axis("meta-training", "s")
    return [
        plots.lines(
            plots.series(rows, x="seconds", y=column, roles=ROLES, names=LABELS),
            title=f"{axis.label.capitalize()} on the validation stream while the weights are learnt", x=seconds, y=axis,
        )
        for column, axis in (("nll", LOSS), ("f1", plots.Axis("F1", "%")))
        if any(math.isfinite(row[column]) for row in rows)
    ]  # fmt: skip


def bold_heaviest(rows: list[dict[str, Any]], name: str) -> str:
    """A document with its heaviest tokens in bold."""
    heavy = sorted((row[name] for row in rows), reverse=True)[max(0, round(HEAVY * len(rows)) - 1)]
    shaded = (_bold(row["token"].replace("*", "")) if row[name] >= heavy else row["token"] for row in rows)
    # two heavy tokens in a row are one run of bold
    return "".join(shaded).replace("****", "").strip()


def _bold(token: str) -> str:
    """A token in bold, the blank before it outside."""
    bare = token.strip()
    return token.replace(bare, f"**{bare}**", 1) if bare else token


def learned_methods(record: Record) -> list[str]:
    """Methods that learned weights."""
    return [row["method"] for row in record.table("answers") if row["method"] not in {"base", "uniform", "names"}]


def weights_text(record: Record) -> str:
    """The document as each method weighs it."""
    texts = [f"{LABELS[name]}: {bold_heaviest(record.table('passage'), name)}" for name in learned_methods(record)]
    lead = "A document of the test stream; the fifth of its tokens with the highest weights is set in bold."
    return "\n\n".join([lead, *texts])


def weights(record: Record) -> list[Table]:
    """Tokens with the highest and lowest mean weights by method, and every token of the document."""
    names, tables = learned_methods(record), []
    for name in names:
        rows = [{k: v for k, v in row.items() if k != "method"} for row in record.table("tokens", method=name)]
        title = f"Highest and lowest mean weights: {LABELS[name]}"
        tables.append(Table(rows, title, record.units, folded=name != names[-1]))
    every = [{LABELS.get(key, key): value for key, value in row.items()} for row in record.table("passage") if names]
    units = dict.fromkeys(LABELS.values(), "× mean")
    return [*tables, *([Table(every, "Every token of the document", units, folded=True)] if every else [])]


def caveats(record: Record) -> list[str]:
    """What a reader should know before relying on the numbers."""
    rows = record.table("meta")
    lost = Counter(row["method"] for row in rows if not row["applied"])
    taken = Counter(row["method"] for row in rows)
    return [
        *CAVEATS,
        *(
            f"{LABELS[name]}: {count:,} of {taken[name]:,} outer steps changed nothing, since their window overflowed; "
            "a smaller --inner-lr or --inner-clip prevents that."
            for name, count in lost.items()
        ),
    ]


def facts(record: Record) -> dict[str, Any]:
    """What reproduces the run."""
    own = ", ".join(Path(name).name for name in record.settings["data"])
    return {"model": hub.title(record.settings["model"]), "data": own or "two public-domain children's books"}


PAGE: Final = RunPage(
    "Which tokens to learn from",
    answer,
    Chapter(
        "Answers",
        rule,
        loss_bars,
        Rows("answers", "By method, after one pass over the test documents", note=SCORES, names=LABELS),
        Rows("documents", "Documents that there are, and that were taken"),
    ),
    Chapter("Against time", "Seconds of CPU time, evaluation excluded.", time_figures),
    Chapter("What is weighed", weights_text, weights),
    Chapter(
        "Questions",
        "Those that some method answers rightly first, and among them those on which the methods differ most.",
        Samples("samples", {"answer": "right", **LABELS}, "Question", "… "),
    ),
    caveats=caveats,
    facts=facts,
)

write_page = PAGE.write
