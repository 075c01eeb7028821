"""The chapter on federated learning for people: accuracy by round, who holds what, bytes foretold and counted."""

from __future__ import annotations

from typing import Any, Final

from sparing.jobs.demo.federated import WORK, Work
from sparing.jobs.federate import figures
from sparing.jobs.federate.figures import percent, points
from sparing.jobs.federate.methods import LABELS, roles_of
from sparing.report import Figure, Record, Section, Table, format_number
from sparing.report.palette import Role

COLUMNS: Final = ("method", "accuracy", "ssr_global", "up_predicted", "up_counted")
UNITS: Final = {"up_predicted": "B", "up_counted": "B"}
TABLES: Final = ("data", "partition", "rounds", "methods")


def roles(work: Work = WORK) -> dict[str, Role]:
    """Colours of the methods."""
    return dict(roles_of(work.main.method))


def study_of(record: Record, work: Work = WORK) -> Record:
    """The first run as the record of ``sparing federate``.

    Args:
        record: Of the demo.
        work: Size of the work.

    Returns:
        With the tables that its pictures are made of.
    """
    own = Record(question="", settings=work.main, seed=record.seed, environment={})
    for name in TABLES:
        for row in record.table(f"federated_{name}"):
            if row["run"] == "main":
                own.add(name, **{column: cell for column, cell in row.items() if column != "run"})
    return own


def rows_of(record: Record, work: Work = WORK) -> list[dict[str, Any]]:
    """The methods, and FedAvg whose clients draw blocks; bytes that a round sends to the server.

    Args:
        record: Of the demo.
        work: Size of the work.

    Returns:
        Rows.
    """
    rows = []
    for row in record.table("federated_methods"):
        if row["run"] in ("main", "blocks"):
            name = row["method"] if row["run"] == "main" else f"{row['method']}, {_drawn(work)}"
            per = work.main.rounds
            told = {"up_predicted": row["predicted_up"] / per, "up_counted": row["bytes_up"] / per}
            kept = {c: row[c] for c in ("accuracy", "accuracy_low", "accuracy_high", "ssr_global", "norm")}
            rows.append({"method": name, **kept, **told})
    return rows


def _drawn(work: Work) -> str:
    return f"{work.blocks} block{'s' if work.blocks > 1 else ''} drawn"


def answer(record: Record, work: Work = WORK) -> str:
    """One sentence with its numbers.

    Args:
        record: Of the demo.
        work: Size of the work.

    Returns:
        Accuracy of FedAvg and FedSign, signs kept, bytes with all blocks and with drawn ones.
    """
    by = {row["method"]: row for row in rows_of(record, work)}
    mean, sign, dyn = (by[LABELS[name]] for name in ("fedavg", "fedsign", "feddyn"))
    few = by[f"{LABELS['fedavg']}, {_drawn(work)}"]
    text = (
        f"The mean of the clients' models reaches **{percent(mean['accuracy'])}**, FedSign "
        f"**{percent(sign['accuracy'])}** ({points(sign['accuracy'] - mean['accuracy'])} points), FedDyn "
        f"**{percent(dyn['accuracy'])}**; a client of FedSign keeps {percent(sign['ssr_global'])} of the signs, "
        f"of FedAvg {percent(mean['ssr_global'])}. With {_drawn(work)}, "
        f"a round sends **{format_number(few['up_counted'], 'B')}** to the server instead of "
        f"{format_number(mean['up_counted'], 'B')}, and ends at {percent(few['accuracy'])}."
    )
    flower = record.table("federated_flower")
    if flower:
        apart = flower[0]["apart"]
        same = "the same model to the bit" if apart == 0 else f"a model at most {apart:.1g} apart"
        text += f" Flower's own messages gave {same}, after {flower[0]['rounds']} rounds."
    return text


def pictures(record: Record, work: Work = WORK) -> list[Figure]:
    """Accuracy, signs kept, and who holds what."""
    study = study_of(record, work)
    return [*figures.accuracy_figures(study), *figures.sign_figures(study)[:1], figures.partition_figure(study)]


def chapter(record: Record, work: Work = WORK) -> Section:
    """The chapter.

    Args:
        record: Of the demo.
        work: Size of the work.

    Returns:
        A section of the page.
    """
    (data,) = study_of(record, work).table("data")
    settings = work.main
    drawn = settings.schedule().participants(data["clients"])
    text = (
        f"What if data cannot be pooled? {data['training_rows']:,} signals of MNIST-1D are dealt to {data['clients']} "
        f"clients, unevenly (Dirichlet, α = {settings.alpha:g}). In each of {settings.rounds} rounds {drawn} of them "
        f"train for {settings.local_epochs} passes and send their models; the server takes the mean. FedSign also "
        "pushes every weight along the sign that the global model sent out; **own sign** is a control that pushes just "
        "as hard without looking at the global model; FedDyn mends each client's drift by a vector that it keeps.\n\n"
        "Then the same FedAvg again, where each client draws one body "
        "block, trains it beside first and last layer, and sends only those. Bytes are foretold from shapes and "
        "draws.\n\nIn the paper (Li et al., NeurIPS 2024, Table 1) FedSign leads five rivals on images, 100 clients "
        "of which 10 train in a round; what its signs add over a push outward, the paper does not test.\n\nGo deeper: "
        "`sparing federate --method fedavg fedsign own-sign hinge --alpha 0.1`."
    )
    note = (
        f"accuracy: of {data['test_rows']:,} test signals; brackets: 95 % over them, not over seeds. ssr_global: share "
        "of weights whose sign a client kept in the last round. up: bytes of one round to the server. One seed."
    )
    table = Table(rows_of(record, work), "Runs on the same clients", UNITS, list(COLUMNS), note=note, roles=roles(work))
    answered = answer(record, work)
    return Section("Federated: models of clients, averaged", text, pictures(record, work), [table], answer=answered)
