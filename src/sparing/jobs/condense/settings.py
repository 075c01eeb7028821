"""Settings of a condensation, checked before anything is read or written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from sparing.errors import require
from sparing.jobs.limits import (
    AtLeast,
    Budget,
    Count,
    CountOrZero,
    Group,
    Rate,
    Several,
    Share,
    ShareBelowOne,
    SizeOrZero,
)
from sparing.jobs.schedule import Schedule
from sparing.jobs.settings import Saving, Seeded

Data = Literal["mnist", "fashion-mnist", "cifar10"]
Part = Literal["images", "labels", "rates"]
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
    """Inner steps that it looks at (count), of a shorter inner run all; the paper does not give its own."""

    ends: Literal["last", "random"] = "random"
    """Where these steps end: at the last inner step, or at one drawn for each outer step (random windows, RaT-BPTT),
    which also makes the outer step cheaper: the inner run stops there."""


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
    """How images are judged: fresh nets are trained on them, by the learned rates where these are learned."""

    steps: Count = 300
    """Steps that a fresh net is trained for where rates are not learned, and on real images (count)."""

    lr: Rate = 0.02
    """First learning rate of that training, decayed to 0 along half a cosine; on real images the best on held-out
    images of this one and some multiples of it."""

    nets: Count = 5
    """Fresh nets that judge the final images, and as many draws of real ones (count)."""


def usual_steps(per_class: int) -> int:
    """Inner steps where none are given, by the number of images a class."""
    return 25 if per_class < 10 else 10


@dataclass(frozen=True, kw_only=True)
class Condense(Saving, Seeded):
    """Distil a data set into a few images per class, so that a fresh net trained on them alone does well.

    Outer loop: change the images, and if asked their soft labels and the learning rate of each inner step, so that a
    net freshly trained with them has a small loss on real images; the method says how the gradient through that
    training is computed. The page compares with as many real images. Defaults fit one core; the paper's are
    `--method forward-gradient --forward.directions 512 --start noise --width 128 --unroll 100 --inner-lr 0.01
    --batch 512 --steps 10000 --outer-lr 0.01 --outer-schedule linear --clip-medians 0 --average 0 --shift 0
    --evaluation.steps 1000 --evaluation.lr 0.01`, but for pixels, which are centred here.
    OUT gets images.safetensors, images.png, report.html, record.jsonl and checkpoints/.

    Several processes share out the directions of (FG)²U: `torchrun --nproc-per-node 2 -m sparing condense --method
    forward-gradient`. One number a direction travels, the first process writes and judges, and with `forward.chunk` 1
    the images are those of one process to the bit; with larger chunks rounding differs. A process that is lost is
    waited for once (five minutes), its directions of that step are left out, and the others go on; torchrun itself
    ends all, and `resume` goes on.
    """

    out: Path = Path("runs/condense")

    data: Data = "mnist"
    """What is condensed: 10 classes each; fetched on first use."""

    per_class: Count = 1
    """Condensed images per class (count); the paper's IPC."""

    method: Method = "truncated"
    """How the hypergradient is computed: (FG)²U, truncated or full reverse, reverse from checkpoints, three implicit
    ones, or two-phase: Hessian-free first, then (FG)²U. On MNIST windows of ten in 25 steps ended as high as full
    reverse through 25 in ten minutes, and higher in less."""

    learn: Annotated[tuple[Part, ...], Several()] = ("images",)
    """What is learned: images; labels as a distribution over the classes for each image (soft labels); one learning
    rate for each inner step, which fresh nets are then trained by."""

    forward: Forward = field(default_factory=Forward)
    truncated: Truncated = field(default_factory=Truncated)
    neumann: Neumann = field(default_factory=Neumann)
    conjugate_gradient: ConjugateGradient = field(default_factory=ConjugateGradient)
    two_phase: TwoPhase = field(default_factory=TwoPhase)

    rates_per: Literal["step", "tensor"] = "step"
    """Whether learned rates are one an inner step, or one an inner step and weight tensor of the net."""

    width: Count = 16
    """Width of the net (count): channels of each block. On MNIST three blocks of 32 ended 2 points above 16 in ten
    minutes (two seeds); two blocks, through ten inner steps, 3 points below in one trial of 120 s."""

    depth: Annotated[int, AtLeast(1, "a net has blocks, and each halves the image", most=4)] = 3
    """Blocks of the net (count)."""

    unroll: Count | None = None
    """Inner steps per outer step (count), most of them with random windows; the paper's T; none: 25, and 10 from ten
    images a class on. On MNIST, one image a class and three blocks, 25 ended 4 points above 10 in ten minutes, and one
    below in 80 s; with two blocks half a point above; on CIFAR-10 5 below."""

    inner_lr: Rate | None = None
    """First learning rate of the inner loop: gradient descent with momentum 0.9, decayed to 0 along half a cosine;
    learned rates all begin at it; none: 0.05, and 0.2 from ten images a class on, which on MNIST (three blocks, no
    shifts) ended 5 points above 0.05 in equal time, and above real images, where 0.05 did not."""

    shift: CountOrZero = 1
    """Augmentation: most pixels that the condensed images are moved by, to each side, in every inner step anew, and
    when nets are taught, on real images too; 0: none. On MNIST, one image a class, 1 ended 2 points above 0 in
    equal time; real images gain as much. What comes in is black."""

    penalty: SizeOrZero = 1e-4
    """Weight of the penalty in the loss: of ‖θ‖² (no half) in the inner one."""

    steps: Count = 4000
    """Optimizer steps (count): outer ones."""

    seconds: Budget | None = None
    """Time budget (s): CPU time, summed over threads, of the outer loop, in place of `steps`: a few steps are timed,
    from which their number is fixed once and recorded; a run of one phase with that `steps` has the same bits;
    none: no limit."""

    outer_lr: Rate = 0.02
    """First learning rate of the outer Adam, for images, which are 0 to 1."""

    label_lr: Rate = 0.02
    """The same for soft labels, as logits."""

    rate_lr: Rate = 0.02
    """The same for learned rates, as logarithms."""

    outer_schedule: Schedule = "cosine"
    """How the outer rates go: half a cosine or a line down to 0, or flat."""

    clip_medians: SizeOrZero = 2.0
    """Longest hypergradient, in median lengths of the last hundred: longer ones are shortened to it; 0: none is."""

    average: ShareBelowOne = 0.98
    """Share that the average over outer steps keeps at each; the average is what is judged and saved; 0: the last."""

    start: Literal["real", "noise", "grey"] = "real"
    """Images at the beginning: real ones drawn from the training part, uniform noise, as the paper's, or grey."""

    batch: Count = 256
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

    @property
    def inner_steps(self) -> int:
        """Inner steps per outer step, given or by the number of images a class."""
        return self.unroll or usual_steps(self.per_class)

    @property
    def inner_rate(self) -> float:
        """First learning rate of the inner loop, given or by the number of images a class."""
        if self.inner_lr is not None:
            return self.inner_lr
        return 0.05 if self.per_class < 10 else 0.2

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        super().__post_init__()
        chunk, directions = self.forward.chunk, self.forward.directions
        fits = chunk is None or chunk <= directions
        require(fits, "forward.chunk", chunk, f"there are {directions} directions", "pass 1 to that many, or none")
        blind = self.method in {"hessian-free", "neumann", "conjugate-gradient"}
        why, do = f"{self.method} looks at the end of the run, where no rate acts", "pass --learn images labels"
        if self.method == "two-phase" and self.two_phase.first > 0:
            blind, why = True, "its first phase, Hessian-free, looks at the end of the run, where no rate acts"
            do = f"{do}, or --method forward-gradient"
        require(not blind or "rates" not in self.learn, "learn", " ".join(self.learn), why, do)
        given = self.judge == "test" or self.held_out_images > 0
        require(given, "judge", self.judge, "nothing is held out", "pass --held-out-images 1000 or more")
