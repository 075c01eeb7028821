"""What each part of the recipe of ``condense`` is worth in equal CPU time; ``python -m benchmarks.condense_recipe``.

Four parts, each of them rows that are written one by one; the same command goes on where it stopped.

    --part ablation   one part of the recipe through ten steps without shifts changed at a time, judged on held-out
                      training images
    --part shifted    one part of the recipe through ten steps with shifts changed at a time, judged in the same way
    --part bars       the recipe as it is, or the --arms named, judged on the test images; with --transfer the images
                      also teach other nets
    --part methods    every method by the recipe through ten steps, each at the outer rate that is best on
                      held-out images

Every arm has the same CPU seconds of the process in the outer loop. How many outer steps these are is timed once for
all arms of a block, in turn, step by step, so that a neighbour on the machine slows all of them alike; arms that join
later have the base's steps by a ratio that is timed in the same way (methods, and bars without a base, are timed by
themselves), and arms of an ablation whose steps cost the same have as many as the base.
As many real images stand in every table: a net each, by the learning rate that is best on held-out images for another
draw.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from benchmarks.condense_others import ARCHITECTURES, taught_architecture
from benchmarks.writers import this_run, writers
from sparing.errors import RunError, UserError
from sparing.hypergrad.implicit import HessianFree
from sparing.jobs.condense import net
from sparing.jobs.condense.inputs import Inputs, gather
from sparing.jobs.condense.loop import real_accuracies, real_draw, train, tuned_accuracies
from sparing.jobs.condense.methods import build_method
from sparing.jobs.condense.settings import Condense, ConjugateGradient, Evaluation, Forward, Neumann, Truncated
from sparing.jobs.condense.state import TrainState, hypergradient_at, start
from sparing.jobs.sweeps import inside
from sparing.report import Record
from sparing.report.atomic import write_whole

RESULT = Path(__file__).parent / "results" / "condense_recipe.json"

BASE = Condense(method="reverse", unroll=10, inner_lr=0.05, shift=0, measurements=0, evaluation=Evaluation(nets=5))
"""The recipe through ten steps without shifts, which arms change in what they name: it was the default at first."""
PLAIN, SHIFTED = "no shifts", "shifts of 1 pixel"
"""Arms that are ``BASE`` and what ``sparing condense`` did by default after it."""
DEFAULT = "T = 25, random windows of 10, shifts of 1 pixel"
"""What it does by default."""
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"shift": 0},
    "starts with noise": {"start": "noise"},
    "soft labels too": {"learn": ("images", "labels")},
    "rates too": {"learn": ("images", "rates")},
    "soft labels and rates too": {"learn": ("images", "labels", "rates")},
    "hypergradients of any length": {"clip_medians": 0.0},
    "a rate for each step and tensor too": {"learn": ("images", "rates"), "rates_per": "tensor"},
    "outer rate 0.01": {"outer_lr": 0.01},
    "outer rate 0.04": {"outer_lr": 0.04},
    "inner rate 0.02": {"inner_lr": 0.02},
    "inner rate 0.1": {"inner_lr": 0.1},
    "inner rate 0.2": {"inner_lr": 0.2},
    "flat outer rates": {"outer_schedule": "constant"},
    "no average": {"average": 0.0},
    SHIFTED: {"shift": 1},
    "shifts of 2 pixels": {"shift": 2},
    "random windows of 5": {"method": "truncated", "truncated": Truncated(steps=5, ends="random")},
    "T = 25, random windows of 10": {
        "unroll": 25, "method": "truncated", "truncated": Truncated(steps=10, ends="random"),
    },
    "T = 25": {"unroll": 25},
    DEFAULT: {
        "unroll": 25, "method": "truncated", "truncated": Truncated(steps=10, ends="random"), "shift": 1,
    },
    "width 32, T = 25, random windows of 10": {
        "width": 32, "unroll": 25, "method": "truncated", "truncated": Truncated(steps=10, ends="random"),
    },
    "batch of 64": {"batch": 64},
    "width 32, no shifts": {"width": 32, "shift": 0},
    "width 64, no shifts": {"width": 64, "shift": 0},
    "width 32, shifts of 2 pixels": {"width": 32, "shift": 2},
    "width 32, shifts of 1 pixel, inner rate 0.2": {"width": 32, "shift": 1, "inner_lr": 0.2},
    "wide and long": {
        "width": 32, "unroll": 25, "inner_lr": 0.02, "shift": 1, "evaluation": Evaluation(nets=5, lr=0.01),
    },
    "pixels from 0 to 1": {},
    "T = 25, conjugate gradient 5": {
        "unroll": 25, "method": "conjugate-gradient", "conjugate_gradient": ConjugateGradient(iterations=5),
    },
    "conjugate gradient 5": {
        "method": "conjugate-gradient", "conjugate_gradient": ConjugateGradient(iterations=5),
    },
}  # fmt: skip
"""Changes by name."""

PIXELS: dict[str, dict[str, float]] = {"pixels from 0 to 1": {"GREY": 0.0, "CONTRAST": 1.0}}
"""What else an arm changes in the net."""

METHODS: dict[str, dict[str, Any]] = {
    "reverse": {},
    "checkpointed": {"method": "checkpointed"},
    "truncated 3": {"method": "truncated", "truncated": Truncated(steps=3, ends="last")},
    "(FG)²U b=4": {"method": "forward-gradient", "forward": Forward(directions=4)},
    "Hessian-free": {"method": "hessian-free"},
    "Neumann 5": {"method": "neumann", "neumann": Neumann(terms=5)},
    "two-phase": {"method": "two-phase", "forward": Forward(directions=4)},
    "conjugate gradient 5": {"method": "conjugate-gradient", "conjugate_gradient": ConjugateGradient(iterations=5)},
}
"""Every method with the recipe through ten steps, shifts among it."""
RATES = (0.01, 0.02, 0.04)
"""Outer rates that a method is tried at, at first."""
SWEPT = 100
"""Seed of the runs that choose an outer rate; no table has it."""

OTHERS: dict[str, dict[str, int]] = {
    "one block of width 16": {"depth": 1, "width": 16},
    "two blocks of width 16": {"depth": 2, "width": 16},
    "three blocks of width 16": {"depth": 3, "width": 16},
    "two blocks of width 32": {"depth": 2, "width": 32},
    "three blocks of width 32": {"depth": 3, "width": 32},
    "three blocks of width 16, shifts of 1 pixel": {"depth": 3, "width": 16, "shift": 1},
}
"""Nets that are taught images condensed for another, without shifts if none are named; their rates are chosen on
held-out images."""

COSTLESS = frozenset({"outer_lr", "outer_schedule", "average", "clip_medians"})
"""Settings that leave the time of an outer step as it is: an arm that changes these alone has as many steps."""
ROUNDS = 29
"""Outer steps of each arm that are timed, after one that warms up (count); those of older rows are means of nine."""


Made = TypeVar("Made")


class Table:
    """The result file: rows by key, written after each."""

    def __init__(self, path: Path = RESULT) -> None:
        """Read what is there."""
        self.path = path
        self.rows: dict[str, Any] = json.loads(path.read_text())["rows"] if path.exists() else {}

    def row(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A row, made and written if it is not there yet."""
        if key not in self.rows:
            begin = time.process_time()
            self.rows[key] = make() | {"cpu_seconds_in_all": round(time.process_time() - begin, 1)}
            about = this_run()
            head = {
                "budget": "CPU seconds of the process in the outer loop, one thread; judging is apart",
                "base": json.loads(json.dumps(dataclasses.asdict(BASE), default=str)),
                "environment": dict(about), "writers": writers(self.path, about),
                "units": {"accuracy": "%", "seconds": "s"},
            }  # fmt: skip
            write_whole(self.path, json.dumps(head | {"rows": self.rows}, indent=1, ensure_ascii=False) + "\n")
            print(f"{time.strftime('%H:%M:%S')} {key}: {json.dumps(self.rows[key])}", flush=True)
        return self.rows[key]


def lengths(arms: Mapping[str, Condense], inputs: Inputs, seconds: float) -> dict[str, Any]:
    """Outer steps of each arm that fill the seconds, timed in turn."""
    states = {name: start(settings, inputs) for name, settings in arms.items()}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    cheap: dict[str, list[float]] = {name: [] for name in arms if arms[name].method == "two-phase"}
    for at in range(ROUNDS + 1):
        for name, state in states.items():
            for found, method in ((taken, build_method(arms[name])), (cheap, HessianFree())):
                if name in found:
                    begin = time.process_time()
                    hypergradient_at(state, at, method)
                    found[name].append(time.process_time() - begin)
    # the mean, not the median: with random windows the steps of a run differ
    steps = {name: max(1, round(seconds / statistics.fmean(each[1:]))) for name, each in taken.items()}
    turns = dict.fromkeys(arms, 0)
    for name, each in cheap.items():
        share = arms[name].two_phase.first
        turns[name] = round(share * seconds / statistics.fmean(each[1:]))
        steps[name] = turns[name] + max(1, round((1 - share) * steps[name]))
    return {"steps": steps, "turns": turns}


def sized(
    table: Table,
    inputs: Inputs,
    name: str,
    arms: Mapping[str, Condense],
    seconds: float,
    *,
    joins: bool,
    base: str = PLAIN,
    anchor: Condense | None = None,
) -> dict[str, Any]:
    """Outer steps of each arm of a block; those that cost what the ``base`` does have its.

    Arms that join late are timed in turn with the base, whose settings are the ``anchor``, and have its steps times the
    ratio: the machine may be faster or slower than when the block began.
    """
    alike = {arm for arm in arms if ARMS.get(arm) and ARMS[arm].keys() <= COSTLESS}
    timed = {arm: settings for arm, settings in arms.items() if arm not in alike or base not in arms}
    size = table.row(f"{name} | steps", lambda: lengths(timed, inputs, seconds))
    late = {arm: settings for arm, settings in arms.items() if arm not in size["steps"]}
    if base in size["steps"]:
        alike &= late.keys()
        size = {part: size[part] | dict.fromkeys(alike, size[part][base]) for part in ("steps", "turns")}
        late = {arm: settings for arm, settings in late.items() if arm not in alike}
    if joins and late:
        beside = {} if anchor is None or base not in size["steps"] else {base: anchor}
        joined = table.row(f"{name} | steps of {' and '.join(late)}", lambda: lengths(beside | late, inputs, seconds))
        if base in joined["steps"]:
            share = size["steps"][base] / joined["steps"][base]
            joined = {part: {arm: round(share * n) for arm, n in joined[part].items()} for part in ("steps", "turns")}
        size = {part: size[part] | joined[part] for part in ("steps", "turns")}
    return size


def on_net(arm: str, make: Callable[[], Made]) -> Made:
    """What ``make`` gives with the net of an arm."""
    with mock.patch.multiple(net, **{"GREY": net.GREY, "CONTRAST": net.CONTRAST, **PIXELS.get(arm, {})}):
        return make()


def walk(settings: Condense, inputs: Inputs, steps: int, turn: int, also: Callable[[TrainState], Any]) -> Any:
    """One run of a given length and what is asked ``also`` of its end, or why it stopped."""
    state = start(settings, inputs)
    state.steps, state.turn = steps, turn
    record = Record(question="", settings=settings, seed=settings.seed, environment={})
    try:
        train(state, record)
    except (RunError, UserError) as error:
        return {"failed": str(error), "steps": state.step, "seconds": state.seconds}
    row = record.table("methods")[0]
    keep = ("accuracy", "accuracy_low", "accuracy_high", "n", "steps", "seconds")
    return {name: row[name] for name in keep} | also(state)


def block(
    table: Table, inputs: Inputs, name: str, arms: Mapping[str, Condense], *, seconds: float, seeds: int,
    apart: bool = False, joins: bool = False, base: str = PLAIN, anchor: Condense | None = None,
    also: Callable[[TrainState], Any] = lambda state: {},
) -> None:  # fmt: skip
    """Rows of one block, seed by seed, so that an unfinished one is balanced; arms that stand ``apart`` may join it."""
    size = sized(table, inputs, name, arms, seconds, joins=apart or joins, base=base, anchor=anchor)
    for arm, settings in arms.items():
        # another net, and a net trained in another way, has real images of its own
        other = trained(settings) != trained(next(iter(arms.values())))
        if apart or other or arm == next(iter(arms)) or arm in PIXELS:
            real = functools.partial(control, start(settings, inputs))
            table.row(f"{name} | {arm} | real images", functools.partial(on_net, arm, real))
    for seed in range(seeds):
        for arm, settings in arms.items():
            if arm not in size["steps"]:
                print(f"{name}: {arm} was not timed with the others; take another --out for it", file=sys.stderr)
                continue
            length, turn = size["steps"][arm], size["turns"][arm]
            made = dataclasses.replace(settings, seed=seed)
            run = functools.partial(walk, made, inputs, length, turn, also)
            table.row(f"{name} | {arm} | {seed}", functools.partial(on_net, arm, run))


def at_best_rates(
    table: Table, inputs: Inputs, name: str, arms: Mapping[str, Condense], seconds: float
) -> dict[str, Condense]:
    """Each arm at the outer rate that ends highest on held-out images, in runs as long as those of the table."""
    size = sized(table, inputs, name, arms, seconds, joins=True)
    found = {}
    for arm, settings in arms.items():

        def missed(rate: float, arm: str = arm, settings: Condense = settings) -> float:
            made = dataclasses.replace(settings, outer_lr=rate, judge="held-out", seed=SWEPT)
            run = functools.partial(walk, made, inputs, size["steps"][arm], size["turns"][arm], lambda state: {})
            # a run that fails teaches nothing
            return 100.0 - float(table.row(f"{name} | {arm} | rate {rate:g}", run).get("accuracy", 0.0))

        found[arm] = dataclasses.replace(settings, outer_lr=inside(RATES, missed)[0])
    return found


def trained(settings: Condense) -> tuple[Any, ...]:
    """What the nets that learn from real images depend on."""
    return settings.width, settings.shift, settings.evaluation


def control(state: TrainState) -> dict[str, Any]:
    """What as many real images teach, on the images that judge."""
    lr, scores = real_accuracies(state)
    return {"accuracy": statistics.fmean(scores), "accuracies": scores, "lr": lr}


def taught_to_others(state: TrainState) -> dict[str, Any]:
    """Accuracy (%) of other nets on these images, with any soft labels, trained as those on real images are."""
    given = {part: leaf for part, leaf in state.mean.items() if part != "rates"}
    kept = tuple(part for part in state.settings.learn if part != "rates")
    found = {}
    for name, kind in OTHERS.items():
        plain: Any = {"learn": kept, "shift": BASE.shift} | kind
        other = start(dataclasses.replace(state.settings, **plain), state.inputs)
        lr, scores = tuned_accuracies(other, lambda number: given)
        found[name] = {"accuracy": statistics.fmean(scores), "accuracies": scores, "lr": lr}
    for name in ARCHITECTURES:
        found[name] = taught_architecture(state, name, lambda number: given)
    return {"transfer": found}


def main() -> None:
    """Fill the result file row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("ablation", "shifted", "bars", "methods"), default="ablation")
    parser.add_argument("--data", choices=("mnist", "fashion-mnist", "cifar10"), default="mnist")
    parser.add_argument("--depth", type=int, nargs="+", default=[3, 2], help="blocks of the net")
    parser.add_argument("--per-class", type=int, nargs="+", default=[1], help="condensed images a class")
    parser.add_argument("--seconds", type=float, default=600.0, help="CPU seconds of a run")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm, seeds 0 and up")
    parser.add_argument("--transfer", action="store_true", help="of bars: also teach the images to other nets")
    parser.add_argument("--arms", nargs="+", default=[], help="some arms alone; none: all, of bars the recipe")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    table = Table(given.out)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(1)
    inputs = gather(given.data, held_out=BASE.held_out_images)
    # nothing that is chosen by an ablation has seen the test images
    judge = "held-out" if given.part in ("ablation", "shifted") else "test"
    # the inner rate depends on the images a class, and by default the inner steps too
    tenfold = ARMS[SHIFTED] | {"inner_lr": None}
    recipe = ARMS[DEFAULT] | {"inner_lr": None, "unroll": None}
    changes = {
        "ablation": ARMS,
        "methods": METHODS,
        "bars": ARMS if given.arms else {DEFAULT: recipe},
        "shifted": {SHIFTED: ARMS[SHIFTED]} | ARMS,
    }[given.part]
    if unknown := sorted(set(given.arms) - set(changes)):
        parser.error(f"--arms: no such arm of {given.part}: {', '.join(unknown)}; there are {', '.join(changes)}")
    if given.transfer and any("evaluation" in ARMS[arm] or arm in PIXELS for arm in given.arms):
        parser.error("--transfer: other nets are taught by the recipe's rates and pixels, which these arms change")
    for depth in given.depth:
        for count in given.per_class:
            base = dataclasses.replace(BASE, data=given.data, depth=depth, per_class=count, judge=judge)
            if given.part == "methods":
                base = dataclasses.replace(base, **tenfold)
            if given.part == "shifted":
                base = dataclasses.replace(base, **ARMS[SHIFTED])
            named = {arm: change for arm, change in changes.items() if not given.arms or arm in given.arms}
            arms = {arm: dataclasses.replace(base, **change) for arm, change in named.items()}
            name = f"{given.part}, {given.data}, {depth} blocks, {count} a class, {given.seconds:g} s"
            transfer = given.part == "bars" and given.transfer
            for other, kind in OTHERS.items() if transfer else ():
                real = functools.partial(control, start(dataclasses.replace(base, **kind), inputs))
                table.row(f"{name} | {other} | real images", real)
            for other in ARCHITECTURES if transfer else ():
                state = start(base, inputs)
                real = functools.partial(taught_architecture, state, other, real_draw(state))
                table.row(f"{name} | {other} | real images", real)
            also = taught_to_others if transfer else lambda state: {}
            if given.part == "methods":
                arms = at_best_rates(table, inputs, name, arms, given.seconds)
                also = lambda state: {"outer_lr": state.settings.outer_lr}  # noqa: E731
            how: Any = {"seconds": given.seconds, "seeds": given.seeds, "apart": given.part == "bars", "also": also}
            how["joins"] = given.part in ("methods", "shifted")
            how["base"] = SHIFTED if given.part == "shifted" else PLAIN
            how["anchor"] = None if given.part == "methods" else base
            block(table, inputs, name, arms, **how)


if __name__ == "__main__":
    main()
