"""Arms beside each other: each at the rate that its development rows choose, judged once on test rows, seed by seed.

Every arm takes 100 steps of 4 rows of 128 tokens. Its sweep begins with five rates at half octaves and goes on until
the best lies inside; a seed of its own, which judges nothing, and the development rows choose. Then eight seeds are
judged on the test rows, and five on ladder 2, where a run takes ten times as long. Seeds order the rows, draw the
blocks and begin the adapters, the same for all arms, so that differences are paired.

``python -m benchmarks.layers.study`` goes on where it stopped. ``--worker`` says that others may be at work on the same
list, which is always so: start it once per core. ``--ladder 2`` confirms on SmolLM2-135M what won on ladder 1, and
``--corpus`` on another text. ``--list`` says what is left and about how long it takes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import torch
from torch import nn

from benchmarks import onednn
from benchmarks.choices import log_likelihoods, marks_of
from benchmarks.layers import base, rates
from benchmarks.layers.arms import ARMS, Arm, bytes_of, last, rate_of, trainable
from benchmarks.layers.store import Row, Rows, Store, work
from benchmarks.layers.texts import CORPORA, rows_of
from benchmarks.layers.texts import Rows as Parts
from sparing.data import fetch
from sparing.jobs.finetune.loop import UNITS, train
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import start
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import held_out_loss
from sparing.jobs.lm.models import load_model, load_tokenizer
from sparing.jobs.lm.packing import Packed
from sparing.jobs.step import DivergedError
from sparing.report import Progress, Record

PACE: Mapping[str, Any] = {"steps": 100, "batch": 4, "accumulate": 1, "warmup": 5}
SWEEP_SEED, SEEDS = 100, tuple(range(8))
CORPUS, SMOLLM = "bryant-stories", "smollm2-135m-instruct"
MEASURED = 16
"""Rows that are measured at once (count)."""


@dataclass(frozen=True)
class Job:
    """One row to make."""

    key: str
    kind: Literal["price", "dev", "test"]
    arm: Arm
    half: int = 0
    """Rate, in half octaves."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model, a text, and what is compared on them."""

    name: str
    of: str
    """The model's own name: rows of another model are not rows of this study."""
    load: Callable[[], nn.Module]
    tokenizer: Callable[[], Any]
    arms: Sequence[Arm] = ARMS
    corpus: str = CORPUS
    seeds: tuple[int, ...] = SEEDS
    pace: Mapping[str, Any] = field(default_factory=lambda: PACE)
    shift: int = 0
    """Half octaves from the first guesses of ladder 1 to those of this model."""

    @property
    def prefix(self) -> str:
        """What the names of all rows begin with."""
        return f"{self.name} | {self.of} | {self.corpus} | "

    @property
    def weights(self) -> str:
        """What names the weights that runs begin with."""
        return digest_of(self.load)

    def key(self, arm: Arm, kind: str, half: int = 0, seed: int = 0) -> str:
        """Name of a row."""
        words = (
            [arm.name, kind] if kind == "price" else [arm.name, kind, f"2^{half / 2:g}", f"seed {seed}", self.weights]
        )
        return self.prefix + " | ".join(words)

    def own(self, rows: Rows) -> list[Row]:
        """The rows of this study's arms."""
        names = {arm.name for arm in self.arms}
        return [row for key, row in rows.items() if key.startswith(self.prefix) and row["arm"] in names]

    def asked(self, arm: Arm, found: Mapping[int, float]) -> list[int]:
        """Rates to try next."""
        return rates.asked(arm.centre + self.shift, found)

    def swept(self, rows: Rows, arm: Arm, weights: str | None = None) -> dict[int, float]:
        """Rate (half octaves) -> development loss, of a sweep that is done, else of the rates that have been tried.

        All of one sweep began with the same weights: those given, or where it has gone farthest.
        """
        found = self.sweeps(rows, arm)
        done = self.swept_on(rows, arm)
        if done is not None or weights is not None:
            return found.get(done or weights or "", {})
        return max(found.values(), key=len, default={})

    def swept_on(self, rows: Rows, arm: Arm) -> str | None:
        """The weights that a sweep which is done began with; none while it goes on."""
        return next((at for at, sweep in self.sweeps(rows, arm).items() if not self.asked(arm, sweep)), None)

    def sweeps(self, rows: Rows, arm: Arm) -> dict[str, dict[int, float]]:
        """Weights -> rate (half octaves) -> development loss, of all that has been tried."""
        asked, found = (arm.name, "dev", SWEEP_SEED), dict[str, dict[int, float]]()
        for row in self.own(rows):
            if (row["arm"], row["kind"], row.get("seed")) == asked:
                loss = math.inf if row["dev"] is None else row["dev"]
                found.setdefault(row["weights"], {})[row["half"]] = loss
        return found

    def source(self, arm: Arm) -> Arm:
        """The arm whose sweep an arm's rate comes from."""
        return next(one for one in self.arms if one.name == (arm.like or arm.name))

    def chosen(self, rows: Rows, arm: Arm) -> int | None:
        """The rate of an arm; none while its sweep goes on."""
        if arm.method is None:
            return 0
        source = self.source(arm)
        found = self.swept(rows, source)
        return None if self.asked(source, found) else rates.best(found)

    def plan(self, rows: Rows) -> list[Job]:
        """What can be done now: prices, sweeps, then whole seeds over all arms, each seed from the same weights."""
        jobs = [Job(self.key(arm, "price"), "price", arm) for arm in self.arms]
        for arm in self.arms:
            if arm.method is not None and not arm.like:
                halves = self.asked(arm, self.swept(rows, arm, self.weights))
                jobs += [self._run(arm, "dev", half, SWEEP_SEED) for half in halves]
        return self.missing(rows, [*jobs, *self.whole(rows, "test", self.seeds)])

    def whole(self, rows: Rows, kind: Literal["dev", "test"], seeds: Sequence[int]) -> list[Job]:
        """Seeds that not all arms with a rate have run from the same weights, from those that are there now."""
        settled = [(arm, half) for arm in self.arms if (half := self.chosen(rows, arm)) is not None]
        varied = [pair for pair in settled if self.varies(pair[0])]
        there = [row for row in self.own(rows) if row["kind"] == kind]
        have = {(row["arm"], row["half"], row["seed"], row["weights"]) for row in there}
        begun, jobs = {row["weights"] for row in there}, list[Job]()
        for seed in seeds:
            needed = [(arm.name, half, seed) for arm, half in varied]
            if not any(all((*one, weights) in have for one in needed) for weights in begun):
                jobs += [self._run(arm, kind, half, seeds[0]) for arm, half in settled if not self.varies(arm)]
                jobs += [self._run(arm, kind, half, seed) for arm, half in varied]
        return jobs

    def missing(self, rows: Rows, jobs: Sequence[Job]) -> list[Job]:
        """Jobs whose row is not there, each once."""
        return [job for key, job in {job.key: job for job in jobs}.items() if key not in rows]

    def varies(self, arm: Arm) -> bool:
        """Whether a seed changes anything."""
        return arm.method is not None

    def _run(self, arm: Arm, kind: Literal["dev", "test"], half: int, seed: int) -> Job:
        return Job(self.key(arm, kind, half, seed), kind, arm, half, seed)

    def count(self, rows: Rows) -> tuple[int, int]:
        """Rows that are there, and those that the whole study takes if no other sweep widens."""
        done, waiting = len(self.own(rows)), [arm for arm in self.arms if self.chosen(rows, arm) is None]
        return done, done + len(self.plan(rows)) + len(waiting) * len(self.seeds)

    def measure(self, job: Job) -> Row:
        """Make a row."""
        weights = self.load()
        model, rows = copy.deepcopy(weights).to(job.arm.dtype), rows_of(self.corpus, self.tokenizer())
        about = {"arm": job.arm.name, "family": job.arm.family, "kind": job.kind, "weights": self.weights}
        if job.kind == "price":
            found = {"bytes": bytes_of(model, job.arm, rows.train, pace=self.pace)}
            return about | found | {"trainable": trainable(model, job.arm, rows.train, pace=self.pace)}
        row: Row = about | {"half": job.half, "rate": rate_of(job.half), "seed": job.seed}
        began = time.process_time()
        try:
            if job.arm.method is not None:
                training = job.arm.training(model, rows.train, rate=row["rate"], seed=job.seed, pace=self.pace)
                losses = tuned(model, training, rows.train, job.arm)
                row["train"] = round(fmean(losses[-10:]), 5)
            row["seconds"] = round(time.process_time() - began, 2)
            row |= {"dev": loss_on(model, rows.dev)} if job.kind == "dev" else self.judge(model, rows, job.seed)
        except DivergedError:
            row |= {"dev": None, "test": None, "old": None, "seconds": round(time.process_time() - began, 2)}
        return row

    def judge(self, model: nn.Module, rows: Parts, seed: int) -> Row:
        """Losses on what judges and on the old text, and how many items are answered rightly, of a tuned model."""
        row = {"test": loss_on(model, rows.test), "old": loss_on(model, rows.old)}
        marks = marks_of([log_likelihoods(model, self.tokenizer(), item) for item in rows.items], rows.items)
        return row | {name: fmean(right) for name, right in marks.items() if right}


def loss_on(model: nn.Module, rows: Packed) -> float:
    """Mean loss of held-out rows (nat per token).

    Raises:
        DivergedError: If it is not finite.
    """
    loss, _ = held_out_loss(model, rows, batch=MEASURED)
    if not math.isfinite(loss):
        raise DivergedError("a loss is not finite")
    return loss


@functools.cache
def digest_of(load: Callable[[], nn.Module]) -> str:
    """What names the weights a row began with: machines of another kind pretrain to others, by rounding."""
    found = hashlib.sha256()
    for name, weight in load().state_dict().items():
        found.update(name.encode() + weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def tuned(model: nn.Module, training: Training, rows: Packed, arm: Arm) -> list[float]:
    """Fine-tune a model by the library's loop, adapters merged at the end; its training losses (nat)."""
    record = Record(question="", settings={}, seed=training.seed, units=dict(UNITS))
    with start(model, training, rows=rows.rows, make_stepper=arm.stepper) as state:
        train(state, rows, record, label="", quiet=True)
    if isinstance(training.method, Lora):
        state.model.merge_and_unload()  # type: ignore[operator]
    return [row["loss"] for row in record.table("train")]


@functools.cache
def _ours() -> nn.Module:
    return base.load()


@functools.cache
def _tokens() -> Any:
    return base.tokenizer_of(base.RECIPE)


@functools.cache
def _smollm() -> nn.Module:
    return load_model(fetch(SMOLLM), dtype=torch.float32)


@functools.cache
def _smollm_tokens() -> Any:
    return load_tokenizer(fetch(SMOLLM))


LADDER_1 = Study(name="ladder 1", of=base.RECIPE.folder.name, load=_ours, tokenizer=_tokens)
LADDER_2 = Study(
    name="ladder 2", of=SMOLLM, load=_smollm, tokenizer=_smollm_tokens, seeds=SEEDS[:5], shift=-4
)  # rates that `benchmarks.lowbit_quality` found for it are a quarter of those of ladder 1


PEERS = ("no training", "full", "LoRA, rank 8", "LISA", "LoRA, rank 64", "embedding and head only")
"""What every text compares."""


def elsewhere() -> list[Arm]:
    """What other texts compare: peers, and the last blocks, which the search put first."""
    return [*(arm for arm in ARMS if arm.name in PEERS), *ENDS]


ENDS = (last(3, of=16, centre=-20), last(9, of=16, centre=-20, embed=False))
"""As many blocks of ladder 1 as fit the bytes of LoRA of rank 8, embedding and head on, or the head alone."""
LAST = (last(3, of=30, centre=-20), last(12, of=30, centre=-20, embed=False, head=False))
"""What the search put first (``benchmarks.layers.search``), as ladder 2 has it, and as many blocks as fit the bytes of
LoRA of rank 8 where its one table, which is embedding and head, is frozen."""
RIVALS = ("no training", "full", "LoRA, rank 8", "LoRA, rank 64", "LISA")


def confirmed() -> Study:
    """Ladder 2."""
    return replace(LADDER_2, arms=[*(arm for arm in ARMS if arm.name in RIVALS), *LAST])


def study_of(options: argparse.Namespace) -> Study:
    """The study that the options mean."""
    study = LADDER_1 if options.ladder == 1 else confirmed()
    arms = elsewhere() if options.ladder == 1 and options.corpus != CORPUS else study.arms
    chosen = [arm for arm in arms if arm.name in options.arms] if options.arms else arms
    return replace(study, arms=chosen, corpus=options.corpus)


def run(study: Study, store: Store) -> None:
    """Do what is missing, with a bar."""
    done, total = study.count(store.rows())
    with Progress(f"{study.name}, {study.corpus}", total=total, unit="row", resume_at=done) as bar:

        def told(rows: Rows) -> None:
            now, bar.total = study.count(rows)
            bar.advance(now - bar.done)

        work(store, study.plan, study.measure, told)


def listing(study: Study, rows: Rows) -> str:
    """What is done and left, and about how long it takes (CPU hours)."""
    done, total = study.count(rows)
    seconds = [row["seconds"] for row in study.own(rows) if "seconds" in row]
    hours = fmean(seconds) * (total - done) / 3600 if seconds else math.nan
    return f"{study.name}, {study.corpus}: {done} of {total} rows, {sum(seconds) / 3600:.2f} CPU h, {hours:.2f} left"


def command(doc: str | None, *studies: Callable[[Rows], Study]) -> None:
    """Do what is missing of some studies, one after the other, or say what it is (``--list``)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what is left")
    options = parser.parse_args()
    torch.set_num_threads(1)
    onednn.use()
    store = Store()
    for made in studies:
        study = made(store.rows())
        if options.list:
            print(listing(study, store.rows()))
        else:
            run(study, store)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help="one of several; start one per core")
    parser.add_argument("--ladder", type=int, choices=(1, 2), default=1)
    parser.add_argument("--corpus", choices=CORPORA, default=CORPUS)
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], help="these alone, to have them first")
    parser.add_argument("--list", action="store_true", help="say what is left")
    return parser.parse_args()


def main() -> None:
    """Do what is missing, or say what it is."""
    options = parse()
    torch.set_num_threads(1)
    onednn.use()
    store = Store()
    study = study_of(options)
    if options.list:
        print(listing(study, store.rows()) if options.ladder == 2 or base.made() else base.state_of(base.RECIPE))
    else:
        run(study, store)


if __name__ == "__main__":
    main()
