"""What a person may ask of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from sparing.errors import UserError, require
from sparing.jobs.limits import at_least, positive
from sparing.memory import parse_bytes
from sparing.sharding.config import Topology


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What fits: full fine-tuning, LISA, LoRA, with and without checkpointing, on one device or on a cluster.

    With a cluster (a topology file that `sparing probe` wrote, or groups, GPUs and the speeds of their links) every
    method is combined with every way to split parameters, gradients and optimizer state over it. The pick, and why
    each other lost.
    """

    directory: Annotated[Positional[Path | None], arg(metavar="[MODEL_DIR]")] = None
    """Hugging Face directory, or a config.json; weights are neither needed nor read."""

    model: Path | None = None
    """The same, as an option."""

    params: float | None = None
    """Parameters of a model that is not there (count), as in 65e9; divided as the LLaMA nearest in size is."""

    memory: str = "24GB"
    """Memory of the device ("24GB" is 24·10⁹ bytes, "24GiB" is 24·2³⁰)."""

    batch: int = 1
    """Sequences at once (count)."""

    length: int = 1024
    """Tokens a sequence (count)."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights, activations, gradients and moments; on a cluster masters and moments are in float32."""

    active: tuple[int, ...] = (2, 4, 8)
    """Numbers of blocks that LISA trains at a time (counts); the paper's γ."""

    period: int = 20
    """Optimizer steps between LISA's draws (count); the paper's K."""

    ranks: tuple[int, ...] = (16, 128)
    """Ranks of LoRA on every linear layer of the blocks (counts)."""

    masters: bool = False
    """Whether LISA's trained parameters have 32-bit copies and moments, as a bfloat16 run at a small rate needs; on a
    cluster all have."""

    steps: int = 1000
    """Optimizer steps of the run (count), for the share of blocks that LISA reaches."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    """Fused attention, or one that holds all scores."""

    packing: bool = True
    """Whether rows hold several documents, as `finetune` fills them unless told otherwise: attention then needs a mask,
    and repeats grouped keys and values."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Whose kernels, where candidates run on fake tensors: on CUDA a mask of dropout takes a byte per element."""

    ledger: bool = False
    """Run each candidate on fake tensors instead of by closed formula: any architecture, seconds to a minute each."""

    topology: Path | None = None
    """The cluster: a file that `sparing probe` wrote."""

    groups: int = 1
    """The cluster in numbers: groups of GPUs that the slow network joins (count), often machines; the paper's g."""

    per_group: int = 1
    """GPUs of a group (count); the paper's m."""

    inter: str | None = None
    """Speed of a link between groups, such as "80Gbps" or "10GB/s"; the paper's B."""

    intra: str | None = None
    """Speed of a link inside a group; the paper's B'."""

    sharing: int = 1
    """GPUs of a group that share one link to other groups (count): 1 if each has its own, all if there is one."""

    latency_inter: float = 0.0
    """Time of an empty message between groups (s)."""

    latency_intra: float = 0.0
    """Time of an empty message inside a group (s)."""

    accumulate: int = 1
    """Micro-steps of an optimizer step (count); the paper's s. From the second on, gradients stay while activations
    come; `finetune` takes 8 unless told otherwise."""

    trainable: str | None = None
    """Compare no methods: this share of every block trains, such as 1/16 or 0.003. On a cluster only."""

    gradients: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which gradients are summed and sent, on a cluster: bfloat16 as in the paper, float32 as this library's
    engine does."""

    tflops: float | None = None
    """Arithmetic that a device really does (10¹² operations/s), to see what of the traffic hides behind it; none: only
    the links are timed."""

    survives: int = 0
    """Groups that may be lost without losing state (count): plans that keep a copy in every group."""

    maps: bool = True
    """Whether to draw which plan is best on other networks, with other accumulation and other trainable shares."""

    out: Path = Path("runs/plan")
    """Folder of record and page."""

    overwrite: bool = False
    """Whether a plan that `out` already holds may be deleted (yes or no)."""

    def __post_init__(self) -> None:
        """Reject settings out of range, or in conflict."""
        parse_bytes(self.memory)
        at_least(1, self, "batch", "length", "period", "steps", "groups", "per_group", "sharing", "accumulate")
        at_least(1, self, "params", most=1e16)
        at_least(0, self, "latency_inter", "latency_intra", "survives")
        positive(self, "tflops")
        for name in ("active", "ranks"):
            counts = getattr(self, name)
            require(min(counts, default=1) >= 1, name, counts, "these are counts", "pass 1 or more of each")
        given = [name for name in ("directory", "model", "params") if getattr(self, name) is not None]
        told = " and ".join(given) or "none"
        require(len(given) == 1, "model", told, "one model is planned for", "pass a directory, or --params 7e9")
        self._require_cluster()
        if self.trainable is not None:
            share_of(self.trainable)

    def _require_cluster(self) -> None:
        """Refuse half a cluster, or settings that only a cluster has."""
        told = (self.groups, self.per_group) != (1, 1)
        if self.topology is not None:
            do = "drop --topology, or the numbers"
            require(not told and not self.inter and not self.intra, "topology", self.topology, "it has numbers", do)
        for name, count in (("inter", self.groups), ("intra", self.per_group)):
            speed, why = getattr(self, name), f"ranks talk over it ({count})"
            require(count == 1 or speed is not None, name, "nothing", why, f'pass its speed, such as --{name} "80Gbps"')
        if not told and self.topology is None:
            for name, none in (("trainable", None), ("tflops", None), ("survives", 0)):
                value, do = getattr(self, name), "pass --groups, --per-group, --inter and --intra, or --topology"
                require(value == none, name, value, "it is for a cluster, and none is given", do)

    @property
    def place(self) -> Path | None:
        """Where the model's configuration is; none for a model known by its size alone."""
        path = self.directory or self.model
        return path.parent if path is not None and path.name == "config.json" else path

    @property
    def title(self) -> str:
        """Name of the model."""
        return self.place.name if self.place is not None else "a model"

    @cached_property
    def cluster(self) -> Topology | None:
        """The cluster; None for one device."""
        if self.topology is not None:
            return Topology.read(self.topology)
        if self.groups * self.per_group == 1:
            return None
        return Topology(
            groups=self.groups, per_group=self.per_group, inter=self.inter or math.inf, intra=self.intra or math.inf,
            latency_inter=self.latency_inter, latency_intra=self.latency_intra, sharing=self.sharing,
        )  # fmt: skip


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
