"""Settings of a condensation, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparing.errors import require
from sparing.jobs.folder import check_intent
from sparing.jobs.limits import at_least, positive

Data = Literal["mnist", "fashion-mnist", "cifar10"]
Method = Literal[
    "forward-gradient", "truncated", "hessian-free", "neumann", "conjugate-gradient", "reverse", "checkpointed",
    "two-phase",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Condense:
    """Distil a data set into a few images per class, so that a fresh net trained on them alone does well.

    Outer loop: change the images so that a net freshly trained on them has a small loss on real ones; the method says
    how the gradient through that training is computed. Defaults are the paper's; on a few cores pass a smaller width
    and unroll. OUT gets images.safetensors, images.png, report.html, record.jsonl and checkpoints/.

    Several processes share out the directions of (FG)²U: `torchrun --nproc-per-node 2 -m sparing condense`. One number
    a direction travels, the first process writes and judges, and with `chunk` 1 the images are those of one process to
    the bit; with larger chunks rounding differs. A process that is lost is waited for once (five minutes), its
    directions of that step are left out, and the others go on; torchrun itself ends all, and `resume` goes on.
    """

    out: Path = Path("runs/condense")
    """Directory for everything this run writes."""

    data: Data = "mnist"
    """What is condensed: 10 classes each; fetched on first use."""

    per_class: int = 1
    """Condensed images per class (count); the paper's IPC."""

    method: Method = "forward-gradient"
    """How the hypergradient is computed: (FG)²U, truncated or full reverse, reverse from checkpoints, three implicit
    ones, or two-phase: Hessian-free first, then (FG)²U."""

    width: int = 128
    """Channels of the net's three blocks (count)."""

    unroll: int = 100
    """Inner steps per outer step (count); the paper's T."""

    inner_lr: float = 0.01
    """First learning rate of the inner gradient descent (its momentum is 0.9), decayed to 0 along half a cosine."""

    penalty: float = 1e-4
    """Weight of ‖θ‖² (no half) in the inner loss."""

    steps: int = 10_000
    """Outer steps (count)."""

    seconds: float | None = None
    """CPU seconds, summed over threads, for the outer loop in place of `steps`: a few steps are timed, and from them
    the number of steps is fixed once and recorded; a run of one phase with that `steps` has the same bits."""

    outer_lr: float = 0.01
    """First learning rate of the outer Adam (images are 0 to 1), decayed linearly to 0."""

    start: Literal["noise", "grey"] = "noise"
    """Images at the beginning: uniform noise, as the paper's, or grey, where what is learnt shows sooner."""

    batch: int = 512
    """Real images per outer step (count)."""

    directions: int = 32
    """Random directions per outer step of (FG)²U (count); the paper's b."""

    chunk: int | None = None
    """Directions carried at once (count): memory grows with them; none: all."""

    truncate: int = 10
    """Last inner steps that truncated reverse looks at (count); the paper does not give its own."""

    terms: int = 20
    """Terms of the Neumann series, or iterations of conjugate gradient (count)."""

    neumann_step: float = 0.01
    """Step α of the Neumann series; a run stops where it is not below 2 / λ_max of the inner Hessian. On MNIST λ_max
    was 4 to 52 in a trial, so that 0.01 is about a quarter of the limit or less."""

    damping: float = 0.001
    """Added to the Hessian's diagonal by conjugate gradient."""

    first_phase: float = 0.5
    """Share of the outer steps (with `seconds`: of the time) that two-phase spends on Hessian-free (0 to 1)."""

    eval_steps: int = 1000
    """Steps that a fresh net is trained for when the images are judged (count)."""

    eval_lr: float = 0.01
    """First learning rate of that training, decayed to 0 along half a cosine."""

    eval_nets: int = 5
    """Fresh nets that judge the final images (count)."""

    looks: int = 4
    """Times at which the images are kept and judged by one net, evenly over the run, the start apart (count)."""

    held_out: int = 5000
    """Training images set aside for choosing rates (count): none of them is learnt from."""

    judge: Literal["test", "held-out"] = "test"
    """Real images that the nets are judged on; choose settings by `held-out`, report `test`."""

    compare: bool = False
    """Whether the bytes of one outer step are measured for every method (yes) or for the chosen one (no); full reverse
    may need far more memory than the run itself."""

    seed: int = 0
    """Start of every stream of random numbers: images, nets, batches, directions."""

    save_every: int = 50
    """Outer steps between checkpoints (count); 0: only when interrupted."""

    resume: bool = False
    """Whether to go on from the newest checkpoint in `out` (yes or no)."""

    overwrite: bool = False
    """Whether a run that `out` already holds may be deleted (yes or no)."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before any file is opened."""
        counts = ("per_class", "width", "unroll", "steps", "batch", "directions", "truncate", "terms", "eval_steps")
        at_least(1, self, *counts, "eval_nets", why="it counts things to do")
        at_least(0, self, "save_every", "held_out", "looks")
        sizes = ("inner_lr", "outer_lr", "eval_lr", "neumann_step")
        positive(self, *sizes, why="a step needs a positive finite size", do="pass one such as 0.01")
        at_least(0, self, "penalty", "damping", why="it is a finite size")
        positive(self, "seconds", why="no step would be taken", do="pass a positive number, or --steps")
        check_intent(resume=self.resume, overwrite=self.overwrite)
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Refuse settings that contradict each other."""
        fits = self.chunk is None or 1 <= self.chunk <= self.directions
        require(fits, "chunk", self.chunk, f"there are {self.directions} directions", "pass 1 to that many, or none")
        fits = self.method != "truncated" or self.truncate <= self.unroll
        why = f"the inner run has {self.unroll} steps"
        require(fits, "truncate", self.truncate, why, "pass at most that many, or a larger --unroll")
        require(0 <= self.first_phase <= 1, "first_phase", self.first_phase, "it is a share", "pass 0 to 1")
        given = self.judge == "test" or self.held_out > 0
        require(given, "judge", self.judge, "nothing is held out", "pass --held-out 1000 or more")
