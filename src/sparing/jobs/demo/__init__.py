"""``sparing demo``: the whole mission in miniature, on real data; one chapter per technique, one page to read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sparing.jobs.demo import condensation, federated, sharding, transfer, valley
from sparing.jobs.demo.layers import run_chapter
from sparing.jobs.demo.materials import Source, gather
from sparing.jobs.demo.page import show, write_page
from sparing.report import Record

UNITS = {
    "dev_loss": "nat/token", "loss": "nat/token", "loss_before": "nat/token", "loss_after": "nat/token", "seconds": "s",
    "seconds_per_step": "s", "params": "B", "grads": "B", "optimizer": "B", "activations": "B", "transient": "B",
    "peak": "B", "peak_predicted": "B", "peak_measured": "B",
}  # fmt: skip

QUESTION = "How little memory does it take to fine-tune a language model, and what does the saving cost?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Six chapters on real data, and a page that shows them.

    Fine-tune a pretrained language model four ways: full, LISA, LISA with a frozen embedding, LoRA, each at a learning
    rate from a small sweep; held-out loss against seconds and bytes, on real text of another kind than the model has
    seen. Then condense handwritten digits to one image per class by three hypergradients in equal CPU time.
    Then learning-rate curves of a net on digits at three densities, under three rules of scaling. Then a model of 65
    billion parameters planned for a cluster with a slow network, and four processes of this machine that split a small
    one in four ways. Then the valley around a small net, and averages of two nets, predicted and measured. Last,
    clients that keep their data, and a server that averages their models.
    """

    out: Path = Path("runs/demo")
    """Folder of the record and the page."""

    source: Source = "auto"
    """Model and text: stories (15 M parameters, through npm), smollm (135 M, through pip), bundled (a tiny model
    trained here, no network); auto takes the first that can be had."""

    seed: int = 0
    """Seed of the order of rows, of the layer draws, of the images, nets and directions of the second
    chapter, of the weights and masks of the third, of the weights and rows of the fourth, of the nets and noise of
    the fifth, and of the clients of the sixth."""

    resume: bool = False
    """Go on where an interrupted demo stopped, method by method, instead of starting over."""


def run(settings: Settings) -> Record:
    """Run the chapters and write record and page.

    Args:
        settings: What to run and where to write.

    Returns:
        The record: tables "sweep", "arms", "curve", "memory", "switches", "samples" of the first chapter;
        "condensed", "condense_curve", "condense_memory", "condense_data" of the second; "transfer_runs",
        "coordinates", "slopes" of the third; "shards", "shard_runs", "shard_losses" of the fourth; "valley_data",
        "valley_nets", "valley_model", "valley_curves", "valley_values", "valley_merges", "valley_lines" of the fifth;
        "federated_data", "federated_partition", "federated_rounds", "federated_price", "federated_methods",
        "federated_flower" of the sixth.
    """
    start = time.monotonic()
    path = settings.out / "record.jsonl"
    settings.out.mkdir(parents=True, exist_ok=True)
    materials = gather(settings.source, settings.out)
    record = Record(
        question=QUESTION,
        settings={"seed": settings.seed, "materials": materials.title},
        seed=settings.seed,
        units=UNITS,
    )
    if settings.resume and path.exists() and Record.read(path).settings == record.settings:
        record = Record.read(path)
    run_chapter(materials, record, seed=settings.seed, path=path)
    condensation.run_chapter(record, seed=settings.seed, path=path)
    transfer.run_chapter(record, seed=settings.seed, path=path)
    sharding.run_chapter(record, seed=settings.seed, path=path)
    valley.run_chapter(record, seed=settings.seed, path=path)
    federated.run_chapter(record, seed=settings.seed, path=path)
    page = settings.out / "report.html"
    told = {"licence": materials.licence, "materials": materials.title, "page": str(page)}
    record.add("run", seconds=time.monotonic() - start, **told)
    record.write(path)
    write_page(record, page)
    return record


__all__ = ["Settings", "run", "show"]
