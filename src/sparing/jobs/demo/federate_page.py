"""Page of the chapter on federated learning: bytes predicted and counted, accuracy by round, who holds what."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Final

from sparing.jobs.demo.chapter import Chapter, Row, keyed, licence_of
from sparing.jobs.demo.federate import TABLES, WORKS
from sparing.jobs.demo.finding import Difference
from sparing.jobs.federate import figures
from sparing.jobs.federate.figures import percent, points
from sparing.jobs.federate.methods import LABELS, roles_of
from sparing.report import Figure, Record, Table, format_number
from sparing.report.page import Number

COLUMNS: Final = ("method", "accuracy", "ssr_global", "up_predicted", "up_counted")
UNITS: Final = {"up_predicted": "B", "up_counted": "B"}


class FederateChapter(Chapter):
    """Accuracy by round, who holds what, bytes predicted and counted."""

    name, complete = "federate", ("federated_methods", 5)
    saves, topic = "data that stay put", "Data that stay put · FedSign"
    question = "Can a model learn from data that must stay where they are?"
    paper = "Li et al., asymmetric valleys, NeurIPS 2024, Table 1, which is a picture we do not copy numbers from"
    deeper = ("sparing federate --methods fedavg fedsign own-sign hinge --dirichlet.alpha 0.1",)
    more = "More: signs kept round by round, who holds what, every number"

    def __init__(self, record: Record, folder: Path) -> None:
        """With the first run as the record of ``sparing federate``, and the rows that sentences are made of."""
        super().__init__(record, folder)
        self.work = WORKS[self.scale]
        self.roles = roles_of(self.work.main.methods)
        self.study = Record(question="", settings=self.work.main, seed=record.seed, environment={})
        for table in TABLES:
            for row in record.table(f"federated_{table}"):
                if row.pop("run") == "main":
                    self.study.add(table, **row)
        (self.data,) = self.study.table("data")
        self.drawn = f"{self.work.blocks} block{'s' if self.work.blocks > 1 else ''} drawn"
        by = keyed(self.rows, "method")
        self.mean, self.sign, self.control, self.dyn = (
            by[LABELS[name]] for name in ("fedavg", "fedsign", "own-sign", "feddyn")
        )
        self.few = by[f"{LABELS['fedavg']}, {self.drawn}"]

    @cached_property
    def rows(self) -> list[Row]:
        """The methods, and FedAvg whose clients draw blocks; bytes that a round sends to the server."""
        rows, rounds = [], self.work.main.rounds
        for row in self.record.table("federated_methods"):
            if row["run"] in ("main", "blocks"):
                name = row["method"] if row["run"] == "main" else f"{row['method']}, {self.drawn}"
                sent = {"up_predicted": row["predicted_up"] / rounds, "up_counted": row["bytes_up"] / rounds}
                kept = {c: row[c] for c in ("accuracy", "accuracy_low", "accuracy_high", "ssr_global", "norm")}
                rows.append({"method": name, **kept, **sent})
        return rows

    def paired(self) -> str:
        """How far the methods are from the first one, by the test rows on which the two differ."""
        base = LABELS[self.work.main.methods[0]]
        parts = []
        for row in self.study.table("pairs"):
            if base in (row["first"], row["second"]):
                sign, other = (1, row["first"]) if row["second"] == base else (-1, row["second"])
                p = "p < 0.001" if row["p"] < 0.001 else f"p = {row['p']:.3f}"
                parts.append(f"{other} {points(sign * row['difference'])} ({p})")
        where = f"Percentage points beside {base} on the same test rows, McNemar's test: "
        return f"{where}{', '.join(parts)}. " if parts else ""

    def over_mean(self, label: str, run: str = "main") -> Difference:
        """Accuracy of a method less that of the plain mean, paired by seed (points)."""
        return self.gap((run, label), ("main", LABELS["fedavg"]))

    def gap(self, one: tuple[str, str], other: tuple[str, str]) -> Difference:
        """Accuracy of one run and method less that of another, paired by seed (points)."""
        runs = [*self.record.table("federated_methods"), *self.record.table("federated_again")]
        found = [[row["accuracy"] for row in runs if (row["run"], row["method"]) == wanted] for wanted in (one, other)]
        return Difference.of([100 * (a - b) for a, b in zip(*found, strict=True)], "points")

    @property
    def over_control(self) -> Difference:
        """Accuracy of FedSign less that of its control (points)."""
        return self.gap(("main", LABELS["fedsign"]), ("main", LABELS["own-sign"]))

    @property
    def plain(self) -> str:
        """Accuracy of the plain mean of whole models, over seeds."""
        runs = [*self.record.table("federated_methods"), *self.record.table("federated_again")]
        return percent(fmean(r["accuracy"] for r in runs if (r["run"], r["method"]) == ("main", LABELS["fedavg"])))

    @property
    def exact(self) -> bool:
        """Whether every byte that was counted was predicted."""
        return all(row["up_counted"] == row["up_predicted"] for row in self.rows)

    @property
    def thinned(self) -> Difference:
        """Accuracy where clients draw blocks less that of whole models, by the same mean (points)."""
        return self.over_mean(LABELS["fedavg"], "blocks")

    @property
    def saved(self) -> float:
        """Bytes to the server that drawing blocks saves (%), counted."""
        return 100 * (1 - float(self.few["up_counted"] / self.mean["up_counted"]))

    def answer(self) -> str:
        """Bytes with fewer blocks, and what the signs bring beside their control."""
        sign, control, dyn = (self.over_mean(LABELS[name]) for name in ("fedsign", "own-sign", "feddyn"))
        return (
            f"With {self.drawn} by each client, a round sends **{format_number(self.few['up_counted'], 'B')}** to the "
            f"server instead of {format_number(self.mean['up_counted'], 'B')}; accuracy less that of whole models: "
            f"**{self.thinned.whole}**. FedSign less the plain mean, which reaches {self.plain}: "
            f"**{sign.whole}**; its control {control.whole}; FedDyn {dyn.whole}."
        )

    def story(self) -> str:
        """Who holds what, and what each method does."""
        settings = self.work.main
        return (
            f"{self.data['training_rows']:,} signals of MNIST-1D are dealt unevenly to {self.data['clients']} clients "
            f"(Dirichlet, α = {settings.dirichlet.alpha:g}). In each of {settings.rounds} rounds "
            f"{settings.training().participants(self.data['clients'])} of them train for {settings.local_epochs} "
            "passes and send their models; the server takes the mean. FedSign also pushes every weight along the sign "
            "that the global model sent out; **own sign** is a control that pushes just as hard without looking at the "
            "global model; FedDyn mends each client's drift by a vector that it keeps. Then the same mean again, where "
            "a client draws one body block and sends only that, first and last layer."
        )

    def pays(self) -> str:
        """A slow uplink, and rows that must stay."""
        exact = "as predicted" if self.exact else "NOT as predicted: a bug"
        return (
            f"Rows never leave a client, and a client that draws {self.drawn.removesuffix(' drawn')} sends "
            f"{self.saved:.0f} % fewer bytes, counted {exact}. Noise that makes a client's part private is "
            "`--privacy server`; it is not run here."
        )

    def fails(self) -> str:
        """Signs against their control, and rows that may be pooled."""
        return (
            "FedSign pushes weights outward whether signs agree or not. What the global model's signs add to that, "
            f"FedSign less its control: {self.over_control.whole}. Where rows may be pooled, pool them."
        )

    def card(self) -> Number:
        """Bytes, and what they cost in accuracy."""
        return Number(
            value=f"−{self.saved:.0f} %",
            label=f"bytes to the server in a round, {self.drawn} by each client; accuracy: {self.thinned.headline}",
            interval=f"accuracy {self.thinned.beside('seeds')}; bytes are exact",
            control=f"whole models: {format_number(self.mean['up_counted'], 'B')}, {self.plain}",
        )  # fmt: skip

    def brief(self) -> str:
        """The finding in a line."""
        return f"−{self.saved:.0f} % bytes; accuracy: {self.thinned.headline}"

    def numbers(self) -> list[Number]:
        """The signs and their control; FedDyn."""
        sign, control, dyn = (self.over_mean(LABELS[name]) for name in ("fedsign", "own-sign", "feddyn"))
        return [
            Number(
                value=sign.headline, label="accuracy of FedSign over the plain mean",
                interval=sign.beside(),
                control=f"a push as hard that never looks at the global signs: {control.text} {control.interval}",
            ),
            Number(
                value=dyn.headline, label="accuracy of FedDyn, which mends drift, over the plain mean",
                interval=dyn.beside(), control=f"the plain mean {self.plain}",
            ),
        ]  # fmt: skip

    def licences(self) -> list[tuple[str, str]]:
        """The signals."""
        return [licence_of(self.data["name"])]

    def claims(self) -> list[tuple[str, str, str]]:
        """Which is best, what the signs add, and who keeps them."""
        over = ", ".join(f"{name} {self.over_mean(name).whole}" for name in (LABELS["fedsign"], LABELS["feddyn"]))
        kept = ", ".join(f"{row['method']} {percent(row['ssr_global'])}" for row in (self.sign, self.mean))
        return [
            ("the most accurate", "FedSign, of six methods (Table 1)", f"over the plain mean: {over}"),
            ("what the global model's signs add to a push outward", "–", self.over_control.whole),
            ("weights whose sign a client keeps", "–", kept),
        ]

    @property
    def limits(self) -> str:
        """Smaller data, one rate."""
        return (
            "The paper trains on CIFAR-10 and CINIC-10 for 200 rounds and does not test the control. "
            f"{self.paired()}One learning rate for all; more rivals, and each method at its own rate, are in "
            "docs/results/federated.md."
        )

    @property
    def details(self) -> str:
        """How far Flower's model is from ours, where it is installed."""
        if not (flower := self.record.table("federated_flower")):
            return ""
        apart, rounds = flower[0]["apart"], flower[0]["rounds"]
        same = "the same model to the bit" if apart == 0 else f"a model at most {apart:.1g} apart"
        return f"Flower's own messages gave {same}, after {rounds} round{'s' if rounds > 1 else ''}."

    def figures(self) -> list[Figure]:
        """Accuracy, signs kept, and who holds what."""
        study = self.study
        sign, dyn = (self.over_mean(LABELS[name]) for name in ("fedsign", "feddyn"))
        made = [part(study) for part in (figures.ACCURACY, figures.KEPT, figures.partition_figure)]
        if made[0] is not None:
            # the figure's own title orders the methods by one seed
            made[0] = replace(made[0], title=f"Over the plain mean: FedDyn {dyn.headline}, FedSign {sign.headline}")
        return [figure for figure in made if figure]

    def tables(self) -> list[Table]:
        """The methods."""
        note = (
            f"accuracy: of {self.data['test_rows']:,} test signals; brackets: 95 % over them, not over seeds. "
            "ssr_global: share of weights whose sign a client kept in the last round. up: bytes of one round to the "
            f"server. Seed {self.record.seed}."
        )
        return [Table(self.rows, "Runs on the same clients", UNITS, COLUMNS, note, self.roles)]
