"""Settings that several verbs share, each with its sentence and its bounds written once; verbs are made of these parts.

A verb that wants another default declares the field again, without a sentence: ``out: Path = Path("runs/scan")``.
Nothing here loads torch, so that ``sparing VERB --help`` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sparing.errors import require
from sparing.jobs.limits import Checked, Count, CountOrZero, Group, Rate, Several, ShareBelowOne, SizeOrZero
from sparing.jobs.schedule import Schedule

if TYPE_CHECKING:
    from sparing.sharding import LocalSteps

RuleName = Literal["sp", "mup", "supar", "init-only", "rate-only"]


@dataclass(frozen=True, kw_only=True)
class Output(Checked):
    """Where a run writes."""

    out: Path
    """Folder for everything this run writes."""

    overwrite: bool = False
    """Whether a run that `out` already holds may be deleted (yes or no)."""


@dataclass(frozen=True, kw_only=True)
class Resumable(Output):
    """A run that goes on where it stopped."""

    resume: bool = False
    """Whether to go on with the run in `out` where it stopped, to the same bits (yes or no)."""

    def __post_init__(self) -> None:
        """Refuse to go on with a run and to delete it at once."""
        super().__post_init__()
        both = self.resume and self.overwrite
        why = "one goes on with a run, the other deletes it"
        require(not both, "resume", "and overwrite", why, "pass one of them")


@dataclass(frozen=True, kw_only=True)
class Saving(Resumable):
    """A run with checkpoints at a pace of its own."""

    save_every: CountOrZero = 100
    """Steps between checkpoints (count); 0: only when interrupted and at the end."""


@dataclass(frozen=True, kw_only=True)
class Seeded(Checked):
    """A run with one seed."""

    seed: int = 0
    """Start of every stream of random numbers."""


@dataclass(frozen=True, kw_only=True)
class FromHub(Checked):
    """A verb that takes models by their names on the Hugging Face hub."""

    download: bool = True
    """Whether what is named OWNER/NAME, and is neither here nor in the Hugging Face cache, may be downloaded (yes or
    no); HF_HUB_OFFLINE=1 says no too."""


@dataclass(frozen=True, kw_only=True)
class Repeated(Checked):
    """A verb that runs the same once per seed."""

    seeds: Annotated[tuple[int, ...], Several()] = (0, 1, 2)
    """One run for each of these starts of all streams of random numbers."""


@dataclass(frozen=True, kw_only=True)
class Steps(Seeded):
    """A loop of optimizer steps."""

    steps: Count | None = None
    """Optimizer steps (count)."""

    batch: Count = 1
    """Rows per step (count)."""

    lr: Rate | None = None
    """Peak learning rate."""

    schedule: Schedule = "cosine"
    """How the learning rate goes after warm-up: half a cosine or a line down to 0, or flat."""

    warmup: CountOrZero = 0
    """Steps over which the learning rate rises linearly to its peak (count)."""

    weight_decay: SizeOrZero = 0.0
    """Weight decay λ: decoupled, of matrices alone, per step and unit of learning rate."""

    clip: SizeOrZero = 1.0
    """Norm above which gradients are scaled down (unit of the gradient norm); 0: never."""

    evaluate_every: CountOrZero = 0
    """Steps between measurements of the held-out loss (count); 0: before and after only."""


@dataclass(frozen=True, kw_only=True)
class Scaled(Checked):
    """A model whose learning rates follow a rule of scaling, and whose masks may change."""

    layers: Count = 4
    """Blocks of the model (count): Transformer blocks, or hidden layers of a net."""

    base_width: Count | None = None
    """Width at which the rules change nothing (count): of the dense model that `lr` was tuned on; none: the model's."""

    decay: Literal["independent", "coupled", "width", "sqrt"] = "independent"
    """What stays of weight decay as rates are scaled: the decay per step, the coefficient, or per step a law in width
    or its root."""

    dynamic: Literal["none", "rigl", "set", "gmp"] = "none"
    """How masks change: never, RigL, SET, or by pruning from dense to the density (GMP)."""


@dataclass(frozen=True, kw_only=True)
class OnDevice(Checked):
    """A run that chooses its device."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model lives; auto: the first CUDA device, else the processor."""


@dataclass(frozen=True, kw_only=True)
class Local(Group, name="local"):
    """Steps that each group of ranks takes alone, under a plan without G (DiLoCo)."""

    every: CountOrZero = 0
    """Steps of each group between two outer steps, in which all groups meet (count); 0: all ranks take each step
    together."""

    rate: Rate = 0.7
    """Learning rate of the outer step."""

    momentum: ShareBelowOne = 0.9
    """Momentum of the outer step, Nesterov's."""

    bits: Literal[4, 8, 32] = 32
    """Bits of a weight's difference between groups; 32: exact. What fewer leave is sent in the next outer step."""

    def in_use(self, settings: Any) -> bool:
        """Whether groups train alone."""
        del settings
        return self.every > 0

    def steps(self) -> LocalSteps | None:
        """As the engine takes it."""
        # here, because it loads torch, which help and completion need not wait for
        from sparing.sharding import LocalSteps, LowBit

        wire = None if self.bits == 32 else LowBit(bits=self.bits)
        return LocalSteps(every=self.every, rate=self.rate, momentum=self.momentum, wire=wire) if self.every else None

    def check_multiple(self, name: str, value: int) -> None:
        """Refuse to look at weights of all groups where each has its own; 0 is never."""
        why, do = "groups have weights of their own between outer steps", f"pass a multiple of {self.every}, or 0"
        require(not self.every or value % self.every == 0, name, value, why, do)


@dataclass(frozen=True, kw_only=True)
class Parallel(OnDevice):
    """A run that several ranks may share."""

    plan: str = "none"
    """How ranks share parameters, gradients and optimizer state: `none` is one process; `auto` measures the network
    and chooses; or three of N (every rank holds all), I (cut inside a group), G (cut over all), such as IIG. 16-bit
    weights then have 32-bit copies. Start it with torchrun; the global batch stays the same on any number of ranks."""

    groups: Count | None = None
    """Groups of ranks that a slow network joins (count); none: one per machine, or those of `topology`."""

    topology: Path | None = None
    """File of `sparing probe` that says how fast the links are; none: `auto` measures them."""

    engine: Literal["sparing", "fsdp2"] | None = None
    """Whose hooks gather and free what a plan cuts: this package's, on processors, or PyTorch's `fully_shard`
    (`fsdp2`); none: `fsdp2` on CUDA, `sparing` elsewhere. A run may go on with the other."""

    memory: str | None = None
    """Memory of a device that a plan must keep to, such as 80GB or 80GiB; none: no limit."""

    local: Local = field(default_factory=Local)

    def __post_init__(self) -> None:
        """Refuse settings of several ranks without a plan, and plans that are none."""
        super().__post_init__()
        # here, because it loads torch, which help and completion need not wait for
        from sparing.jobs.parallel import check_parallel

        check_parallel(self)


@dataclass(frozen=True, kw_only=True)
class Evaluated(Checked):
    """A verb that measures a model of language or images on rows."""

    rows: Count = 1000
    """Rows to measure on (count): images, or rows of tokens."""

    calibration: Count = 1000
    """Training images that batch-norm statistics are taken from (count)."""


@dataclass(frozen=True, kw_only=True)
class MaskUpdates(Group, name="mask_updates", flag="dynamic", choices=("rigl", "set", "gmp")):
    """When masks change."""

    every: Count = 100
    """Optimizer steps between changes of the masks (count)."""
