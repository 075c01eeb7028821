"""The whole job: load, condense, judge, save, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sparing.errors import require
from sparing.hypergrad.trees import ravel
from sparing.jobs.condense.inputs import Inputs, gather
from sparing.jobs.condense.learned import Phi
from sparing.jobs.condense.loop import UNITS, add_real_images, bytes_of_a_step, fix_length_, train
from sparing.jobs.condense.methods import TITLES, build_method
from sparing.jobs.condense.page import PAGE, gallery, write_page
from sparing.jobs.condense.ranks import Ranks, join_ranks
from sparing.jobs.condense.settings import Condense
from sparing.jobs.condense.state import TrainState, restore_, start
from sparing.jobs.disk import refusing_to_write, save_tensors
from sparing.jobs.folder import print_page_path
from sparing.jobs.run import Run
from sparing.report import Record
from sparing.sharding.network.consistency import checksum

IMAGES, PICTURE = "images.safetensors", "images.png"


def run_of(settings: Condense, ranks: Ranks) -> Run:
    """A run, described; it stays the same whether or not the bytes of other methods are measured too."""
    return Run(settings, writes=(IMAGES, PICTURE), ignore={"compare"}, ranks=ranks)


def save_images(path: Path, phi: Phi, labels: Tensor, kept: Mapping[int, Tensor]) -> None:
    """Write condensed images as safetensors, whole or not at all.

    Names: "images" (0 to 1), "labels" (classes), "step-00000010" (images on the way), and where they were learned
    "soft_labels" (probabilities) and "rates" (of each inner step, or inner step and weight tensor).
    """
    tensors = {"images": phi["images"], "labels": labels}
    if "labels" in phi:
        tensors["soft_labels"] = phi["labels"].softmax(1)
    if "rates" in phi:
        tensors["rates"] = phi["rates"].exp()
    save_tensors(path, tensors | {f"step-{step:08d}": then for step, then in kept.items()})


def run(settings: Condense) -> Record:
    """Condense a data set as the command line does; under torchrun the first process's record is whole and written."""
    require(
        settings.measurements >= 1, "measurements", settings.measurements, "the page shows the way", "pass 1 or more"
    )
    with join_ranks(settings) as ranks, run_of(settings, ranks) as run:
        state = _start(run, ranks)
        train(state, run.record, partial(_steps, run))
        if ranks.first:
            add_real_images(state, run.record)
            _finish(run, state)
    return run.record


def _steps(run: Run, state: TrainState, take_step: Callable[[], Mapping[str, Any]], **how: Any) -> None:
    """Take the steps and save the last, which takes longer to judge than to save."""
    run.steps(state, take_step, **how)
    if state.ranks.first:
        run.save(state)


def _start(run: Run, ranks: Ranks) -> TrainState:
    """Read all there is, then begin a run or go on with it, on all processes alike."""
    settings: Condense = run.settings
    each = "one condensed image" if settings.per_class == 1 else f"{settings.per_class} condensed images"
    question = f"How well do nets do that are trained on {each} per class alone?"
    record = Record(question=question, settings=settings, seed=settings.seed, units=dict(UNITS))

    def read() -> tuple[bool, Inputs]:
        return run.resume(record), gather(settings.data, held_out=settings.held_out_images)

    resumed, inputs = ranks.in_turn(read)
    state = start(settings, inputs)
    state.ranks = ranks
    if resumed:
        restore_(state, run.interrupted)
    ranks.check_same(run.mark | {"outer step": state.step, "images": checksum(ravel(state.phi))})
    run.claim(defer_signals=False)
    if not resumed:
        ranks.on_first_rank(partial(fix_length_, state, record))
        state.steps, state.turn = ranks.broadcast(state.steps, state.turn)
    ranks.on_first_rank(partial(_measure_bytes, state, record))
    run.defer_signals()
    return state


def _measure_bytes(state: TrainState, record: Record) -> None:
    """Measure what a step of each method holds, where that is not recorded yet; a resumed run may ask for more."""
    chosen, known = state.settings.method, {row["method"] for row in record.table("memory")}
    others = [method for method in TITLES if method not in {chosen, "two-phase"}] if state.settings.compare else []
    for method in (chosen, *others):
        if TITLES[method] in known:
            continue
        value = state.ranks.per_rank(build_method(state.settings, method))
        record.add("memory", method=TITLES[method], setting=str(value), peak=bytes_of_a_step(state, value))


def _finish(run: Run, state: TrainState) -> None:
    """Write images, record and page."""
    classes, kept = state.inputs.classes, state.kept
    title = f"{state.inputs.name} condensed to {len(state.images)} images"
    save_images(run.folder.at(IMAGES), state.mean, state.labels, kept)
    with refusing_to_write("saving", run.folder.path):
        gallery(state.images, classes, title=title).save_png(run.folder.at(PICTURE))
    run.finish(lambda record, path: write_page(record, path, kept, classes))


def show(record: Record) -> None:
    """Print the tables of a run on standard output; the last line says where the page is."""
    PAGE.print_tables(record)
    print_page_path(record)
