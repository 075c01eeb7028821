"""The demo at a size for tests: run once by its own entry, its pictures drawn once instead of four times."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparing.data import bundled_text
from sparing.jobs import demo
from sparing.jobs.demo import condensation, federated, sharding, transfer, valley
from sparing.jobs.demo.inputs import RATES, Inputs, split
from sparing.jobs.demo.settings import Settings
from sparing.jobs.demo.sharding_ranks import Work as Ranks
from sparing.jobs.demo.tiny import make_tiny_model
from sparing.jobs.demo.typeset import draw_digits
from sparing.jobs.lm.models import load_tokenizer
from sparing.jobs.scan.settings import Settings as Scan
from sparing.jobs.subjects.nets import Training
from sparing.report.figure import Figure
from sparing.seeds import stream

CONDENSE = dataclasses.replace(
    condensation.WORK, width=4, unroll=3, batch=8, truncate=1, directions=2, seconds=None, steps=2, eval_steps=2,
    eval_nets=1, looks=1,
)  # fmt: skip
TRANSFER = dataclasses.replace(
    transfer.WORK, widths=(64,), base_width=32, layers=1, densities=(1.0, 0.5), rates=(-8, -6), steps=10, batch=8,
    least_live=4,
)  # fmt: skip
SHARD = Ranks(width=64, blocks=2, batch=2, steps=2, accumulate=2, inter=1e9, intra=1e9)
VALLEY = valley.Work(
    data="digits", start=120, half=60, rows=40, widths=(4,), training=Training(epochs=1, batch=30), positions=3,
    tuning=Training(epochs=1, batch=30), scan=Scan(checkpoint="demo", points=3, draws=2),
)  # fmt: skip
FEDERATE = dataclasses.replace(
    federated.WORK, flower_rounds=1,
    main=dataclasses.replace(
        federated.WORK.main, data="digits", clients=6, participation=0.5, rounds=2, local_epochs=1
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


def digits() -> condensation.Inputs:
    """Typeset digits under the name of the handwritten ones."""
    parts = [draw_digits(20, stream(0, "tests", part)) for part in ("train", "held", "test")]
    made = dict(zip(("train", "held_out", "test"), parts, strict=True))
    return condensation.Inputs(name="mnist", classes=tuple(map(str, range(10))), **made)


def drawn_once(patch: pytest.MonkeyPatch) -> None:
    """Draw each picture for a desk only; the one for a phone is drawn alike and costs as much."""
    whole = Figure.svg

    def svg(self: Figure, theme: str, *, narrow: bool = False) -> str:
        return '<svg id="left-out"></svg>' if narrow else whole(self, theme)

    patch.setattr(Figure, "svg", svg)


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """Sizes of the five chapters whose work is a value."""
    return SimpleNamespace(condense=CONDENSE, transfer=TRANSFER, shard=SHARD, valley=VALLEY, federate=FEDERATE)


@pytest.fixture(scope="session")
def priced() -> list[dict]:
    """Every plan for every case, computed once."""
    return sharding.plan_cases(sharding.CASES)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Inputs:
    """What the first chapter works on."""
    return inputs(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(made, small, tmp_path_factory):
    """Record and folder of all six chapters."""
    pytest.importorskip("sklearn", reason="its digits are the images of three chapters")
    works = {condensation: small.condense, transfer: small.transfer, sharding: small.shard, valley: small.valley}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when forward mode is first used
        for module, work in (works | {federated: small.federate}).items():
            patch.setitem(module.WORKS, "tiny", work)
        patch.setattr(demo, "gather", lambda source, out, scale: made)
        patch.setattr(condensation, "load_digits", digits)
        drawn_once(patch)
        folder = tmp_path_factory.mktemp("demo")
        yield demo.run(Settings(out=folder, scale="tiny")), folder
