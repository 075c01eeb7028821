"""The demo at a size for tests: run once by its own entry, its pictures drawn once instead of four times."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest

from sparing.data import bundled_text
from sparing.errors import RunError
from sparing.jobs import demo
from sparing.jobs import run as engine
from sparing.jobs.condense.settings import Evaluation, Forward, Truncated
from sparing.jobs.demo import chapter, condense, federate, memory, shard, transfer, valley
from sparing.jobs.demo.inputs import RATES, Inputs, split
from sparing.jobs.demo.settings import Settings
from sparing.jobs.demo.shard_ranks import Work as Ranks
from sparing.jobs.demo.tiny import make_tiny_model
from sparing.jobs.demo.typeset import draw_digits
from sparing.jobs.lm.models import load_tokenizer
from sparing.jobs.scan.settings import Settings as Scan
from sparing.jobs.subjects.nets import Training
from sparing.report.figure import Figure
from sparing.seeds import stream

CONDENSE = dataclasses.replace(
    condense.WORK, width=4, unroll=3, batch=8, seconds=None, steps=4, measurements=1, save_every=1,
    truncated=Truncated(steps=1), forward=Forward(directions=2), evaluation=Evaluation(steps=2, lr=0.02, nets=1),
)  # fmt: skip
TRANSFER = dataclasses.replace(
    transfer.WORK, widths=(64,), base_width=32, layers=1, densities=(1.0, 0.5), log2_rates=(-8, -6), steps=10, batch=8,
    least_live=4, seeds=(0,),
)  # fmt: skip
SHARD = Ranks(width=64, blocks=2, batch=2, steps=2, accumulate=2, inter=1e9, intra=1e9, rounds=2)
VALLEY = valley.Work(
    data="digits", start=120, half=60, rows=40, widths=(4,), training=Training(epochs=1, batch=30), positions=3,
    tuning=Training(epochs=1, batch=30), scan=Scan(model="demo", points=3, draws=2),
)  # fmt: skip
FEDERATE = dataclasses.replace(
    federate.WORK, flower_rounds=1,
    main=dataclasses.replace(
        federate.WORK.main, data="digits", clients=6, participation=0.5, rounds=2, local_epochs=1
    ),
)  # fmt: skip


def inputs(folder: Path) -> Inputs:
    """A model and rows for seconds."""
    text = bundled_text("alice")[:6000]
    path = make_tiny_model(folder / "tiny", text, steps=2)
    ids = load_tokenizer(path)(text, add_special_tokens=False)["input_ids"]
    train, dev, test = split(ids, 16, rows=(16, 2, 2))
    return Inputs(
        model=path, title="a tiny model", licence="public domain", train=train, dev=dev, test=test, batch=2, steps=4,
        trial=1, prompts=("Alice was",),
        rates={arm: rates[: 2 if arm == "LISA" else 1] for arm, rates in RATES.items()},
    )  # fmt: skip


def digits() -> condense.Inputs:
    """Typeset digits under the name of the handwritten ones."""
    parts = [draw_digits(20, stream(0, "tests", part)) for part in ("train", "held", "test")]
    made = dict(zip(("train", "held_out", "test"), parts, strict=True))
    return condense.Inputs(name="mnist", classes=tuple(map(str, range(10))), **made)


def drawn_once(patch: pytest.MonkeyPatch) -> None:
    """Draw each picture for a desk only; the one for a phone is drawn alike and costs as much."""
    whole = Figure.svg

    def svg(self: Figure, theme: str, *, narrow: bool = False) -> str:
        return '<svg id="left-out"></svg>' if narrow else whole(self, theme)

    patch.setattr(Figure, "svg", svg)


WORKS = {condense: CONDENSE, transfer: TRANSFER, shard: SHARD, valley: VALLEY, federate: FEDERATE}


@pytest.fixture(scope="session", autouse=True)
def sized():
    """Every chapter whose work is a value at a size for tests."""
    with pytest.MonkeyPatch.context() as patch:
        for module, work in WORKS.items():
            patch.setitem(module.WORKS, "tiny", work)
        yield


@pytest.fixture(scope="session")
def priced() -> list[dict]:
    """Every plan for every case, computed once."""
    return shard.plan_cases(shard.CASES)


@pytest.fixture
def quick(priced, monkeypatch):
    """No processes, no drawing, and everything saved at once."""
    pytest.importorskip("sklearn", reason="its digits are the images")

    def broken(work: object) -> None:
        raise RunError("no network here")

    monkeypatch.setattr(shard, "run_ranks", broken)
    monkeypatch.setattr(shard, "plan_cases", lambda cases: priced)
    monkeypatch.setattr(engine, "LEAST_INTERVAL", 0.0)
    monkeypatch.setattr(Figure, "svg", lambda *_, **__: "<svg ></svg>")


@pytest.fixture(scope="session")
def images() -> condense.Inputs:
    """What the second chapter works on."""
    return digits()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Inputs:
    """What the first chapter works on."""
    return inputs(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(made, images, tmp_path_factory):
    """Record and folder of all six chapters, with two seeds of what is repeated."""
    pytest.importorskip("sklearn", reason="its digits are the images of three chapters")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when forward mode is first used
        patch.setitem(chapter.REPEATS, "tiny", 2)
        patch.setitem(transfer.WORKS, "tiny", dataclasses.replace(TRANSFER, seeds=(0, 1)))
        patch.setattr(memory, "gather", lambda source, out, scale: made)
        patch.setattr(condense, "load_digits", lambda: images)
        drawn_once(patch)
        folder = tmp_path_factory.mktemp("demo")
        yield demo.run(Settings(out=folder, scale="tiny")), folder
