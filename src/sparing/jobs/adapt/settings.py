"""Settings of learning token weights, checked before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparing.errors import require
from sparing.jobs.folder import check_intent
from sparing.jobs.limits import at_least, positive

Name = Literal["uniform", "rgu", "fg-phi", "fg-psi", "checkpointed"]
"""Ways to learn the weights; uniform learns nothing."""

EVERY: tuple[Name, ...] = ("uniform", "rgu", "fg-phi", "fg-psi", "checkpointed")
"""All of them, in the order of the tables."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapt:
    """Learn which tokens of a document a language model should learn from, and compare ways to learn it.

    A small network gives every token of a stream of documents a weight; the model then takes one SGD step per
    document and is asked about all of them. The network is trained through the whole adaptation by hypergradients.
    Every method gets the same CPU seconds; the defaults take a quarter of an hour on one core. OUT gets report.html,
    record.jsonl, weights/METHOD.safetensors and checkpoints/.
    """

    out: Path = Path("runs/adapt")
    """Directory for everything this run writes."""

    model: str = "stories15m"
    """Pretrained language model: a directory that `save_pretrained` wrote, or an asset (`sparing fetch`)."""

    books: tuple[Path, ...] = ()
    """Text files to make documents and questions from; none: two children's books of the cache."""

    elsewhere: Path | None = None
    """Text file on which adapting shall change little; none: Alice's Adventures in Wonderland."""

    methods: tuple[Name, ...] = EVERY
    """Ways to compare: uniform weights; rgu, reverse through 6 documents as CaMeLS; fg-phi, (FG)²U with directions in
    the network's parameters; fg-psi, (FG)²U with directions in the token weights; checkpointed, exact reverse."""

    documents: int = 12
    """Documents of a meta-training window (count), T; rgu uses 6."""

    stream: int = 36
    """Documents of the test stream (count)."""

    held: int = 24
    """Documents of the validation stream (count)."""

    length: int = 64
    """Most tokens of a document (count)."""

    context: int = 32
    """Most tokens of a question (count); of a longer one the end is kept."""

    tune: int = 1
    """Passes of AdamW before all else (count), so that the model knows this kind of text, over the documents about
    which nothing can be asked; the result is θ₀ for every method."""

    tune_lr: float = 5e-4
    """Peak learning rate of these passes."""

    lr: float = 2e-2
    """Inner rate of SGD in meta-training, η."""

    inner_clip: float = 4.0
    """Norm above which an inner gradient is scaled down, in meta-training and in adapting alike. The papers have plain
    SGD; here learnt weights grow until a run diverges, and a gradient through such a run says nothing."""

    rates: tuple[float, ...] = (1e-2, 2e-2, 4e-2, 8e-2)
    """Rates of adapting tried on the validation stream, the same for every method."""

    locality: float = 0.1
    """Factor of KL(p_θ₀ ‖ p_θ_T) on other text in the outer loss, c."""

    width: int = 256
    """Hidden units of the weight network (count)."""

    directions: int = 4
    """Directions of one (FG)²U estimate (count), b."""

    outer_lr: float = 3e-3
    """Rate of the outer Adam."""

    clip: float = 10.0
    """Norm above which a hypergradient is scaled down (nat): one from a run that diverged would blind Adam for long."""

    seconds: float = 90.0
    """CPU time of each method's meta-training (s); evaluation does not count."""

    steps: int = 1000
    """Most outer steps of each method (count), whichever ends first; set it low for a run that resumes to the same
    bits on any machine."""

    looks: int = 4
    """Measurements on the validation stream in the course of a method's budget, beside one before it (count); the
    network that was best is kept, as the papers do."""

    seed: int = 0
    """Start of every stream of random numbers: network, windows, directions, test stream."""

    resume: bool = False
    """Whether to go on from the newest checkpoint in `out` (yes or no)."""

    overwrite: bool = False
    """Whether a run that `out` already holds may be deleted (yes or no)."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        counts = ("documents", "stream", "held", "steps", "directions", "context", "looks")
        at_least(1, self, *counts, why="it counts things")
        at_least(0, self, "tune")
        positive(self, "lr", "tune_lr", "outer_lr", "clip", "inner_clip", "seconds")
        at_least(8, self, "length", why="no sentence would fit")
        at_least(2, self, "width", why="the head has half as many units")
        good = bool(self.rates) and all(0 < rate < math.inf for rate in self.rates)
        require(good, "rates", self.rates, "adapting needs positive finite rates", "pass some, such as 1e-3 1e-2")
        at_least(0, self, "locality", why="it is the factor of a divergence")
        require(bool(self.methods), "methods", "none", "there is nothing to do", f"pass some of {', '.join(EVERY)}")
        once = len(set(self.methods)) == len(self.methods)
        require(once, "methods", " ".join(self.methods), "each is run once", "name each once")
        check_intent(resume=self.resume, overwrite=self.overwrite)
