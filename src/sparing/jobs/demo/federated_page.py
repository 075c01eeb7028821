"""The chapter on federated learning: accuracy by round, who holds what, bytes predicted and counted."""

from __future__ import annotations

from typing import Any, Final

from sparing.jobs.demo.chapter import Chapter, Claim, run_note
from sparing.jobs.demo.federated import WORK, Work
from sparing.jobs.federate import figures
from sparing.jobs.federate.figures import percent, points
from sparing.jobs.federate.methods import LABELS, roles_of
from sparing.report import Figure, Record, Section, Table, format_number
from sparing.report.page import Number
from sparing.report.palette import Role

COLUMNS: Final = ("method", "accuracy", "ssr_global", "up_predicted", "up_counted")
UNITS: Final = {"up_predicted": "B", "up_counted": "B"}
TABLES: Final = ("data", "partition", "rounds", "methods", "pairs")


def roles(work: Work = WORK) -> dict[str, Role]:
    """Colours of the methods."""
    return dict(roles_of(work.main.method))


def study_of(record: Record, work: Work = WORK) -> Record:
    """The first run as the record of ``sparing federate``, with the tables that its pictures are made of."""
    own = Record(question="", settings=work.main, seed=record.seed, environment={})
    for name in TABLES:
        for row in record.table(f"federated_{name}"):
            if row["run"] == "main":
                own.add(name, **{column: cell for column, cell in row.items() if column != "run"})
    return own


def rows_of(record: Record, work: Work = WORK) -> list[dict[str, Any]]:
    """The methods, and FedAvg whose clients draw blocks; bytes that a round sends to the server."""
    rows = []
    for row in record.table("federated_methods"):
        if row["run"] in ("main", "blocks"):
            name = row["method"] if row["run"] == "main" else f"{row['method']}, {_drawn(work)}"
            per = work.main.rounds
            parts = {"up_predicted": row["predicted_up"] / per, "up_counted": row["bytes_up"] / per}
            kept = {c: row[c] for c in ("accuracy", "accuracy_low", "accuracy_high", "ssr_global", "norm")}
            rows.append({"method": name, **kept, **parts})
    return rows


def _paired(record: Record, work: Work) -> str:
    """How far the methods are from the first one, by the test rows on which the two differ."""
    base = LABELS[work.main.method[0]]
    parts = []
    for row in study_of(record, work).table("pairs"):
        if base in (row["first"], row["second"]):
            sign = 1 if row["second"] == base else -1
            other = row["first"] if sign == 1 else row["second"]
            p = "p < 0.001" if row["p"] < 0.001 else f"p = {row['p']:.3f}"
            parts.append(f"{other} {points(sign * row['difference'])} ({p})")
    where = f"Percentage points beside {base} on the same test rows, McNemar's test: "
    return f"{where}{', '.join(parts)}. " if parts else ""


def _drawn(work: Work) -> str:
    return f"{work.blocks} block{'s' if work.blocks > 1 else ''} drawn"


def answer(record: Record, work: Work = WORK) -> str:
    """One sentence with its numbers."""
    by = {row["method"]: row for row in rows_of(record, work)}
    mean, sign, dyn = (by[LABELS[name]] for name in ("fedavg", "fedsign", "feddyn"))
    few = by[f"{LABELS['fedavg']}, {_drawn(work)}"]
    return (
        f"The mean of the clients' models reaches **{percent(mean['accuracy'])}**, FedSign "
        f"**{percent(sign['accuracy'])}**, FedDyn **{percent(dyn['accuracy'])}**. With {_drawn(work)} by each client, "
        f"a round sends **{format_number(few['up_counted'], 'B')}** to the server instead of "
        f"{format_number(mean['up_counted'], 'B')}, and ends at {percent(few['accuracy'])}."
    )


def numbers(record: Record, work: Work = WORK) -> tuple[Number, Number, Number]:
    """Accuracies and bytes."""
    by = {row["method"]: row for row in rows_of(record, work)}
    mean, sign, control = (by[LABELS[name]] for name in ("fedavg", "fedsign", "own-sign"))
    few = by[f"{LABELS['fedavg']}, {_drawn(work)}"]
    tested = f"{study_of(record, work).table('methods')[0]['n']:,} test rows"
    spread = 50 * (mean["accuracy_high"] - mean["accuracy_low"])
    note = f"{run_note(record.seed)}; each ±{spread:.0f} points on {tested}"
    saved = 100 * (1 - few["up_counted"] / mean["up_counted"])
    exact = all(row["up_counted"] == row["up_predicted"] for row in by.values())
    return (
        Number(
            value=f"{points(sign['accuracy'] - mean['accuracy'])} points", note=note,
            label=f"accuracy of FedSign, {percent(sign['accuracy'])}, over the plain mean, {percent(mean['accuracy'])}",
        ),
        Number(
            value=f"{points(control['accuracy'] - mean['accuracy'])} points", note=note,
            label="the same by a control that pushes as hard and never looks at the global model's signs",
        ),
        Number(
            value=f"−{saved:.0f} %", note="counted, as predicted" if exact else "NOT as predicted",
            label=f"bytes to the server in a round, {_drawn(work)} by each client; accuracy {percent(few['accuracy'])}",
        ),
    )  # fmt: skip


def claims(record: Record, work: Work = WORK) -> list[Claim]:
    """What the paper states of FedSign, and what was found here."""
    by = {row["method"]: row for row in rows_of(record, work)}
    mean, sign, control, dyn = (by[LABELS[name]] for name in ("fedavg", "fedsign", "own-sign", "feddyn"))
    ranked = sorted((sign, mean, dyn), key=lambda row: -row["accuracy"])
    order = ", ".join(f"{row['method']} {percent(row['accuracy'])}" for row in ranked)
    kept = ", ".join(f"{row['method']} {percent(row['ssr_global'])}" for row in (sign, mean))
    return [
        Claim(what="the most accurate", paper="FedSign, of six methods (Table 1)", here=order),
        Claim(what="what the global model's signs add to a push outward", paper="–",
              here=f"{points(sign['accuracy'] - control['accuracy'])} points over the control"),
        Claim(what="weights whose sign a client keeps", paper="–", here=kept),
    ]  # fmt: skip


def pictures(record: Record, work: Work = WORK) -> list[Figure]:
    """Accuracy, signs kept, and who holds what."""
    study = study_of(record, work)
    return [*figures.accuracy_figures(study), *figures.sign_figures(study)[:1], figures.partition_figure(study)]


def details(record: Record, work: Work = WORK) -> Section:
    """All that a first look can do without."""
    (data,) = study_of(record, work).table("data")
    text = ""
    if flower := record.table("federated_flower"):
        apart, rounds = flower[0]["apart"], flower[0]["rounds"]
        same = "the same model to the bit" if apart == 0 else f"a model at most {apart:.1g} apart"
        text = f"Flower's own messages gave {same}, after {rounds} round{'s' if rounds > 1 else ''}."
    note = (
        f"accuracy: of {data['test_rows']:,} test signals; brackets: 95 % over them, not over seeds. ssr_global: share "
        "of weights whose sign a client kept in the last round. up: bytes of one round to the server. One seed."
    )
    table = Table(rows_of(record, work), "Runs on the same clients", UNITS, list(COLUMNS), note=note, roles=roles(work))
    title = "More: signs kept round by round, who holds what, every number"
    return Section(title, text, pictures(record, work)[1:], [table])


def chapter(record: Record, work: Work = WORK) -> Chapter:
    """The chapter as its page shows it."""
    (data,) = study_of(record, work).table("data")
    settings = work.main
    drawn = settings.schedule().participants(data["clients"])
    return Chapter(
        name="federate", topic="Data that stay put · FedSign",
        question="Can a model learn from data that must stay where they are?",
        answer=answer(record, work), numbers=numbers(record, work), picture=pictures(record, work)[0],
        claims=claims(record, work),
        story=(
            f"{data['training_rows']:,} signals of MNIST-1D are dealt unevenly to {data['clients']} clients "
            f"(Dirichlet, α = {settings.alpha:g}). In each of {settings.rounds} rounds {drawn} of them train for "
            f"{settings.local_epochs} passes and send their models; the server takes the mean. FedSign also pushes "
            "every weight along the sign that the global model sent out; **own sign** is a control that pushes just "
            "as hard without looking at the global model; FedDyn mends each client's drift by a vector that it keeps. "
            "Then the same mean again, where a client draws one body block and sends only that, first and last layer."
        ),
        paper="Li et al., asymmetric valleys, NeurIPS 2024, Table 1, which is a picture we do not copy numbers from",
        limits=(
            "The paper trains on CIFAR-10 and CINIC-10 for 200 rounds and does not test the control. "
            f"{_paired(record, work)}One seed and one learning rate for all; more seeds, rivals, and each method at "
            "its own rate are in docs/results/federated.md."
        ),
        deeper=("sparing federate --method fedavg fedsign own-sign hinge --alpha 0.1",),
        details=details(record, work),
    )  # fmt: skip
