"""Chapter on scaling: one learning rate for dense and sparse nets, or a new search for each density."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from sparing.jobs.demo.chapter import Chapter, Row, keyed, licence_of, load_or_omit
from sparing.jobs.demo.finding import Difference
from sparing.jobs.demo.settings import Scale, Settings
from sparing.jobs.run import Run
from sparing.jobs.settings import RuleName
from sparing.jobs.transfer import figures
from sparing.jobs.transfer.analysis import Sweeps, add_coordinates, analyse
from sparing.jobs.transfer.figures import ROLES, TITLES, place_label
from sparing.jobs.transfer.inputs import digits
from sparing.jobs.transfer.settings import Cell, Transfer, cells, lines, places
from sparing.jobs.transfer.train import train
from sparing.report import Figure, Progress, Record, Table, format_number
from sparing.report.page import Number

WORK: Final = Transfer(
    family="mlp", widths=(256,), base_width=128, layers=3, densities=(1.0, 0.25, 0.0625), rules=("sp", "mup", "supar"),
    log2_rates=(-11, -10, -9, -8, -7, -6, -5), seeds=(0, 1, 2), steps=120,
)  # fmt: skip
"""The paper's Figure 6 at the size of two minutes on two cores."""

WORKS: Final[dict[Scale, Transfer]] = {
    "small": WORK,
    "tiny": replace(
        WORK, widths=(128,), base_width=64, densities=(1.0, 0.125), log2_rates=(-10, -8, -6, -4), steps=40, seeds=(0,)
    ),
}

COLUMNS: Final = ("rule", "density", "best_rate", "loss_transferred", "loss_retuned")
UNITS: Final = {"loss_transferred": "nat", "loss_retuned": "nat"}


def run_chapter(run: Run) -> None:
    """Train every net of the grid, then measure the sizes of their parts."""
    settings: Settings = run.settings
    if run.record.table("coordinates"):
        return
    work, inputs, wanted = WORKS[settings.scale], load_or_omit(digits), cells(WORKS[settings.scale])
    with Progress("transfer", total=len(wanted), unit="run", resume_at=len(run.results("transfer: "))) as bar:

        def one_run(cell: Cell) -> None:
            # trained with seeds from the demo's on, noted under the grid's, which the analysis knows
            result = train(work, inputs, replace(cell, seed=settings.seed + cell.seed))
            run.record.add("transfer_runs", **cell.params, **result)
            bar.advance(rule=cell.rule, loss="diverged" if result["diverged"] else result["loss"])

        for cell in wanted:
            named = " ".join(map(str, cell.params.values()))
            run.once(f"transfer: {named}", partial(one_run, cell))
    run.once("transfer coordinates", partial(add_coordinates, run.record, work, inputs))


class TransferChapter(Chapter):
    """How far the best rate moves, what re-using it costs, and the paper's figures."""

    name, complete = "transfer", ("coordinates", 1)
    saves, topic = "tuning sparse nets", "Tuning sparse nets · SμPar"
    question = "Does a learning rate that was tuned on a dense net serve a sparse one?"
    paper = "Dey, Bergsma and Hestness, SμPar, NeurIPS 2024, arXiv:2405.15743"
    deeper = ("sparing transfer --seeds 0 1 2 3 4", "sparing transfer --family gpt2    # on text")
    more = "More: every curve, losses over density, size of what the deepest layer puts out, every number"
    limits = (
        "The paper trains language models of up to 610 million parameters on billions of tokens; digits are an "
        "easy task, training losses here come near zero, and ratios of such losses are large. What carries over is "
        "where the best rate lies. Studies on text are in docs/results/scaling.md."
    )
    details = (
        "In the standard parametrization (SP) and in μP the signal fades with every weight that goes, and the best "
        "rate moves up. SμPar makes initial weights and rates of a sparse layer larger by its density, so that the "
        "curves lie on each other below the optimum."
    )

    def __init__(self, record: Record, folder: Path) -> None:
        """With the sparsest net: its rows by rule, and its density in words."""
        super().__init__(record, folder)
        self.work = WORKS[self.scale]
        least = min(density for _, density in places(self.work))
        self.lowest = place_label(self.work.widths[0], least, widths=1)
        self.sparsest = keyed((row for row in self.study.table("transfer") if row["density"] == least), "rule")

    @cached_property
    def results(self) -> dict[Cell, Row]:
        """What every run gave."""
        results = {}
        for row in self.record.table("transfer_runs"):
            cell = {name: row[name] for name in Cell.__dataclass_fields__}
            results[Cell(**cell)] = {name: value for name, value in row.items() if name not in cell}
        return results

    @cached_property
    def study(self) -> Record:
        """The chapter's runs as the record of a study of their own, with the tables that ``sparing transfer`` makes."""
        own = Record(question="", settings=self.work, seed=self.record.seed, environment={})
        analyse(own, self.work, self.results)
        own.rows += [row for row in self.record.rows if row["table"] in {"coordinates", "slopes"}]
        return own

    @property
    def rows(self) -> list[Row]:
        """Best rate and both losses of every rule and density."""
        best = {(row["rule"], row["density"]): row["best"] for row in self.study.table("optima")}
        return [
            {
                "rule": TITLES[row["rule"]], "density": place_label(row["width"], row["density"], widths=1),
                "best_rate": None if (x := best[row["rule"], row["density"]]) is None else 2.0**x,
                "loss_transferred": row["loss_transferred"], "loss_retuned": row["loss_retuned"],
            }
            for row in self.study.table("transfer")
        ]  # fmt: skip

    @cached_property
    def sweeps(self) -> Sweeps:
        """Losses by run."""
        return Sweeps(self.work, self.results)

    def moves(self, rule: RuleName) -> tuple[list[float], bool]:
        """How far a rule's best rate moves from dense to sparsest, by seed (octaves), and whether one is a bound."""
        reference, *_, sparsest = lines(self.work)[0].places
        found, bound = [], False
        for seed in self.work.seeds:
            drift = self.sweeps.drift(rule, sparsest, reference, [seed])
            found.append(math.nan if drift is None else abs(drift))
            bound |= any(self.sweeps.best(rule, at, [seed]).censored for at in (reference, sparsest))
        return found, bound

    def move(self, rule: RuleName) -> Difference:
        """The factor by which a rule's best rate moves, with its interval over seeds."""
        found, bound = self.moves(rule)
        return Difference.of([math.log(2) * each for each in found], "×", bound=bound)

    @cached_property
    def farther(self) -> Difference:
        """How many times as far SP's best rate moves as SμPar's, paired by seed."""
        (plain, bound), (ours, unknown) = self.moves("sp"), self.moves("supar")
        # with a bound below the line the ratio is not even a bound
        gaps = [math.nan if unknown else math.log(2) * (one - other) for one, other in zip(plain, ours, strict=True)]
        return Difference.of(gaps, "×", bound=bound)

    def above(self, rule: RuleName, *, retuned: bool = False) -> Difference:
        """Loss of a rule over SμPar's at the sparsest place, by seed: at the dense net's rate, or each at its best."""
        reference, *_, sparsest = lines(self.work)[0].places

        def loss(which: RuleName, seed: int) -> float:
            curve = self.sweeps.curve(which, sparsest, seed)
            return min(curve.values()) if retuned else curve.get(self.sweeps.best(which, reference).grid, math.nan)

        return Difference.of_ratios([loss(rule, seed) / loss("supar", seed) for seed in self.work.seeds])

    def answer(self) -> str:
        """How far best rates move, and what the dense net's costs the sparsest one under each rule."""
        losses = {rule: format_number(row["loss_transferred"]) for rule, row in self.sparsest.items()}
        others = ", ".join(f"{TITLES[rule]} {loss}" for rule, loss in losses.items() if rule != "supar")
        ours, plain = self.move("supar"), self.move("sp")
        return (
            f"Under **SμPar** the best rate moves by **{ours.text}** {ours.interval}, in the standard parametrization "
            f"by {plain.text} {plain.interval}; SP's move over SμPar's: **{self.farther.whole}**. With {self.lowest} "
            "of the weights, at the rate that was best for the dense net, SμPar ends at a training loss of "
            f"**{losses['supar']} nat**; {others}."
        )

    def story(self) -> str:
        """One net, many rates, three rules."""
        n = len(self.work.seeds)
        seeds = f", with {n} seeds of weights, masks and rows" if n > 1 else ""
        return (
            f"The same net is trained on handwritten digits at {len(self.work.log2_rates)} learning rates{seeds}, with "
            f"all and with fewer of its hidden weights, down to {self.lowest}; {len(self.study.table('runs'))} runs in "
            "all. Three rules say how initial weights and rates go with size: the standard one (SP), μP, which knows "
            "of width, and SμPar, which knows of sparsity too."
        )

    def pays(self) -> str:
        """A sparse net with enough live inputs."""
        live = round(self.work.widths[0] * min(density for _, density in places(self.work)))
        return (
            f"A sparse net with about 16 live inputs a neuron or more (here {live}) takes the dense net's rate, and no "
            f"search of its own: loss of SP over that of SμPar at that rate, {self.above('sp').whole}; of μP, "
            f"{self.above('mup').whole}."
        )

    def fails(self) -> str:
        """Few live inputs, and re-tuned rivals."""
        return (
            "With four live inputs a neuron SμPar over-corrects and needs a search as well; and where every rule is "
            "searched anew, little is left between them (docs/results/scaling.md)."
        )

    def card(self) -> Number:
        """How far the best rate moves, SP beside SμPar."""
        ours, plain, farther = self.move("supar"), self.move("sp"), self.farther
        return Number(
            value=farther.headline,
            label=f"how far the best learning rate moves from dense to {self.lowest} of the weights: the standard rule "
            "(SP) over SμPar",
            interval=farther.beside("seeds"),
            control=f"SP {plain.text}, SμPar {ours.text}",
        )  # fmt: skip

    def brief(self) -> str:
        """The finding in a line."""
        return f"best rate moves, SP over SμPar: {self.farther.headline}"

    def numbers(self) -> list[Number]:
        """How far SμPar's rate moves, and what the dense net's costs."""
        ours, more, lost = self.move("supar"), self.above("sp"), format_number(self.sparsest["sp"]["loss_transferred"])
        return [
            Number(
                value=ours.text, interval=ours.interval,
                label=f"move of the best rate under SμPar, dense to {self.lowest}",
                control=f"μP {self.move('mup').text} {self.move('mup').interval}",
            ),
            Number(
                value=more.headline,
                label=f"training loss of SP over SμPar's at {self.lowest}, both at the dense net's rate",
                interval=more.beside(),
                control=f"SμPar {format_number(self.sparsest['supar']['loss_transferred'])} nat, SP {lost}",
            ),
        ]  # fmt: skip

    def licences(self) -> list[tuple[str, str]]:
        """The images."""
        return [licence_of("digits")]

    def claims(self) -> list[tuple[str, str, str]]:
        """Where the best rate lies, and the losses."""
        moved = {rule: f"{self.move(rule).text} {self.move(rule).interval}" for rule in self.work.rules}
        even = "near 2⁻⁶ at every density down to 1/64 (Figure 6)"
        used, anew = (
            "; ".join(f"{TITLES[rule]} over SμPar {self.above(rule, retuned=retuned).whole}" for rule in ("sp", "mup"))
            for retuned in (False, True)
        )
        return [
            ("SμPar's best rate from dense to sparsest", even, f"moves {moved['supar']}"),
            (
                "best rate of SP and of μP", "climbs with sparsity, in μP more abruptly (Figure 6)",
                f"moves {moved['sp']}; {moved['mup']}",
            ),
            (
                "loss of SμPar below SP's and μP's, the dense rate re-used",
                "11.9 % and 1.9 %, validation, density 1/128 (Figure 3; SP untuned)",
                f"training, {self.lowest}: {used}",
            ),
            (
                "the same, every rule re-tuned", "0.8 % and 2.1 %, mean over densities (Figure 8)",
                f"training, {self.lowest}: {anew}",
            ),
        ]  # fmt: skip

    def figures(self) -> list[Figure]:
        """Best rate over density, or the losses where no rate is known; curves, losses and sizes."""
        line, width = lines(self.work)[0].name, f"width {self.work.widths[0]}"
        known = sorted(places(self.work), key=lambda place: -place[1])
        losses = figures.pareto_figure(self.study, line, "density")
        curves = {rule: figures.curves(self.study, rule, known, name=width) for rule in self.work.rules}
        top = figures.drift_figure(self.study, line, "density")
        if top is not None:
            ours, plain = self.move("supar").text, self.move("sp").text
            title = f"From dense to {self.lowest} SμPar's best rate moves {ours}, SP's {plain}"
            caption = f"{top.caption} Lines: of mean curves; the title is the mean over seeds."
            top = replace(top, title=title, caption=caption)
        top = top or losses or curves["supar"]
        drawn = (top, *curves.values(), losses, figures.coordinate_figure(self.study))
        return [figure for figure in drawn if figure is not None]

    def tables(self) -> list[Table]:
        """Rules and densities."""
        note = "loss transferred: at the dense net's best rate; loss retuned: at this row's own best. Means over seeds."
        return [Table(self.rows, "Rules and densities", UNITS, COLUMNS, note=note, roles=ROLES)]
