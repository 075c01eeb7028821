"""Loss and downstream accuracy against density, with a learning rate that was tuned on a small dense model.

Run ``python -m benchmarks.pretrain_pareto`` (about half an hour of CPU time on one core; every run is kept as it is
done, so the same command goes on after an interruption). The paper's Figure 3 and Table 2 in miniature: a Llama of
width 128 learns the prose of wiki articles at densities from 1 to 1/32. Rates go by octaves, and are chosen on the
validation text alone:

- transferred: the best rate of the dense base of width 64, mean over the seeds, serves every rule and density;
- re-tuned: SP and SμPar look for the best rate anew at every density, on the first seed, from the transferred rate
  downhill until both neighbours are worse.

The test text is used once a model is chosen. Every model is exported as a transformers checkpoint, which is measured
and marked on multiple-choice items made of the test text, as ``benchmarks/choices.py`` says. The models of the first
seed are marked by lm-evaluation-harness too, where it is installed; ``--no-harness`` leaves it out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.choices import CONTINUATION, PASSAGE, Item, harness_marks, items_of, log_likelihoods, marks_of
from sparing.jobs.lm.corpus import read_text
from sparing.jobs.pretrain.inputs import Inputs, cut, gather
from sparing.jobs.pretrain.job import plain_copy, save_model
from sparing.jobs.pretrain.loop import evaluate
from sparing.jobs.pretrain.models import config_for, fresh_model
from sparing.jobs.pretrain.settings import Pretrain, RuleName
from sparing.jobs.pretrain.state import TrainState, make_plan, start, take_step_
from sparing.jobs.step import DivergedError
from sparing.report import Progress, environment
from sparing.report.atomic import write_whole
from sparing.report.record import plain

RESULT = Path(__file__).parent / "results" / "pretrain_pareto.json"
DENSITIES = ("1", "1/4", "1/8", "1/16", "1/32")
RULES: tuple[RuleName, ...] = ("supar", "mup", "sp")
RETUNED: tuple[RuleName, ...] = ("supar", "sp")
SEEDS = range(2)
COMMAND = "python -m benchmarks.pretrain_pareto"
SETTINGS = Pretrain(
    data=("enwik8",),
    first=3_000_000,
    vocabulary=1024,
    width=128,
    layers=2,
    length=128,
    base_width=64,
    batch=4,
    steps=360,
    warmup=36,
)
START = -8
"""Octave at which the search on the base begins: a rate of 2 to the power of this."""
ITEMS = 250
"""Items at most (count)."""


@functools.cache
def material() -> tuple[Inputs, list[Item]]:
    """What every run learns, and the items made of the test text."""
    text = read_text(SETTINGS.data[0], SETTINGS.first)
    return gather(SETTINGS, SETTINGS.length), items_of(cut(text, SETTINGS.held_out)[2], ITEMS)


@dataclass(frozen=True, slots=True)
class Run:
    """One training."""

    rule: RuleName
    density: str
    seed: int
    octave: int
    width: int = SETTINGS.width

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.rule} {self.density} width {self.width} rate 2^{self.octave} seed {self.seed}"

    @property
    def settings(self) -> Pretrain:
        """What the job is given."""
        own: dict[str, Any] = {name: getattr(self, name) for name in ("rule", "density", "seed", "width")}
        return replace(SETTINGS, lr=2.0**self.octave, **own)


def trained(run: Run) -> TrainState:
    """Train one model to its end."""
    settings, (data, _) = run.settings, material()
    config = config_for(settings, len(data.tokenizer), data.tokenizer.eos_token_id)
    model = fresh_model(config, seed=settings.seed)
    state = start(settings, model, data.train, make_plan(settings, model))
    with Progress(run.key, total=settings.steps) as bar:
        for _ in range(settings.steps):
            bar.advance(loss=take_step_(state)["loss"])
    return state


def live(state: TrainState) -> int:
    """Parameters that are not masked (count)."""
    masked = sum(mask.numel() - int(mask.sum()) for mask in state.masks.values())
    return sum(p.numel() for p in state.model.parameters()) - masked


def downhill(loss: Callable[[int], float], start: int) -> int:
    """Octave from which a step either way does not help, found from a start by steps of one."""
    while (best := min((start, start - 1, start + 1), key=loss)) != start:
        start = best
    return start


class Bench:
    """Runs that are done, and those that the questions ask for."""

    def __init__(self, folder: Path, *, harness: bool) -> None:
        """Read what is there; exported checkpoints go to a folder of their own."""
        found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        own, theirs = identity(), found.get("settings", {"rows": "none yet"})
        same = all(own.get(name) == value for name, value in theirs.items())  # settings that came later do not count
        self.rows: dict[str, dict[str, Any]] = found["rows"] if same else {}
        self.chosen: dict[str, int] = {}
        self.folder, self.harness = folder, harness

    def write(self) -> None:
        """Keep what there is."""
        document = {"command": COMMAND, "settings": identity(), "environment": environment()}
        document |= {"chosen": self.chosen, "rows": self.rows}
        write_whole(RESULT, json.dumps(document, indent=1) + "\n")

    def checkpoint(self, run: Run) -> Path:
        """Where a run is exported to."""
        return self.folder / run.key.replace("/", " in ")

    def train(self, run: Run) -> None:
        """Train, export, and measure on validation text."""
        began, (data, _) = time.process_time(), material()
        row: dict[str, Any] = {**asdict(run), "held_out_loss": None}
        try:
            state = trained(run)
        except DivergedError:
            state = None
        if state is not None:
            row |= {"live": live(state)}
            save_model(model := plain_copy(state), data.tokenizer, self.checkpoint(run))
            row["held_out_loss"] = evaluate(model, data.validation, batch=16)["loss"]
        self.rows[run.key] = row | {"seconds": time.process_time() - began}
        self.write()

    def loss(self, run: Run) -> float:
        """Loss on validation text (nat/token); infinite where it diverged."""
        if run.key not in self.rows:
            self.train(run)
        value = self.rows[run.key]["held_out_loss"]
        return math.inf if value is None else float(value)

    def mark(self, run: Run) -> None:
        """Measure on test text what was chosen, from its checkpoint; train it again if that is gone."""
        from transformers import AutoModelForCausalLM

        if self.loss(run) == math.inf or "test_loss" in self.rows[run.key]:
            return
        if not (checkpoint := self.checkpoint(run)).exists():
            self.train(run)
        began, (data, _) = time.process_time(), material()
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        test = evaluate(model, data.test, batch=16)
        row = {"test_loss": test["loss"], "bits_per_byte": test["bits_per_byte"]}
        if run.seed == SEEDS[0]:
            row |= self.accuracies(model, checkpoint)
        self.rows[run.key] |= row | {"seconds_of_marking": time.process_time() - began}
        self.write()

    def accuracies(self, model: Any, checkpoint: Path) -> dict[str, Any]:
        """Shares of the items that are answered rightly, by our scorer and by the harness."""
        data, items = material()
        marks = marks_of([log_likelihoods(model, data.tokenizer, item) for item in items], items)
        row: dict[str, Any] = {"items": len(items)}
        row |= {name: sum(right) / len(items) for name, right in marks.items()}
        theirs = harness_marks(checkpoint, items, self.folder) if self.harness else None
        if theirs is not None:
            row |= {f"harness_{name}": sum(right) / len(items) for name, right in theirs.items()}
            row["items_that_differ"] = sum(
                a != b for name in marks for a, b in zip(marks[name], theirs[name], strict=True)
            )
        return row

    def choose_base(self) -> int:
        """The octave of the dense base: least mean over the seeds."""

        def mean(octave: int) -> float:
            runs = [Run("supar", "1", seed, octave, SETTINGS.base_width or 0) for seed in SEEDS]
            return sum(map(self.loss, runs)) / len(runs)

        self.chosen["base"] = downhill(mean, START)
        return self.chosen["base"]

    def choose(self, rule: RuleName, density: str) -> int:
        """The octave of one place, on the first seed."""
        found = downhill(lambda octave: self.loss(Run(rule, density, SEEDS[0], octave)), self.chosen["base"])
        self.chosen[f"{rule} {density}"] = found
        return found

    def fill(self) -> None:
        """Do what is missing, whole seeds first."""
        base = self.choose_base()
        for seed in SEEDS:
            for rule, density in places():
                self.mark(Run(rule, density, seed, base))
            for rule, density in itertools.product(RETUNED, DENSITIES):
                self.mark(Run(rule, density, seed, self.choose(rule, density)))
        self.write()


def places() -> list[tuple[RuleName, str]]:
    """Rules and densities; dense models are the same under SμPar and μP, and trained once."""
    return [place for place in itertools.product(RULES, DENSITIES) if place != ("mup", "1")]


def identity() -> dict[str, Any]:
    """What rows must share to stand in one table."""
    known: dict[str, Any] = plain(asdict(SETTINGS))
    for name in ("out", "lr", "rule", "density", "seed"):
        known.pop(name)
    return known | {"passage": PASSAGE, "continuation": CONTINUATION, "items": ITEMS, "start": START}


def main() -> None:
    """Do what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-harness", action="store_true", help="mark by our own scorer only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Bench(Path(folder), harness=not options.no_harness).fill()


if __name__ == "__main__":
    main()
