"""Settings of learning token weights, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from sparing.jobs.hub import OnHub
from sparing.jobs.limits import AtLeast, Budget, Count, CountOrZero, Group, Rate, Several, Size, SizeOrZero
from sparing.jobs.settings import FromHub, Resumable, Seeded

Name = Literal["uniform", "names", "rgu", "fg-phi", "fg-psi", "checkpointed"]
"""Ways to weigh tokens; uniform and names learn nothing."""

EVERY: tuple[Name, ...] = ("uniform", "names", "rgu", "fg-phi", "fg-psi", "checkpointed")
"""All of them, in the order of the tables."""


@dataclass(frozen=True, kw_only=True)
class Forward(Group, name="forward", flag="methods", choices=("fg-phi", "fg-psi")):
    """Settings of (FG)²U, used by `--methods fg-phi fg-psi`."""

    directions: Count = 4
    """Random directions of one estimate (count), b."""


@dataclass(frozen=True, kw_only=True)
class Adapt(Resumable, Seeded, FromHub):
    """Learn which tokens of a document a language model should learn from, and compare ways to learn it.

    A small network gives every token of a stream of documents a weight; the model then takes one SGD step per
    document and is asked about all of them. The network is trained through the whole adaptation by hypergradients.
    Every method gets the same CPU seconds; the defaults take a quarter of an hour on one core. OUT gets report.html,
    record.jsonl, weights/METHOD.safetensors and checkpoints/.
    """

    out: Path = Path("runs/adapt")

    model: Annotated[Positional[str], arg(metavar="[MODEL]"), OnHub("model")] = "stories15m"
    """Pretrained language model: a folder that `save_pretrained` wrote, an asset (`sparing fetch`), or a name on the
    Hugging Face hub, OWNER/NAME."""

    data: tuple[Path, ...] = ()
    """Text files to make documents and questions from; none: two children's books of the cache."""

    elsewhere: Path | None = None
    """Text file on which adapting shall change little; none: Alice's Adventures in Wonderland."""

    methods: Annotated[tuple[Name, ...], Several()] = EVERY
    """Ways to compare: uniform weights; names, weight on names and numbers alone, which questions ask for; rgu, reverse
    through 6 documents as CaMeLS; fg-phi, (FG)²U with directions in the network's parameters; fg-psi, (FG)²U with
    directions in the token weights; checkpointed, exact reverse."""

    forward: Forward = field(default_factory=Forward)

    documents: Count = 12
    """Documents of a meta-training window (count), T; rgu uses 6. At most those there are."""

    stream: Count = 36
    """Documents of the test stream (count); at most those there are."""

    held_out_documents: Count = 24
    """Documents of the validation stream (count); at most those there are."""

    length: Annotated[int, AtLeast(8, "no sentence would fit")] = 64
    """Tokens per row (count): at most those of a document."""

    question_length: Count = 32
    """Most tokens of a question (count); of a longer one the end is kept."""

    tune: CountOrZero = 1
    """Passes of AdamW before all else (count), so that the model knows this kind of text, over the documents about
    which nothing can be asked; the result is θ₀ for every method."""

    tune_lr: Rate = 5e-4
    """Peak learning rate of these passes."""

    inner_lr: Rate = 2e-2
    """First learning rate of the inner loop: of SGD in meta-training, η. Weights of rgu and checkpointed were best at
    a half to a sixteenth of the rate that suits uniform ones: on stories15m at 0.01 and 0.005."""

    inner_clip: Size = 4.0
    """Norm above which an inner gradient is scaled down, in meta-training and in adapting alike. The papers have plain
    SGD; here learnt weights grow until a run diverges, and a gradient through such a run says nothing."""

    rates: Annotated[tuple[Rate, ...], Several()] = (1e-2, 2e-2, 4e-2, 8e-2)
    """Rates of adapting tried on the validation stream, the same for every method."""

    locality: SizeOrZero = 0.1
    """Factor of KL(p_θ₀ ‖ p_θ_T) on other text in the outer loss, c."""

    width: Annotated[int, AtLeast(2, "the head has half as many units")] = 256
    """Width of the net (count): hidden units of the weight network."""

    outer_lr: Rate = 3e-3
    """First learning rate of the outer Adam."""

    outer_clip: Size = 10.0
    """Norm above which a hypergradient is scaled down (nat): one from a run that diverged would blind Adam for long."""

    steps: Count = 1000
    """Optimizer steps (count): most outer ones of each method, if `seconds` do not end first; set it low for a run that
    resumes to the same bits on any machine."""

    seconds: Budget = 90.0
    """Time budget (s): CPU time of each method's meta-training; evaluation does not count."""

    measurements: Count = 4
    """Measurements in the course of the run (count), evenly, beside one before it: on the validation stream; the
    network that was best is kept, as the papers do."""
