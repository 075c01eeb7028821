"""Settings of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

from sparing.jobs.limits import Several
from sparing.jobs.settings import Resumable, Seeded

Source = Literal["auto", "stories", "smollm", "bundled"]
Scale = Literal["tiny", "small"]
Name = Literal["memory", "condense", "transfer", "shard", "valley", "federate"]

NAMES: Final[tuple[Name, ...]] = get_args(Name)  # in the order of the page


@dataclass(frozen=True, kw_only=True)
class Settings(Resumable, Seeded):
    """Six questions on real data, each answered by a small run, and one page that shows the answers.

    Memory: fine-tune a pretrained language model four ways, full, LISA, LISA with a frozen embedding, LoRA. Condense:
    distil handwritten digits to one image per class by three hypergradients in equal CPU time. Transfer: learning-rate
    curves of a net at three densities under three rules of scaling. Shard: plan a model of 65 billion parameters for a
    cluster with a slow network, and split a small one over four processes. Valley: walk around a finished net, and
    average nets, predicted and measured. Federate: clients that keep their data, and a server that averages models.
    """

    out: Path = Path("runs/demo")

    chapters: Annotated[tuple[Name, ...], Several("a demo is made of chapters")] = NAMES
    """Chapters to run, such as `memory condense`; with `--resume` they join those that are there."""

    scale: Scale = "small"
    """Size of the runs: small takes about ten minutes on two cores, tiny three, for a first look at the page; methods
    that are close are not told apart there."""

    source: Source = "auto"
    """Model and text of the first chapter: stories (15 M parameters, through npm), smollm (135 M, through pip), bundled
    (a tiny model trained here, no network); auto takes the first that is available."""
