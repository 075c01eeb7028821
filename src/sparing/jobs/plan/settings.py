"""Settings of a plan."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from tyro.conf import Positional, arg

from sparing.errors import UserError, require
from sparing.jobs import hub
from sparing.jobs.hub import OnHub
from sparing.jobs.limits import AtLeast, Count, CountOrZero, Group, Length, Size, SizeOrZero
from sparing.jobs.lm.names import Attention, OptimizerName, Weights
from sparing.jobs.plan.cards import CARDS, REACHED, CardName
from sparing.jobs.settings import FromHub, Output

if TYPE_CHECKING:
    from sparing.jobs.lm.step import FitStep, Method
    from sparing.sharding.planner.config import Topology
    from sparing.sharding.planner.unequal import Arrangement


# what the page of `interactive` takes: whose model it is, what is compared, and where its sliders begin
SLIDERS: Final = (
    "out", "overwrite", "download", "interactive", "model", "params", "card", "batch", "length", "accumulate",
    "masters", "lisa", "lora", "groups", "per_group", "inter", "intra",
)  # fmt: skip

# of a cluster, which a topology file says
NUMBERS: Final = (
    "groups", "per_group", "domains", "inter", "middle", "intra", "sharing", "sharing_middle", "latency_inter",
    "latency_middle", "latency_intra",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lisa(Group, name="lisa"):
    """Candidates of layer sampling."""

    active: tuple[Count, ...] = (2, 4, 8)
    """Middle blocks trained at once (count), a candidate each; the paper's γ."""

    period: Count = 20
    """Optimizer steps between draws (count); the paper's K."""


@dataclass(frozen=True, kw_only=True)
class Lora(Group, name="lora"):
    """Candidates of low-rank additions."""

    ranks: tuple[Count, ...] = (16, 128)
    """Inner widths of the additions to every linear layer of the blocks (counts), a candidate each."""


@dataclass(frozen=True, kw_only=True)
class Settings(Output, FromHub):
    """What fits: full fine-tuning, LISA, LoRA, with and without checkpointing, on one device or on a cluster.

    With a cluster (a topology file that `sparing probe` wrote, or groups, GPUs and the speeds of their links) every
    method is combined with every way to split parameters, gradients and optimizer state over it. The pick, and why
    each other lost.
    """

    out: Path = Path("runs/plan")

    model: Annotated[Positional[Path | None], arg(metavar="[MODEL]"), OnHub("config")] = None
    """Folder of the model, or a config.json, or its name on the Hugging Face hub, OWNER/NAME; weights are neither
    needed nor read; none: `params` says its size."""

    params: Annotated[float, AtLeast(1, most=1e16)] | None = None
    """Parameters of a model that is not there (count), such as 65e9, divided as the LLaMA nearest in size is; none:
    those of `model`."""

    card: CardName | None = None
    """Card of a known memory and speed; none: `memory`, and no times."""

    memory: str | None = None
    """Memory of a device that a plan must keep to, such as 80GB or 80GiB (10⁹ or 2³⁰ bytes); none: the card's, or
    24GB."""

    batch: Count = 1
    """Rows per step (count): with `accumulate`, per micro-batch, what memory holds at once."""

    length: Length = 1024
    """Tokens per row (count)."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of weights and arithmetic, gradients and moments; masters and moments of a cluster are float32."""

    masters: bool = False
    """Whether what trains of a 16-bit model keeps 32-bit copies, as a run at a small rate needs (yes or no); on a
    cluster all have."""

    optimizers: tuple[OptimizerName, ...] = ("adamw-8bit", "adafactor", "apollo-mini")
    """Optimizers of full fine-tuning beside AdamW, a candidate each, on one device."""

    weights: Weights | None = "nf4"
    """Number format of frozen linear weights of the middle blocks: of further candidates, QLISA and QLoRA, on one
    device; none: no such candidates."""

    loss_tokens: CountOrZero | None = None
    """Tokens whose logits exist at once (count), as in `finetune`; 0: all of a micro-batch; none: as many as fit 256
    MiB."""

    lisa: Lisa = field(default_factory=Lisa)
    lora: Lora = field(default_factory=Lora)

    steps: Count = 1000
    """Optimizer steps (count), for the share of blocks that LISA reaches."""

    attention: Attention = "auto"
    """Fused attention, one that holds all scores, one product for each document of a packed row, which needs no mask of
    all pairs of tokens, or the one that transformers takes for the model."""

    packing: bool = True
    """Whether rows are filled with several records, as in `finetune` (yes or no): attention then needs a mask, and
    repeats grouped keys and values."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Where the model lives; it says whose kernels count with `ledger`: on CUDA a mask of dropout takes a byte per
    element."""

    ledger: bool = False
    """Run every block of each candidate on fake tensors, instead of adding what each adds or by closed formula: seconds
    to a minute each, and no longest rows."""

    topology: Path | None = None
    """File of `sparing probe` that says how fast the links are; none: the cluster is told in
    numbers, or there is one device."""

    groups: Count = 1
    """Groups of ranks that a slow network joins (count), often machines; the paper's g: the cluster in numbers."""

    per_group: Count = 1
    """Ranks of a group (count): GPUs; the paper's m. With `domains`, those of a domain."""

    domains: Count = 1
    """Domains of a group (count), which links of a middle speed join, as a rack joins NVLink domains."""

    group_sizes: tuple[Count, ...] = ()
    """GPUs of each group (counts) where groups differ, such as 8 8 4, instead of `groups` and `per_group`; with
    `topology`, on the links measured there. They are cut into equal ones; a table says what leaving some out would
    give."""

    inter: str | None = None
    """Speed of a link between groups, such as "80Gbps" or "10GB/s"; none: no groups; the paper's B."""

    middle: str | None = None
    """Speed of a link between domains of a group; none: no domains."""

    intra: str | None = None
    """Speed of a link inside a group, or inside a domain; none: one GPU each; the paper's B'."""

    sharing: Count = 1
    """GPUs of a group that share one link to other groups (count): 1 if each has its own, all if there is one."""

    sharing_middle: Count = 1
    """GPUs of a domain that share one link to other domains (count)."""

    latency_inter: SizeOrZero = 0.0
    """Time of an empty message between groups (s)."""

    latency_middle: SizeOrZero = 0.0
    """Time of an empty message between domains (s)."""

    latency_intra: SizeOrZero = 0.0
    """Time of an empty message inside a group (s)."""

    accumulate: Count = 1
    """Micro-batches per optimizer step (count); the paper's s. From the second on, gradients stay while activations
    come; `finetune` takes 8 unless told otherwise."""

    trainable: str | None = None
    """Share of every block that trains, such as 1/16 or 0.003, on a cluster; none: methods are compared."""

    gradients: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which gradients are summed and sent, on a cluster: bfloat16 as in the paper, float32 as this library's
    engine does."""

    slow_bits: Literal[8, 4] | None = None
    """Bits of gradients and of changes of parameters between groups, which round; none: those of the links inside.
    Whatever is asked, a table says what the other ways to use the same links would take."""

    engine: Literal["sparing", "fsdp2"] | None = None
    """Whose memory is counted on a cluster: this package's engine, on processors, or PyTorch's `fully_shard` (`fsdp2`),
    which keeps a shard beside weights that stay whole; none: `fsdp2` for GPUs, `sparing` with `--device cpu`, with
    `slow_bits`, or for a `topology` that was measured on processors."""

    tflops: Size | None = None
    """Arithmetic that a device really does (10¹² operations/s); none: 40 % of the card's peak and, on a cluster, only
    the links are timed."""

    bandwidth: Size | None = None
    """Speed of a device's memory (GB/s); none: the card's."""

    survives: CountOrZero = 0
    """Groups that may be lost without losing state (count): plans that keep a copy in every group."""

    interactive: Path | None = None
    """File of a page whose sliders choose model, card, links, length and batch and that computes the plan itself,
    offline; with it nothing else is written, and no model need be given; none: no such page."""

    maps: bool = True
    """Whether to draw which plan is best on other networks, with other accumulation and other trainable shares."""

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict."""
        super().__post_init__()
        # here, because it loads torch, which help need not wait for
        from sparing.memory import parse_bytes

        parse_bytes(self.room)
        given = [name for name in ("model", "params") if getattr(self, name) is not None]
        told = " and ".join(given) or "none"
        few = len(given) <= 1 if self.interactive is not None else len(given) == 1
        require(few, "model", told, "one model is planned for", "pass its folder, or --params 7e9")
        why, do = "a ledger runs the model, and --params gives none", "pass its folder, or --no-ledger"
        require(not (self.ledger and self.model is None), "ledger", True, why, do)
        self._require_cluster()
        self._require_sliders()
        if self.trainable is not None:
            share_of(self.trainable)

    def _require_sliders(self) -> None:
        """Refuse settings that the page of `interactive` does not compute with."""
        for one in fields(self) if self.interactive is not None else ():
            default = one.default if one.default_factory is MISSING else one.default_factory()
            value, why = getattr(self, one.name), "the page computes without it"
            require(one.name in SLIDERS or value == default, one.name, value, why, "omit it, or --interactive")

    def _require_cluster(self) -> None:
        """Refuse half a cluster, or settings that only a cluster has."""
        equal = (self.groups, self.per_group, self.domains) != (1, 1, 1)
        told = equal or bool(self.group_sizes)
        if self.group_sizes:
            why, do = "it says the ranks of every group", "drop --groups, --per-group and --domains"
            require(not equal, "group_sizes", list(self.group_sizes), why, do)
        if self.topology is not None:
            given = [name for name in NUMBERS if getattr(self, name) != getattr(type(self), name)]
            do = f"drop --topology, or {', '.join('--' + name.replace('_', '-') for name in given)}"
            require(not given, "topology", self.topology, "it has numbers", do)
        sizes = self.group_sizes or (self.per_group,)
        counts = {"inter": max(self.groups, len(self.group_sizes)), "middle": self.domains, "intra": max(sizes)}
        for name, count in counts.items() if self.topology is None else ():
            speed, why = getattr(self, name), f"ranks talk over it ({count})"
            require(count == 1 or speed is not None, name, "nothing", why, f'pass its speed, such as --{name} "80Gbps"')
        why, do = "sums in 16 bits would lose what rounding owes", "pass --gradients float32"
        require(self.slow_bits is None or self.gradients == "float32", "slow_bits", self.slow_bits, why, do)
        why, do = "low-bit links are of this package's engine", "leave it out, or --slow-bits"
        require(self.slow_bits is None or self.engine != "fsdp2", "engine", self.engine, why, do)
        if not told and self.topology is None:
            for name, none in (("trainable", None), ("survives", 0), ("slow_bits", None), ("engine", None)):
                value, do = getattr(self, name), "pass --groups, --per-group, --inter and --intra, or --topology"
                require(value == none, name, value, "it is for a cluster, and none is given", do)

    @property
    def room(self) -> str:
        """Memory of a device, as it was written or as the card has it."""
        return self.memory or (CARDS[self.card].memory if self.card else "24GB")

    @property
    def limit(self) -> int:
        """Memory of a device (bytes)."""
        from sparing.memory import parse_bytes

        return parse_bytes(self.room)

    @property
    def rate(self) -> float | None:
        """Operations a second that the passes reach; None where nothing says."""
        if self.tflops is not None:
            return self.tflops * 1e12
        peak = CARDS[self.card].peak(self.dtype) if self.card else None
        return peak and peak * REACHED * 1e12

    @property
    def moves(self) -> float:
        """Bytes a second that the optimizer's step reads and writes; infinity where nothing says."""
        card = CARDS[self.card].bandwidth if self.card else math.inf
        return 1e9 * (self.bandwidth or card)

    @property
    def bus(self) -> float | None:
        """Bytes a second between the device and host memory, each way; None where nothing says."""
        return 1e9 * CARDS[self.card].bus if self.card else None

    @property
    def speed(self) -> str:
        """Where the speed of a step comes from; empty if nothing says."""
        if self.rate is None:
            return ""
        where = f"{self.rate / 1e12:g}"
        if self.tflops is None and self.card:
            where = f"{REACHED:.0%} of {CARDS[self.card].peak(self.dtype):g}"
        moves = "" if math.isinf(self.moves) else f", and {self.moves / 1e9:g} GB/s for the optimizer's step"
        return f"{where} TFLOP/s for matrix products and attention{moves}"

    @property
    def runs_on(self) -> Literal["sparing", "fsdp2"]:
        """The engine whose memory a plan for a cluster must keep to."""
        if self.engine is not None:
            return self.engine
        # a topology that was measured on processors says how many ranks share a core
        cores = self.card is None and self.cluster is not None and self.cluster.crowding > 0
        return "sparing" if self.device == "cpu" or self.slow_bits is not None or cores else "fsdp2"

    def step(self, method: Method) -> FitStep:
        """The step of `finetune` that trains so."""
        from sparing.jobs.lm.step import FitStep

        # slices of a head are gathered once a pass, so on a cluster all logits are there at once
        at_once = self.loss_tokens if self.cluster is None else 0
        return FitStep(
            method=method, masters=self.masters or getattr(method, "masters", False), dtype=self.dtype,
            batch=self.batch, length=self.length, accumulate=self.accumulate, packing=self.packing,
            attention=self.attention, loss_tokens=at_once,
        )  # fmt: skip

    @property
    def place(self) -> Path | None:
        """Where the model's configuration is; none for a model known by its size alone."""
        path = self.model
        return path.parent if path is not None and path.name == "config.json" else path

    @property
    def title(self) -> str:
        """Name of the model."""
        return hub.title(self.place) if self.place is not None else "a model"

    @cached_property
    def cluster(self) -> Topology | None:
        """The cluster; None for one device."""
        from sparing.sharding.planner.config import Link, Topology, parse_rate  # loads torch

        if self.group_sizes:
            return self.arrangements[0].topology
        if self.topology is not None:
            return Topology.read(self.topology)
        if self.groups * self.domains * self.per_group == 1:
            return None
        two = self._links()
        if self.domains == 1:
            return two
        intra, inter = two.axes
        middle = Link(
            name="middle", size=self.domains, rate=parse_rate(self.middle or math.inf), latency=self.latency_middle,
            sharing=self.sharing_middle,
        )  # fmt: skip
        return Topology(axes=(intra, middle, inter))

    def _links(self) -> Topology:
        from sparing.sharding.planner.config import Topology

        if self.topology is not None:
            return Topology.read(self.topology)
        return Topology(
            groups=self.groups, per_group=self.per_group, inter=self.inter or math.inf, intra=self.intra or math.inf,
            latency_inter=self.latency_inter, latency_intra=self.latency_intra, sharing=self.sharing,
        )  # fmt: skip

    @cached_property
    def arrangements(self) -> tuple[Arrangement, ...]:
        """Ways to cut groups of unequal size into equal ones, the one that uses most ranks first; none without them."""
        from sparing.sharding.planner.unequal import arrangements

        return arrangements(self.group_sizes, self._links()) if self.group_sizes else ()


def share_of(written: str) -> float:
    """Parse a share such as ``"1/16"``, ``"0.003"`` or ``"3e-3"``.

    Example:
        >>> share_of("1/16")
        0.0625
    """
    try:
        share = float(Fraction(written))
    except (ValueError, ZeroDivisionError):
        share = math.nan
    if not 0 < share <= 1:
        raise UserError("trainable", got=repr(written), why="it is a share", do="pass a fraction in (0, 1], as in 1/16")
    return share
