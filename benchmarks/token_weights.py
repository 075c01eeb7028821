"""Token weights settled: ``python -m benchmarks.token_weights``. Resumable, about two hours of CPU time.

``--study stories15m`` asks the same of a larger model, with five times the seconds of meta-training.

Does it matter how token weights are learnt? The judge is the answer loss (nat per answer token) on test documents,
paired by question: at one seed all arms adapt the same θ₀ to the same documents and answer the same questions, and no
document serves two seeds. A stream is twelve documents, one SGD step each, as in meta-training; it starts from θ₀.

Arms: RGU over six documents, checkpointed reverse, (FG)²U with directions in ψ and in φ, each with the same CPU seconds
of meta-training; uniform weights; two controls, names and numbers only (what questions ask for) and weights drawn
at random around the same mean; and the base model, which does not adapt.

Everything is chosen on validation documents, of which every seed has its own, by the outer loss of ``sparing adapt``
(answer loss + 0.1 KL on other text) at the rate of adapting that is best for it: each arm's inner and outer rate of
meta-training on a seed that is not in the table, which network of a run is kept, and the rate of adapting itself. An
arm stands at the inner rate that suits uniform weights and, where another is better, once more at its own; its outer
rate is swept at every inner rate. Each arm of stories15m stands at its own alone, and its rates are swept in turn: the
outer one at a quarter of the inner rate that suits uniform weights, the inner one there, the outer one once more there.
Sweeps go on until the best is inside. A run that ends above uniform weights at
their best rate keeps its start: it is a tie with them, and the table counts such runs.

θ₀ made anew on another machine differs in its last bits at first and then altogether, so a file knows the digest of
its own and takes no row of another; keep the folder.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.token_base import LENGTH, LONGER, SMALL, STORIES, TUNING, Base, Study, prepare
from benchmarks.valley import store
from sparing.jobs.adapt import meta
from sparing.jobs.adapt.corpus import stream_of
from sparing.jobs.adapt.evaluate import adapt_model, name_weights, stream_weights
from sparing.jobs.adapt.lm import LanguageModel, Theta
from sparing.jobs.adapt.problem import Window, divergence, make_window
from sparing.jobs.adapt.settings import Adapt, Name
from sparing.jobs.adapt.weights import START
from sparing.jobs.sweeps import inside
from sparing.seeds import stream

RESULTS = Path(__file__).parent / "results"
SEEDS = 8
"""Seeds of the table: 0 to 7."""
SETTINGS = Adapt(length=LENGTH, question_length=48, width=64, measurements=2, steps=100_000)
STREAMS = {"validation": (4, 1), "test": (13, 3)}
"""Streams of a seed: of enwik8, of the books."""
FIXED = ("uniform", "names", "random")
LEARNT: tuple[Name, ...] = ("rgu", "checkpointed", "fg-psi", "fg-phi")
OUTER = (1e-3, 3e-3, 1e-2)
"""Rates of Adam on the network that are tried at first."""
STUDIES = {"small": SMALL, "stories15m": STORIES}
STEPS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
"""Inner rates of its own that a learnt arm is tried at, over the one that suits uniform weights."""

Weigh = Callable[[Window], Tensor]  # weights of a stream's tokens, (n,)
Rates = tuple[float, float]  # outer, inner


@functools.lru_cache(maxsize=2)
def cut(base: Base, purpose: str, seed: int) -> list[Window]:
    """The streams of a seed: the seed's own runs of twelve consecutive documents from each text."""
    found = []
    for part, count in zip(getattr(base, purpose), STREAMS[purpose], strict=True):
        for at in range(seed * count, (seed + 1) * count):
            chosen = part[at * SETTINGS.documents : (at + 1) * SETTINGS.documents]
            if len(chosen) < SETTINGS.documents:
                raise ValueError(f"stream {at}: {len(chosen)} documents are left; read more text")
            other = base.data.elsewhere_test[at % len(base.data.elsewhere_test)]
            found.append(make_window(base.lm, stream_of(base.lm, chosen, context=SETTINGS.question_length), (other,)))
    return found


def question_losses(lm: LanguageModel, theta: Theta, window: Window) -> Tensor:
    """Summed negative log-likelihood of each question's answer (Q,), nat."""
    asked = window.stream.questions
    with torch.no_grad():
        nll = lm.nll(theta, asked.ids, asked.rows, asked.cols)
    return nll.new_zeros(len(asked.expected)).index_add(0, asked.rows, nll)


def answer_tokens(window: Window) -> Tensor:
    """Tokens of each question's answer (Q,)."""
    return torch.bincount(window.stream.questions.rows, minlength=len(window.stream.questions.expected))


def measure(lm: LanguageModel, windows: Sequence[Window], weigh: Weigh | None, lr: float) -> dict[str, Any]:
    """Adapt to each stream from θ₀ and ask: loss by question (nat) and, over all streams, nll, KL and objective."""
    losses, kl = [], []
    for window in windows:
        theta: Theta = lm.theta
        if weigh is not None:
            theta = adapt_model(lm, weigh(window), window.stream.texts, lr=lr, clip=SETTINGS.inner_clip)
        losses.append(question_losses(lm, theta, window))
        with torch.no_grad():
            kl.append(divergence(lm, theta, window.elsewhere, window.before).item())
    nll = (torch.cat(losses).sum() / sum(answer_tokens(window).sum() for window in windows)).item()
    away = sum(kl) / len(kl)
    return {"nll": nll, "kl": away, "objective": nll + SETTINGS.locality * away, "losses": torch.cat(losses).tolist()}


def best_adapting(base: Base, weigh: Weigh, seed: int, near: float) -> tuple[float, dict[str, float]]:
    """The rate of adapting that is best on the seed's validation streams, and the objective at each that was tried."""
    known = cut(base, "validation", seed)
    start = [float(f"{near * step:.2g}") for step in (2**-0.5, 1.0, 2**0.5)]
    return inside(start, lambda lr: measure(base.lm, known, weigh, lr)["objective"])


def adapted(base: Base, weigh: Weigh, seed: int, near: float) -> dict[str, Any]:
    """Choose the rate of adapting on the seed's validation streams, then answer the questions of its test streams."""
    lr, swept = best_adapting(base, weigh, seed, near)
    return {"lr": lr, "swept": swept, **measure(base.lm, cut(base, "test", seed), weigh, lr)}


@functools.lru_cache(maxsize=1)
def at_start(base: Base, seed: int) -> tuple[float, dict[str, float]]:
    """The best rate of uniform weights on the validation streams of a seed; their objective there is to be beaten."""
    return best_adapting(base, uniform, seed, base.study.inner[1])


def learn(
    base: Base, name: Name, seed: int, *, outer: float, inner: float, times: int = 1
) -> tuple[meta.TrainState, dict[str, Any]]:
    """Meta-train one arm for its seconds; of its looks, each at its best rate of adapting, the lowest is kept."""
    more = {"seconds": times * base.study.seconds, "measurements": times * SETTINGS.measurements}
    settings = replace(SETTINGS, seed=seed, outer_lr=outer, inner_lr=inner, **more)
    arm = meta.arm_of(name, settings)
    state = meta.start(cut(base, "validation", seed)[0].features.shape[1], settings)
    looks: list[dict[str, Any]] = []

    def look(lr: float, swept: dict[str, float]) -> None:
        looks.append({"step": state.step, "objective": swept[f"{lr:g}"], "lr": lr, "swept": swept})
        meta.keep_best_(state, swept[f"{lr:g}"])

    look(*at_start(base, seed))
    while not meta.ended(state, settings):
        before = meta.budget_used(state, settings)
        meta.outer_step_(state, base.lm, base.data, settings, arm)
        if meta.evaluation_due(before, meta.budget_used(state, settings), settings.measurements):
            look(*best_adapting(base, partial(stream_weights, state.phi), seed, looks[-1]["lr"]))
    heights = [one["objective"] if math.isfinite(one["objective"]) else math.inf for one in looks]
    kept = looks[heights.index(min(heights))]["step"]
    return state, {
        "outer": outer, "inner": inner, "steps": state.step, "seconds": state.seconds, "kept": kept, "looks": looks,
        "learnt": min(heights[1:]),
    }  # fmt: skip


def learnt_row(base: Base, name: Name, seed: int, *, outer: float, inner: float) -> dict[str, Any]:
    """One arm at one seed: learn, and answer with the network that was best on validation, at its rate there."""
    state, row = learn(base, name, seed, outer=outer, inner=inner)
    kept = next(one for one in row["looks"] if one["step"] == row["kept"])
    weigh = partial(stream_weights, state.best)
    return row | {"lr": kept["lr"]} | measure(base.lm, cut(base, "test", seed), weigh, kept["lr"])


def uniform(window: Window) -> Tensor:
    """The start of every learnt arm."""
    return torch.full((len(window.features),), START)


def at_random(window: Window, seed: int) -> Tensor:
    """Weights of an exponential law, whose mean is that of the start."""
    text = int(torch.cat(window.stream.texts).sum())  # another stream, another draw
    drawn = torch.rand(len(window.features), generator=stream(seed, "random weights", text))
    return -START * torch.log1p(-drawn)


def base_row(base: Base, seed: int) -> dict[str, Any]:
    """No adapting; also what all rows of the seed share."""
    windows = cut(base, "test", seed)
    counts = torch.cat([answer_tokens(window) for window in windows]).tolist()
    asked = [len(window.stream.questions.expected) for window in windows]
    found = {"tokens": counts, "wiki": sum(asked[: STREAMS["test"][0]]), "documents": len(windows) * SETTINGS.documents}
    return found | measure(base.lm, windows, None, 0.0)


class Rows(store.Store):
    """The result file: rows by key."""

    def __init__(self, path: Path, study: Study = SMALL) -> None:
        named = next(f" --study {name}" for name, one in STUDIES.items() if one is study)
        self.path, self.command = path, "python -m benchmarks.token_weights" + named * (study is not SMALL)
        self.rows = self._read()

    def of(self, lm: LanguageModel) -> None:
        """Refuse to go on with rows of another θ₀."""
        known = digest(lm)
        if self.rows and "base | theta | digest" not in self.rows:
            raise SystemExit(f"{self.path}: its rows do not say of which θ₀ they are; pass another --out")
        if (found := self.once("base | theta | digest", lambda: {"sha256": known})["sha256"]) != known:
            raise SystemExit(
                f"{self.path}: its rows are of another θ₀ ({found[:12]}); pass its --model or another --out"
            )

    def at(self, key: str, make: Callable[[], dict[str, Any]], **rates: float) -> None:
        """A row of a run at these rates; one of other rates is refused, since a table would mix them."""
        row = self.once(key, make)
        if any(row[name] != rate for name, rate in rates.items()):
            raise SystemExit(f"{self.path}: {key} was made at other rates than the sweep chooses; pass another --out")


def digest(lm: LanguageModel) -> str:
    """SHA-256 of the weights of θ₀."""
    found = hashlib.sha256()
    for name in sorted(lm.theta):
        found.update(lm.theta[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def chosen_rates(
    base: Base, rows: Rows, learnt: Sequence[Name] = LEARNT
) -> tuple[float, dict[Name, Rates], dict[Name, Rates]]:
    """The inner rate that suits uniform weights; of each arm, the rates of its rows and those of its ``own`` rows."""
    known = cut(base, "validation", TUNING)

    def plain() -> dict[str, Any]:
        lr, swept = inside(base.study.inner, lambda lr: measure(base.lm, known, uniform, lr)["objective"])
        before = measure(base.lm, known, None, 0.0)
        return {"lr": lr, "swept": swept, "base": before["nll"], "uniform": measure(base.lm, known, uniform, lr)["nll"]}

    shared = rows.once(f"inner | uniform | {TUNING}", plain)["lr"]

    def ends(name: Name, outer: float, inner: float) -> float:
        at = "" if inner == shared else f" | inner {inner:g}"
        make = lambda: learn(base, name, TUNING, outer=outer, inner=inner)[1]  # noqa: E731
        learnt = rows.once(f"outer | {name} | {outer:g}{at}", make)["learnt"]
        return math.inf if learnt is None else float(learnt)  # a file holds no number that is not finite

    def best_outer(name: Name, inner: float, *more: float) -> float:
        return inside(sorted({*OUTER, *more}), lambda outer: ends(name, outer, inner))[0]

    def own(name: Name) -> Rates:
        start = [float(f"{shared * step:.2g}") for step in STEPS]
        inner = inside(start, lambda inner: ends(name, best_outer(name, inner), inner))[0]
        return best_outer(name, inner), inner

    def in_turn(name: Name) -> Rates:
        start = [float(f"{shared * step:.2g}") for step in (1 / 8, 1 / 4, 1 / 2)]
        outer = best_outer(name, start[1])
        inner = inside(start, lambda inner: ends(name, outer, inner))[0]
        return best_outer(name, inner, outer), inner  # the lowest of all that were tried

    if base.study.shared:
        return (
            shared,
            {name: (best_outer(name, shared), shared) for name in learnt},
            {name: own(name) for name in learnt},
        )
    found = {name: in_turn(name) for name in learnt}
    return shared, found, found


def make_rows(base: Base, rows: Rows, chosen: Sequence[str]) -> None:
    """Sweep the rates of the chosen arms, then measure what is missing, seed by seed."""
    learnt = [name for name in LEARNT if name in chosen]
    inner, rates, own = chosen_rates(base, rows, learnt)

    def run(label: str, arm: Name, seed: int, outer: float, inner: float) -> None:
        make = partial(learnt_row, base, arm, seed, outer=outer, inner=inner)
        rows.at(f"{label} | {seed}", make, outer=outer, inner=inner)

    for seed in range(SEEDS):
        rows.once(f"base | {seed}", partial(base_row, base, seed))
        fixed: tuple[Weigh, ...] = (uniform, partial(name_weights, base.lm), partial(at_random, seed=seed))
        for name, weigh in zip(FIXED, fixed, strict=True):
            if name in chosen:
                rows.once(f"{name} | {seed}", partial(adapted, base, weigh, seed, inner))
        for arm in learnt:
            run(arm, arm, seed, *rates[arm])
        sys.stderr.write(f"seed {seed}, {time.process_time():.0f} s of CPU time in this process\n")
    again = [arm for arm in learnt if own[arm][1] != rates[arm][1]]
    for label, arm in [*((one, one) for one in learnt), *((f"own {one}", one) for one in again)]:
        if arm != "fg-phi":
            outer, at = (rates if label == arm else own)[arm]
            more = partial(learn, base, arm, TUNING, outer=outer, inner=at, times=LONGER)
            rows.at(f"longer | {label} | {TUNING}", lambda more=more: more()[1], outer=outer, inner=at)
    for seed, arm in itertools.product(range(SEEDS), again):
        run(f"own {arm}", arm, seed, *own[arm])


def main() -> None:
    """Do what is missing, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, default="small", help="the language model")
    parser.add_argument("--model", type=Path, help="its folder; if none is given, one under runs")
    parser.add_argument("--out", type=Path, help="the result file; if none is given, the study's own")
    arms = (*FIXED, *LEARNT)
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms, help="some arms alone, to be put together")
    options = parser.parse_args()
    if "MALLOC_MMAP_MAX_" not in os.environ:  # fresh pages for every large tensor double the time of every method
        once = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(5 * 10**8)}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.token_weights", *sys.argv[1:]], os.environ | once)
    torch.set_num_threads(1)
    study = STUDIES[options.study]
    base = prepare(study, options.model or Path("runs") / study.name.replace("_", "-"))
    rows = Rows(options.out or RESULTS / f"{study.name}.json", study)
    rows.of(base.lm)
    make_rows(base, rows, options.arms)


if __name__ == "__main__":
    main()
