"""SμPar transferred against SμPar, SP and μP re-tuned, on a language model that has passed its bigram.

The text is 8 MB of wiki articles in 512 byte pairs. A dense Llama of two blocks and width 128 is tuned by 32 random
draws of rate, initial scale, α_in and α_out, 500 steps of 1,024 tokens each. Then a Llama of width 256 takes 1,500
steps at densities from 1 to 1/64 with the scale and the multipliers of the best draw:

- every rule at every density has a sweep of rates by octaves, two seeds, which begins with five and widens until the
  best lies inside; octave 0 is the best draw's own rate, what SμPar transfers;
- SP gets more: a search of its embedding's multiplier by factors of four at its best rate, and of the rate again at
  the multiplier found. Its matrices keep the scale of the base, as SP has it;
- the model without its blocks has a sweep too, as a control;
- a third seed judges what was chosen, and SμPar at the transferred rate.

Everything is chosen by training loss, the mean of the last tenth, and judged on held-out text; a run draws 1.5 of 2.6
million tokens at random.

``python -m benchmarks.scaling_transfer.study`` goes on where it stopped; start it once per core. ``--list`` says what
is left, and about how long it takes.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from benchmarks import onednn
from benchmarks.layers import rates
from benchmarks.layers.store import Row, Rows, Store, work
from sparing.data import cache_directory
from sparing.jobs.lm.controls import ngram_losses
from sparing.jobs.settings import RuleName
from sparing.jobs.transfer.draws import draw_of, of_draws
from sparing.jobs.transfer.inputs import Tokens, gather
from sparing.jobs.transfer.settings import Cell, Transfer, Tuning
from sparing.jobs.transfer.train import train
from sparing.report import Progress

RESULT = Path(__file__).parents[1] / "results" / "scaling_transfer.json"
COMMAND = "python -m benchmarks.scaling_transfer.study"
Who = Literal["no body", "supar", "sp", "mup"]

TARGET = Transfer(
    family="llama", data="enwik8", first=8_000_000, tokenizer="bpe", vocabulary=512, layers=2, length=128, batch=8,
    base_width=128, widths=(256,), least_live=4, steps=1500, seeds=(0, 1), coordinates=False,
    tune=Tuning(tries=32, steps=500),
)  # fmt: skip
DENSITIES = ("1", "1/4", "1/16", "1/64")
CENTRES = {"1/4": 1, "1/16": 2, "1/64": 2}
"""Octave at the middle of the first five rates of SP and μP, whose best rate rises; elsewhere 0."""
FACTOR = 4
"""Between the embedding multipliers that SP tries."""
PRICES = {"draw": 29.0, "no body": 21.0, "1": 247.0, "1/4": 145.0, "1/16": 100.0, "1/64": 98.0}
"""CPU seconds of a run, from 10 steps of each on one busy thread of an AMD EPYC (Zen 4)."""


@dataclass(frozen=True)
class Job:
    """One row to make: a draw on the base, or a run of the target."""

    key: str
    who: Who | Literal["draw", "text"]
    density: str = "1"
    octave: int = 0
    """Rate over the best draw's (log2)."""
    embed: int = 0
    """Multiplier of the embedding over the best draw's (powers of ``FACTOR``)."""
    seed: int = 0
    """Of weights, masks and batches; of a draw, its number."""


Place = tuple[Who, str]
PLACES: tuple[Place, ...] = (
    ("no body", "1"), *(("supar", one) for one in DENSITIES), *(("sp", one) for one in DENSITIES),
    *(("mup", one) for one in DENSITIES[1:]),
)  # fmt: skip
"""What is swept; a dense net is the same under μP and SμPar."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is trained, and what is compared."""

    target: Transfer = TARGET
    places: tuple[Place, ...] = PLACES
    judge: int = 2
    """The third seed."""

    @functools.cached_property
    def prefix(self) -> str:
        """What the names of all rows begin with: rows of another model are not rows of this study."""
        of = self.target
        sizes = f"{of.base_width} to {of.widths[0]}, {of.vocabulary} pairs of {of.data}"
        return f"{of.family} {sizes}, {of.tune.steps} and {of.steps} steps | "

    def text(self) -> Job:
        """Counts of n-grams."""
        return Job(self.prefix + "text", "text")

    def draw(self, number: int) -> Job:
        """A draw on the base."""
        return Job(f"{self.prefix}draw {number}", "draw", seed=number)

    def run(self, base: int, place: Place, octave: int, embed: int, seed: int) -> Job:
        """A run of the target by a draw."""
        who, density = place
        scale = f" | embedding {FACTOR}^{embed:+d}" if embed else ""
        key = f"{self.prefix}draw {base} | {who} | {density} | 2^{octave:+d}{scale} | seed {seed}"
        return Job(key, who, density, octave, embed, seed)

    def plan(self, rows: Rows) -> list[Job]:
        """What can be done now."""
        return Seen(self, rows).plan()

    def measure(self, job: Job) -> Row:
        """Make a row."""
        inputs = material(self.target)
        if job.who == "text":
            before, after = inputs.held_out[:, :-1], inputs.held_out[:, 1:]
            found = ngram_losses(inputs.train, before, after, vocabulary=inputs.outputs)
            return {"who": "text", "tokens": len(inputs.train), "vocabulary": inputs.outputs} | found
        if job.who == "draw":
            own = of_draws(self.target)
            drawn = draw_of(self.target, job.seed)
            cell = Cell("mup", own.base_width, 1.0, 0.0, self.target.seeds[0])
            return {"who": "draw", "draw": job.seed} | asdict(drawn) | kept(train(own, inputs, cell, drawn))
        bare, density = job.who == "no body", float(Fraction(job.density))
        rule: RuleName = "mup" if job.who == "no body" else job.who
        base = draw_of(self.target, int(job.key.removeprefix(self.prefix).split(" ")[1]))
        draw = replace(base, log2_input=base.log2_input + job.embed * math.log2(FACTOR))
        # the same to rounding, and about twice as fast from 1/4 on
        own = replace(self.target, backend="dense" if density == 1 else "csr")
        cell = Cell(rule, own.widths[0], density, float(job.octave), job.seed)
        row = {name: value for name, value in asdict(job).items() if name != "key"}
        return row | kept(train(own, inputs, cell, draw, bare=bare))


@dataclass(frozen=True)
class Seen:
    """A study and the rows that are there: what is chosen, and what is left."""

    study: Study
    rows: Rows

    # ---- what is there

    @functools.cached_property
    def own(self) -> dict[str, Row]:
        """The rows of this study."""
        return {key: row for key, row in self.rows.items() if key.startswith(self.study.prefix)}

    @functools.cached_property
    def draws(self) -> dict[int, float]:
        """Draw -> training loss, infinite where it diverged."""
        return {row["draw"]: loss_in(row) for row in self.own.values() if row["who"] == "draw"}

    @functools.cached_property
    def base(self) -> int | None:
        """The draw that all runs go by; None until all are done."""
        tries = range(self.study.target.tune.tries)
        known = {number: self.draws[number] for number in tries if number in self.draws}
        return min(known, key=known.__getitem__) if len(known) == len(tries) else None

    @functools.cached_property
    def _settings(self) -> dict[tuple[Place, int, int], dict[int, Row]]:
        """Place, octave and multiplier -> seed -> row, of the runs by the best draw."""
        found: dict[tuple[Place, int, int], dict[int, Row]] = {}
        for key, row in self.own.items():
            if key.startswith(f"{self.study.prefix}draw {self.base} | "):
                setting = (row["who"], row["density"]), row["octave"], row["embed"]
                found.setdefault(setting, {})[row["seed"]] = row
        return found

    def runs(self, place: Place, octave: int, embed: int = 0, what: str = "loss") -> dict[int, float]:
        """Seed -> training loss of one setting, or another column; infinite where a run diverged."""
        return {seed: loss_in(row, what) for seed, row in self._settings.get((place, octave, embed), {}).items()}

    def curve(self, place: Place, embed: int = 0) -> dict[int, float]:
        """Octave -> mean training loss over the seeds that choose, of the settings that are done on both."""
        seeds, found = self.study.target.seeds, {}
        for at, octave, scale in self._settings:
            known = self.runs(place, octave, embed)
            if (at, scale) == (place, embed) and all(seed in known for seed in seeds):
                found[octave] = fmean(known[seed] for seed in seeds)
        return found

    def swept(self, place: Place) -> int | None:
        """The best octave at the base's multiplier; None while the sweep goes on."""
        found = self.curve(place)
        return None if rates.asked(centre_of(place), found) else rates.best(found)

    def embedding(self, place: Place) -> dict[int, float]:
        """Multiplier -> training loss of SP at its swept rate, on the first seed."""
        octave, seed = self.swept(place), self.study.target.seeds[0]
        tried = {e: self.runs(place, at, e) for where, at, e in self._settings if (where, at) == (place, octave)}
        return {embed: found[seed] for embed, found in tried.items() if seed in found}

    def chosen(self, place: Place) -> tuple[int, int] | None:
        """Octave and multiplier at which a place is judged; None while it is searched."""
        octave = self.swept(place)
        if place[0] != "sp" or octave is None:
            return None if octave is None else (octave, 0)
        tried = self.embedding(place)
        if uphill(tried, 0):
            return None
        if (embed := rates.best(tried)) == 0:
            return octave, 0
        again = self.curve(place, embed)
        if uphill(again, octave):
            return None
        other = rates.best(again)
        # the multiplier was chosen on one seed: in the mean over both it must be better
        return (other, embed) if again[other] < self.curve(place)[octave] else (octave, 0)

    # ---- what to do

    def plan(self) -> list[Job]:
        """What can be done now: all draws first, then every place, then the third seed."""
        draws = [self.study.draw(number) for number in range(self.study.target.tune.tries)]
        asked = [self.study.text(), *draws]
        if self.base is not None:
            asked += [job for place in self.study.places for job in self._asked(self.base, place)]
        return [job for key, job in {job.key: job for job in asked}.items() if key not in self.rows]

    def _asked(self, base: int, place: Place) -> Iterator[Job]:
        """Runs of one place."""
        octave, first = self.swept(place), self.study.target.seeds[0]
        if octave is None:
            yield from self._both(base, place, rates.asked(centre_of(place), self.curve(place)))
            return
        picked = self.chosen(place)
        if picked is None:
            tried = self.embedding(place)
            if more := uphill(tried, 0):
                yield from (self.study.run(base, place, octave, embed, first) for embed in more)
                return
            embed = rates.best(tried)
            yield from self._both(base, place, uphill(self.curve(place, embed), octave), embed)
            return
        wanted = {picked} | ({(0, 0)} if place[0] == "supar" else set())
        yield from (self.study.run(base, place, *one, self.study.judge) for one in sorted(wanted))

    def _both(self, base: int, place: Place, octaves: Sequence[int], embed: int = 0) -> Iterator[Job]:
        for seed in self.study.target.seeds:
            yield from (self.study.run(base, place, octave, embed, seed) for octave in octaves)

    def left(self) -> list[str]:
        """Kinds of the runs that are left if no sweep widens and no other multiplier is better, as ``PRICES`` has."""
        found = [kind_of(job.who, job.density) for job in self.plan() if job.who != "text"]
        for place in self.study.places:
            kind, first = kind_of(*place), len(rates.FIRST) * len(self.study.target.seeds)
            found += [kind] * first if self.base is None else []
            if self.base is None or self.swept(place) is None:
                found += [kind] * (1 + 2 * (place[0] == "sp") + (place[0] == "supar"))
            elif self.chosen(place) is None:
                found += [kind]
        return found

    def hours_left(self) -> float:
        """CPU hours of what is left, by the mean seconds of the rows that are there, else by ``PRICES``."""
        known: dict[str, list[float]] = {}
        for row in self.own.values():
            if "seconds" in row:
                known.setdefault(kind_of(row["who"], row.get("density", "")), []).append(row["seconds"])
        return sum(fmean(known.get(kind, [PRICES[kind]])) for kind in self.left()) / 3600

    def listing(self) -> str:
        """How far the study is, and about how long the rest takes."""
        spent = sum(row.get("seconds", 0.0) for row in self.own.values()) / 3600
        left = f"about {len(self.left())} runs and {self.hours_left():.2f} CPU h left if no sweep widens"
        return f"{len(self.own)} rows, {spent:.2f} CPU h; {left}"


def kept(result: Mapping[str, Any]) -> Row:
    """What a row keeps of a run."""
    names = ("loss", "held_out_loss", "diverged", "live")
    return {name: result[name] for name in names} | {"seconds": round(result["seconds"], 1)}


def loss_in(row: Row, what: str = "loss") -> float:
    """A loss of a row; infinite where the run diverged."""
    value = row[what]
    return math.inf if row["diverged"] or value is None else float(value)


def centre_of(place: Place) -> int:
    """The middle of the first five rates of a place (octaves)."""
    return CENTRES.get(place[1], 0) if place[0] in {"sp", "mup"} else 0


def uphill(found: Mapping[int, float], start: int) -> list[int]:
    """Neighbours of the best value that were not tried; the start where it was not.

    Example:
        >>> uphill({}, 3), uphill({3: 2.0, 4: 1.0}, 3), uphill({3: 2.0, 4: 1.0, 5: 1.5}, 3)
        ([3], [5], [])
    """
    if start not in found:
        return [start]
    at = rates.best(found)
    return [one for one in (at - 1, at + 1) if one not in found]


def kind_of(who: str, density: str) -> str:
    """What a run costs like."""
    return who if who in {"draw", "no body"} else density


@functools.cache
def material(target: Transfer) -> Tokens:
    """The tokens that all runs read."""
    found = gather(target)
    assert isinstance(found, Tokens)
    return found


def run(study: Study, store: Store, measure: Callable[[Job], Row] | None = None) -> None:
    """Do what is missing, with a bar."""
    seen = Seen(study, store.rows())
    done = len(seen.own)
    with Progress("scaling_transfer", total=done + len(seen.left()), unit="run", resume_at=done) as bar:

        def told(rows: Rows) -> None:
            now = Seen(study, rows)
            bar.total = len(now.own) + len(now.left())
            bar.advance(len(now.own) - bar.done)

        work(store, study.plan, measure or study.measure, told)


def store_of(path: Path = RESULT) -> Store:
    """The rows, and the claims of those who make them."""
    return Store(path, command=COMMAND, folder=cache_directory() / "scaling_transfer")


def main() -> None:
    """Do what is missing, or say what it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what is left")
    parser.add_argument("--out", type=Path, default=RESULT, help="the file of rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    onednn.use()
    store, study = store_of(options.out), Study()
    if options.list:
        print(Seen(study, store.rows()).listing())
    else:
        run(study, store)


if __name__ == "__main__":
    main()
