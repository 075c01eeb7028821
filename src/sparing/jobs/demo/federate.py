"""Chapter on federated learning: clients that keep their data, with pushed signs, and with fewer blocks on the wire."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from sparing.jobs.demo.chapter import Chapter, Row, copy_tables, keyed, load_or_omit
from sparing.jobs.demo.settings import Scale
from sparing.jobs.demo.settings import Settings as Demo
from sparing.jobs.disk import load_tensors
from sparing.jobs.federate import figures, job
from sparing.jobs.federate.figures import percent, points
from sparing.jobs.federate.methods import LABELS, roles_of
from sparing.jobs.federate.settings import Dirichlet, FedDyn, FedSign, Settings
from sparing.jobs.folder import CHECKPOINTS
from sparing.jobs.run import Run
from sparing.report import Figure, Record, Table, format_number

LOG = logging.getLogger("sparing.demo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Size of the chapter."""

    main: Settings = field(
        default_factory=lambda: Settings(
            methods=("fedavg", "fedsign", "own-sign", "feddyn"), fedsign=FedSign(gamma=0.01), feddyn=FedDyn(alpha=0.1),
            net="mlp", dirichlet=Dirichlet(alpha=0.3), rounds=80, lr=0.1, warmup_rounds=5, held_out=0.0, test_rows=None,
            members=False, evaluate_every=2,
        )
    )  # fmt: skip
    """FedAvg, FedSign and its control, FedDyn, on the same clients."""
    blocks: int = 1  # body blocks that a client draws in the second run (count)
    flower_rounds: int = 3  # of the short run on Flower (count)


WORK: Final = Work()  # a minute on two cores

WORKS: Final[dict[Scale, Work]] = {
    "small": WORK,
    "tiny": Work(main=replace(WORK.main, rounds=20, evaluate_every=4), flower_rounds=1),
}

FOLDER: Final = "federated"  # of the runs, in the folder of the demo
TABLES: Final = ("data", "partition", "rounds", "price", "methods", "pairs")

COLUMNS: Final = ("method", "accuracy", "ssr_global", "up_predicted", "up_counted")
UNITS: Final = {"up_predicted": "B", "up_counted": "B"}


def settings_of(run: str, work: Work, demo: Demo) -> Settings:
    """What ``sparing federate`` is asked in each run; "embedded" is the one that Flower's is compared with."""
    at = demo.out / FOLDER / run
    # an interrupted run has checkpoints of its own; anything else in its place is of no use
    interrupted = demo.resume and (at / CHECKPOINTS).exists()
    own = replace(work.main, seed=demo.seed, out=at, resume=interrupted, overwrite=at.exists() and not interrupted)
    if run == "main":
        return own
    alone = replace(own, methods=("fedavg",))
    if run == "blocks":
        return replace(alone, blocks=work.blocks)
    short = replace(alone, rounds=work.flower_rounds, resume=False, overwrite=at.exists())
    return replace(short, engine="flower" if run == "flower" else "embedded")


def run_chapter(run: Run) -> None:
    """All methods; the mean with fewer blocks; and a few rounds by Flower's messages and in one process."""
    demo: Demo = run.settings
    work = WORKS[demo.scale]

    def federate(name: str) -> None:
        found = job.run(settings_of(name, work, demo))
        copy_tables(run.record, found, {table: f"federated_{table}" for table in TABLES}, run=name)

    def compare() -> None:
        models = (demo.out / FOLDER / name / job.MODELS / "fedavg.safetensors" for name in ("embedded", "flower"))
        one, other = map(load_tensors, models)
        apart = max(float((one[name] - other[name]).abs().max()) for name in one)
        run.record.add("federated_flower", rounds=work.flower_rounds, apart=apart)

    for name in ("main", "blocks"):
        load_or_omit(partial(run.once, f"federate: {name}", partial(federate, name)))
    if run.record.table("federated_flower"):
        return
    if importlib.util.find_spec("flwr") is None:
        LOG.info("demo: Flower is not installed; its run is left out (pip install 'sparing[flower]')")
        return
    for name in ("embedded", "flower"):
        run.once(f"federate: {name}", partial(federate, name))
    run.once("federate: comparison", compare)


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

    def answer(self) -> str:
        """Three accuracies, and bytes with fewer blocks."""
        mean, sign, dyn, few = (percent(row["accuracy"]) for row in (self.mean, self.sign, self.dyn, self.few))
        return (
            f"The mean of the clients' models reaches **{mean}**, FedSign **{sign}**, FedDyn **{dyn}**. With "
            f"{self.drawn} by each client, a round sends **{format_number(self.few['up_counted'], 'B')}** to the "
            f"server instead of {format_number(self.mean['up_counted'], 'B')}, and ends at {few}."
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

    def numbers(self) -> list[tuple[str, str, str]]:
        """Accuracies and bytes."""
        mean, sign, few = (percent(row["accuracy"]) for row in (self.mean, self.sign, self.few))
        over, control = (points(row["accuracy"] - self.mean["accuracy"]) for row in (self.sign, self.control))
        spread = 50 * (self.mean["accuracy_high"] - self.mean["accuracy_low"])
        note = f"{self.runs()}; each ±{spread:.0f} points on {self.study.table('methods')[0]['n']:,} test rows"
        saved = 100 * (1 - self.few["up_counted"] / self.mean["up_counted"])
        exact = all(row["up_counted"] == row["up_predicted"] for row in self.rows)
        pushed = "the same by a control that pushes as hard and never looks at the global model's signs"
        sent = f"bytes to the server in a round, {self.drawn} by each client; accuracy {few}"
        return [
            (f"{over} points", f"accuracy of FedSign, {sign}, over the plain mean, {mean}", note),
            (f"{control} points", pushed, note),
            (f"−{saved:.0f} %", sent, "counted, as predicted" if exact else "NOT as predicted"),
        ]

    def claims(self) -> list[tuple[str, str, str]]:
        """Which is best, what the signs add, and who keeps them."""
        ranked = sorted((self.sign, self.mean, self.dyn), key=lambda row: -row["accuracy"])
        order = ", ".join(f"{row['method']} {percent(row['accuracy'])}" for row in ranked)
        over = f"{points(self.sign['accuracy'] - self.control['accuracy'])} points over the control"
        kept = ", ".join(f"{row['method']} {percent(row['ssr_global'])}" for row in (self.sign, self.mean))
        return [
            ("the most accurate", "FedSign, of six methods (Table 1)", order),
            ("what the global model's signs add to a push outward", "–", over),
            ("weights whose sign a client keeps", "–", kept),
        ]

    @property
    def limits(self) -> str:
        """Smaller data, one seed, one rate."""
        return (
            "The paper trains on CIFAR-10 and CINIC-10 for 200 rounds and does not test the control. "
            f"{self.paired()}One seed and one learning rate for all; more seeds, rivals, and each method at its own "
            "rate are in docs/results/federated.md."
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
        made = (part(study) for part in (figures.ACCURACY, figures.KEPT, figures.partition_figure))
        return [figure for figure in made if figure]

    def tables(self) -> list[Table]:
        """The methods."""
        note = (
            f"accuracy: of {self.data['test_rows']:,} test signals; brackets: 95 % over them, not over seeds. "
            "ssr_global: share of weights whose sign a client kept in the last round. up: bytes of one round to the "
            "server. One seed."
        )
        return [Table(self.rows, "Runs on the same clients", UNITS, COLUMNS, note, self.roles)]
