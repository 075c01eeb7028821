"""The chapter on scaling for people: one sentence, rate curves by rule, drift, the coordinate check."""

from __future__ import annotations

from typing import Any

from sparing.jobs.demo.transfer import WORK
from sparing.jobs.transfer.analysis import analyse
from sparing.jobs.transfer.figures import ROLES, TITLES, coordinate_figure, curves, named, pareto_figure
from sparing.jobs.transfer.grid import Cell, lines, places
from sparing.jobs.transfer.settings import Transfer
from sparing.report import Figure, Record, Section, Table, format_number

COLUMNS = ("rule", "density", "best_rate", "loss_transferred", "loss_retuned")


def study_of(record: Record, work: Transfer = WORK) -> Record:
    """The chapter's runs as the record of a study of their own.

    Args:
        record: Of the demo.
        work: Size of the work.

    Returns:
        With the tables that ``sparing transfer`` makes.
    """
    results = {}
    for row in record.table("transfer_runs"):
        cell = {name: row[name] for name in Cell.__dataclass_fields__}
        results[Cell(**cell)] = {name: value for name, value in row.items() if name not in cell}
    own = Record(question="", settings=work, seed=list(work.seeds), environment={})
    analyse(own, work, results)
    for table in ("coordinates", "slopes"):
        for row in record.table(table):
            own.add(table, **row)
    return own


def rows_of(study: Record) -> list[dict[str, Any]]:
    """Best rate and both losses of every rule and density."""
    best = {(row["rule"], row["density"]): row["best"] for row in study.table("optima")}
    return [
        {
            "rule": TITLES[row["rule"]], "density": named(row["width"], row["density"], widths=1),
            "best_rate": 2.0 ** best[row["rule"], row["density"]],
            "loss_transferred": row["loss_transferred"], "loss_retuned": row["loss_retuned"],
        }
        for row in study.table("transfer")
    ]  # fmt: skip


def answer(study: Record, work: Transfer = WORK) -> str:
    """One sentence with its numbers.

    Args:
        study: Of the chapter.
        work: Size of the work.

    Returns:
        What the dense model's rate costs the sparsest one under each rule.
    """
    sparsest = min(density for _, density in places(work))
    rows = {row["rule"]: row for row in study.table("transfer") if row["density"] == sparsest}
    told = [f"{TITLES[rule]} {format_number(row['loss_transferred'])}" for rule, row in rows.items() if rule != "supar"]
    share = named(work.widths[0], sparsest, widths=1)
    return (
        f"With {share} of the weights, at the learning rate that was best for the dense net, **SμPar** ends at a "
        f"training loss of **{format_number(rows['supar']['loss_transferred'])} nat**; {', '.join(told)}."
    )


def figures(study: Record, work: Transfer = WORK) -> list[Figure]:
    """Rate curves a rule, losses over density, sizes over density.

    Args:
        study: Of the chapter.
        work: Size of the work.

    Returns:
        The pictures.
    """
    known = sorted(places(work), key=lambda place: -place[1])
    line = lines(work)[0].name
    drawn = [curves(study, rule, known, name=f"width {work.widths[0]}") for rule in work.rules]
    drawn += [pareto_figure(study, line, "density"), coordinate_figure(study)]
    return [figure for figure in drawn if figure is not None]


def chapter(record: Record, work: Transfer = WORK) -> Section:
    """The chapter.

    Args:
        record: Of the demo.
        work: Size of the work.

    Returns:
        A section of the page.
    """
    study = study_of(record, work)
    text = (
        "Does a learning rate that was tuned on a dense net serve a sparse one? Each curve trains the same net on "
        "handwritten digits at seven rates, with all, a quarter and a sixteenth of its hidden weights.\n\nIn the "
        "standard parametrization (SP) and in μP the signal fades with every weight that goes, and the best rate moves "
        "up. SμPar (Dey, Bergsma and Hestness, NeurIPS 2024) makes initial weights and rates of a sparse layer larger "
        "by its density, so that the curves lie on each other below the optimum.\n\nGo deeper: "
        "`sparing transfer --seeds 0 1 2`, or `sparing transfer --model gpt2` on text."
    )
    units = {"loss_transferred": "nat", "loss_retuned": "nat"}
    note = "loss transferred: at the dense net's best rate; loss retuned: at this row's own best. One seed."
    table = Table(rows_of(study), "Three rules, three densities", units, COLUMNS, note=note, roles=ROLES)
    return Section("Scaling: tune once, train sparse", text, figures(study, work), [table], answer=answer(study, work))
