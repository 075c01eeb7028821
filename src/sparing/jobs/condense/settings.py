"""Settings of a condensation, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sparing.errors import require
from sparing.jobs.limits import Budget, Count, CountOrZero, Group, Rate, Share, SizeOrZero
from sparing.jobs.settings import Saving, Seeded

Data = Literal["mnist", "fashion-mnist", "cifar10"]
Method = Literal[
    "forward-gradient", "truncated", "hessian-free", "neumann", "conjugate-gradient", "reverse", "checkpointed",
    "two-phase",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Forward(Group, name="forward", flag="method", choices=("forward-gradient", "two-phase")):
    """Settings of (FG)²U, used by `--method forward-gradient` and `two-phase`."""

    directions: Count = 32
    """Random directions of one estimate (count), b."""

    chunk: Count | None = None
    """Directions carried at once (count): memory grows with them; none: all."""


@dataclass(frozen=True, kw_only=True)
class Truncated(Group, name="truncated", flag="method", choices=("truncated",)):
    """Settings of truncated reverse, used by `--method truncated`."""

    steps: Count = 10
    """Last inner steps that it looks at (count); the paper does not give its own."""


@dataclass(frozen=True, kw_only=True)
class Neumann(Group, name="neumann", flag="method", choices=("neumann",)):
    """Settings of the Neumann series, used by `--method neumann`."""

    terms: Count = 20
    """Terms of the series (count)."""

    step: Rate = 0.01
    """Step α; a run stops where it is not below 2 / λ_max of the inner Hessian. On MNIST λ_max was 4 to 52 in a trial,
    so that 0.01 is about a quarter of the limit or less."""


@dataclass(frozen=True, kw_only=True)
class ConjugateGradient(Group, name="conjugate_gradient", flag="method", choices=("conjugate-gradient",)):
    """Settings of conjugate gradient, used by `--method conjugate-gradient`."""

    iterations: Count = 20
    """Iterations (count)."""

    damping: SizeOrZero = 0.001
    """Added to the Hessian's diagonal."""


@dataclass(frozen=True, kw_only=True)
class TwoPhase(Group, name="two_phase", flag="method", choices=("two-phase",)):
    """Settings of Hessian-free first, then (FG)²U, used by `--method two-phase`."""

    first: Share = 0.5
    """Share of the outer steps (with `seconds`: of the time) that it spends on Hessian-free (0 to 1)."""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Group, name="evaluation"):
    """How the images are judged: fresh nets are trained on them."""

    steps: Count = 1000
    """Steps that a fresh net is trained for (count)."""

    lr: Rate = 0.01
    """First learning rate of that training, decayed to 0 along half a cosine."""

    nets: Count = 5
    """Fresh nets that judge the final images (count)."""


@dataclass(frozen=True, kw_only=True)
class Condense(Saving, Seeded):
    """Distil a data set into a few images per class, so that a fresh net trained on them alone does well.

    Outer loop: change the images so that a net freshly trained on them has a small loss on real ones; the method says
    how the gradient through that training is computed. Defaults are the paper's; on a few cores pass a smaller width
    and unroll. OUT gets images.safetensors, images.png, report.html, record.jsonl and checkpoints/.

    Several processes share out the directions of (FG)²U: `torchrun --nproc-per-node 2 -m sparing condense`. One number
    a direction travels, the first process writes and judges, and with `forward.chunk` 1 the images are those of one
    process to the bit; with larger chunks rounding differs. A process that is lost is waited for once (five minutes),
    its directions of that step are left out, and the others go on; torchrun itself ends all, and `resume` goes on.
    """

    out: Path = Path("runs/condense")

    data: Data = "mnist"
    """What is condensed: 10 classes each; fetched on first use."""

    per_class: Count = 1
    """Condensed images per class (count); the paper's IPC."""

    method: Method = "forward-gradient"
    """How the hypergradient is computed: (FG)²U, truncated or full reverse, reverse from checkpoints, three implicit
    ones, or two-phase: Hessian-free first, then (FG)²U."""

    forward: Forward = field(default_factory=Forward)
    truncated: Truncated = field(default_factory=Truncated)
    neumann: Neumann = field(default_factory=Neumann)
    conjugate_gradient: ConjugateGradient = field(default_factory=ConjugateGradient)
    two_phase: TwoPhase = field(default_factory=TwoPhase)

    width: Count = 128
    """Width of the net (count): channels of its three blocks."""

    unroll: Count = 100
    """Inner steps per outer step (count); the paper's T."""

    inner_lr: Rate = 0.01
    """First learning rate of the inner loop: gradient descent with momentum 0.9, decayed to 0 along half a cosine."""

    penalty: SizeOrZero = 1e-4
    """Weight of the penalty in the loss: of ‖θ‖² (no half) in the inner one."""

    steps: Count = 10_000
    """Optimizer steps (count): outer ones."""

    seconds: Budget | None = None
    """Time budget (s): CPU time, summed over threads, of the outer loop, in place of `steps`: a few steps are timed,
    from which their number is fixed once and recorded; a run of one phase with that `steps` has the same bits;
    none: no limit."""

    outer_lr: Rate = 0.01
    """First learning rate of the outer Adam, decayed linearly to 0; images are 0 to 1."""

    start: Literal["noise", "grey"] = "noise"
    """Images at the beginning: uniform noise, as the paper's, or grey, where what is learnt shows sooner."""

    batch: Count = 512
    """Rows per step (count): real images of an outer one."""

    evaluation: Evaluation = field(default_factory=Evaluation)

    measurements: CountOrZero = 4
    """Measurements in the course of the run (count), evenly, the start apart: the images are kept, and judged by one
    net."""

    held_out_images: CountOrZero = 5000
    """Training images set aside for choosing rates (count): none of them is learnt from."""

    judge: Literal["test", "held-out"] = "test"
    """Real images that the nets are judged on; choose settings by `held-out`, report `test`."""

    compare: bool = False
    """Whether the bytes of one outer step are measured for every method (yes) or for the chosen one (no); full reverse
    may need far more memory than the run itself."""

    save_every: CountOrZero = 50

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        super().__post_init__()
        chunk, directions = self.forward.chunk, self.forward.directions
        fits = chunk is None or chunk <= directions
        require(fits, "forward.chunk", chunk, f"there are {directions} directions", "pass 1 to that many, or none")
        fits = self.method != "truncated" or self.truncated.steps <= self.unroll
        why = f"the inner run has {self.unroll} steps"
        require(fits, "truncated.steps", self.truncated.steps, why, "pass at most that many, or a larger --unroll")
        given = self.judge == "test" or self.held_out_images > 0
        require(given, "judge", self.judge, "nothing is held out", "pass --held-out-images 1000 or more")
