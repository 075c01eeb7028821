"""The chapter on scaling: how far the best rate moves, what re-using it costs, and the paper's figures."""

from __future__ import annotations

from typing import Any

from sparing.jobs.demo.chapter import Chapter, Claim, run_note
from sparing.jobs.demo.transfer import WORK
from sparing.jobs.transfer.analysis import analyse
from sparing.jobs.transfer.figures import (
    ROLES,
    TITLES,
    coordinate_figure,
    curves,
    drift_figure,
    pareto_figure,
    place_label,
)
from sparing.jobs.transfer.grid import Cell, lines, places
from sparing.jobs.transfer.settings import Transfer
from sparing.report import Figure, Record, Section, Table, format_number
from sparing.report.page import Number

COLUMNS = ("rule", "density", "best_rate", "loss_transferred", "loss_retuned")
UNITS = {"loss_transferred": "nat", "loss_retuned": "nat"}


def study_of(record: Record, work: Transfer = WORK) -> Record:
    """The chapter's runs as the record of a study of their own, with the tables that ``sparing transfer`` makes."""
    results = {}
    for row in record.table("transfer_runs"):
        cell = {name: row[name] for name in Cell.__dataclass_fields__}
        results[Cell(**cell)] = {name: value for name, value in row.items() if name not in cell}
    own = Record(question="", settings=work, seed=record.seed, environment={})
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
            "rule": TITLES[row["rule"]], "density": place_label(row["width"], row["density"], widths=1),
            "best_rate": None if (x := best[row["rule"], row["density"]]) is None else 2.0**x,
            "loss_transferred": row["loss_transferred"], "loss_retuned": row["loss_retuned"],
        }
        for row in study.table("transfer")
    ]  # fmt: skip


def sparsest(study: Record, work: Transfer = WORK) -> dict[str, dict[str, Any]]:
    """The row of each rule at the lowest density."""
    least = min(density for _, density in places(work))
    return {row["rule"]: row for row in study.table("transfer") if row["density"] == least}


def lowest(work: Transfer = WORK) -> str:
    """The lowest density in words."""
    return place_label(work.widths[0], min(density for _, density in places(work)), widths=1)


def drift_text(row: dict[str, Any]) -> str:
    """How far a best rate moved, in words."""
    if row["drift"] is None:
        return "unknown"
    moved = format_number(2.0 ** abs(row["drift"]), "×")
    return f"{'at least ' if row['censored'] else ''}{moved} {'up' if row['drift'] > 0 else 'down'}"


def drift_size(row: dict[str, Any]) -> str:
    """The same as a number alone."""
    known = row["drift"] is not None
    return f"{'≥ ' if row['censored'] else ''}{format_number(2.0 ** abs(row['drift']), '×')}" if known else "–"


def largest_drift(study: Record, rule: str) -> dict[str, Any]:
    """The row of a rule at the density where its best rate moved farthest."""
    rows = [row for row in study.table("transfer") if row["rule"] == rule]
    return max(rows, key=lambda row: abs(row["drift"] or 0.0))


def answer(study: Record, work: Transfer = WORK) -> str:
    """One sentence: how far best rates move, and what the dense net's costs the sparsest one under each rule."""
    rows = sparsest(study, work)
    losses = [
        f"{TITLES[rule]} {format_number(row['loss_transferred'])}" for rule, row in rows.items() if rule != "supar"
    ]
    ours, plain = (drift_size(largest_drift(study, rule)) for rule in ("supar", "sp"))
    return (
        f"Under **SμPar** the best rate moves by no more than **{ours}**, in the standard parametrization by {plain}. "
        f"With {lowest(work)} of the weights, at the rate that was best for the dense net, SμPar ends at a training "
        f"loss of **{format_number(rows['supar']['loss_transferred'])} nat**; {', '.join(losses)}."
    )


def numbers(study: Record, work: Transfer = WORK) -> tuple[Number, Number, Number]:
    """How far the best rate moved, and what that costs."""
    rows, note = sparsest(study, work), run_note(study.seed, "one run a point")
    ours, plain = largest_drift(study, "supar"), largest_drift(study, "sp")
    lost = format_number(rows["sp"]["loss_transferred"])

    return (
        Number(
            value=drift_size(ours), note=note,
            label=f"largest move of the best learning rate under SμPar, dense to {lowest(work)} of the weights",
        ),
        Number(value=drift_size(plain), note=note, label="the same in the standard parametrization (SP)"),
        Number(
            value=f"{rows['supar']['loss_transferred']:.2g} nat", note=note,
            label=f"training loss of SμPar at {lowest(work)}, the dense net's rate re-used; SP {lost}",
        ),
    )  # fmt: skip


def claims(study: Record, work: Transfer = WORK) -> list[Claim]:
    """What the paper states of rates and losses, and what was found here."""
    rows = sparsest(study, work)

    def gain(rule: str, column: str) -> str:
        return f"{100 * (1 - rows['supar'][column] / rows[rule][column]):.1f} %".replace("-", "−")

    return [
        Claim(
            what="SμPar's best rate from dense to sparsest",
            paper="near 2⁻⁶ at every density down to 1/64 (Figure 6)",
            here=f"{drift_text(largest_drift(study, 'supar'))} at most",
        ),
        Claim(
            what="best rate of SP and of μP",
            paper="climbs with sparsity, in μP more abruptly (Figure 6)",
            here=f"{drift_text(largest_drift(study, 'sp'))}; {drift_text(largest_drift(study, 'mup'))}",
        ),
        Claim(
            what="loss of SμPar below SP's and μP's, the dense rate re-used",
            paper="11.9 % and 1.9 %, validation, density 1/128 (Figure 3; SP untuned)",
            here=f"{gain('sp', 'loss_transferred')} and {gain('mup', 'loss_transferred')}, training, {lowest(work)}",
        ),
        Claim(
            what="the same, every rule re-tuned",
            paper="0.8 % and 2.1 %, mean over densities (Figure 8)",
            here=f"{gain('sp', 'loss_retuned')} and {gain('mup', 'loss_retuned')}, {lowest(work)}",
        ),
    ]


def details(study: Record, work: Transfer = WORK) -> Section:
    """Rate curves a rule, losses over density, sizes over density: all that a first look can do without."""
    known = sorted(places(work), key=lambda place: -place[1])
    drawn = [curves(study, rule, known, name=f"width {work.widths[0]}") for rule in work.rules]
    drawn += [pareto_figure(study, lines(work)[0].name, "density"), coordinate_figure(study)]
    text = (
        "In the standard parametrization (SP) and in μP the signal fades with every weight that goes, and the best "
        "rate moves up. SμPar makes initial weights and rates of a sparse layer larger by its density, so that the "
        "curves lie on each other below the optimum."
    )
    note = "loss transferred: at the dense net's best rate; loss retuned: at this row's own best. One seed."
    table = Table(rows_of(study), "Rules and densities", UNITS, COLUMNS, note=note, roles=ROLES)
    title = "More: every curve, losses over density, size of what the deepest layer puts out, every number"
    return Section(title, text, [figure for figure in drawn if figure is not None], [table])


def picture(study: Record, work: Transfer = WORK) -> Figure:
    """Best rate over density, or the losses where no rate is known."""
    line = lines(work)[0].name
    found = drift_figure(study, line, "density") or pareto_figure(study, line, "density")
    return found or curves(study, "supar", places(work), name=f"width {work.widths[0]}")  # type: ignore[return-value]


def chapter(record: Record, work: Transfer = WORK) -> Chapter:
    """The chapter as its page shows it."""
    study = study_of(record, work)
    return Chapter(
        name="transfer", topic="Tuning sparse nets · SμPar",
        question="Does a learning rate that was tuned on a dense net serve a sparse one?",
        answer=answer(study, work), numbers=numbers(study, work), picture=picture(study, work),
        claims=claims(study, work),
        story=(
            f"The same net is trained on handwritten digits at {len(work.rates)} learning rates, with all and with "
            f"fewer of its hidden weights, down to {lowest(work)}; {len(study.table('runs'))} runs in all. Three rules "
            "say how initial weights and rates go with size: the standard one (SP), μP, which knows of width, and "
            "SμPar, which knows of sparsity too."
        ),
        paper="Dey, Bergsma and Hestness, SμPar, NeurIPS 2024, arXiv:2405.15743",
        limits=(
            "The paper trains language models of up to 610 million parameters on billions of tokens; digits are an "
            "easy task, training losses here come near zero, and ratios of such losses are large. What carries over is "
            "where the best rate lies. Studies with three seeds, also on text, are in docs/results/scaling.md."
        ),
        deeper=(
            "sparing transfer --seeds 0 1 2",
            "sparing transfer --model gpt2    # on text",
        ),
        details=details(study, work),
    )  # fmt: skip
