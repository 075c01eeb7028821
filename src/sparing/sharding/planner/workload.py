"""The work of one rank in one step: how many parameters, in which buckets, how often, in which number formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, get_args

from sparing.errors import require
from sparing.sharding.levels import Plan
from sparing.sharding.lowbit.config import LowBit

EngineName = Literal["sparing", "fsdp2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """One flat tensor of the model: the trainable or the frozen parameters of one block."""

    elements: int  # without padding, L
    trainable: bool = True
    # Whether it is used at both ends of the model (embedding, final norm, head): gathered once per micro-step.
    root: bool = False
    # Place of its block in the forward pass; buckets of one block share it. Roots count too: -1 before the body.
    block: int = 0
    plan: Plan | None = None  # its own; None: the model's
    # Of its parameters, where known: ``fully_shard`` cuts and pads each by its rows.
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        count = sum(map(prod, self.shapes))
        fits, why = not self.shapes or count == self.elements, f"the bucket has {self.elements} elements"
        require(fits, "shapes", f"{count} elements", why, "pass the shapes of all its parameters, or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and how it is trained, as far as memory and communication depend on it.

    Example:
        >>> Workload(params=7e9, trainable=1 / 16).trainable
        437500000
    """

    params: int | float
    """Parameters (count), Ψ."""

    trainable: int | float = 1.0
    """Trainable parameters, Ψ': a count, or up to 1 a share of ``params``; kept as a count."""

    accumulate: int = 1
    """Micro-steps of one step, s."""

    blocks: int = 32
    """Body blocks (count), all the same size."""

    root_share: float = 0.0
    """Share of the parameters in root buckets (embedding, head)."""

    seconds_forward: float | None = None
    """Forward pass of one micro-step on one rank (s); none: unknown, only the wires are timed."""

    seconds_backward: float | None = None
    """Backward pass of one micro-step without recomputation (s); none: twice the forward pass."""

    seconds_update: float = 0.0
    """The optimizer's arithmetic if all of its state were on one rank (s)."""

    param_bytes: int = 2
    """Bytes of a parameter, b_p."""

    grad_bytes: int = 2
    """Bytes of an accumulated gradient; 4 if gradients are summed in float32."""

    wire_bytes: int = 2
    """Bytes of a gradient on the wire."""

    slow: LowBit | None = None
    """Format of gradients and changed parameters between groups; none: as on the other wires."""

    state_bytes: int = 12
    """Bytes of optimizer state per trainable parameter: 12 = float32 master and two moments."""

    activation_bytes: int = 0
    """Activations of one micro-step that all blocks keep without checkpointing (bytes)."""

    boundary_bytes: int = 0
    """Inputs of all blocks, which is what checkpointing keeps (bytes)."""

    checkpointing: bool = False
    """Whether blocks are computed again in the backward pass instead of keeping their activations."""

    prefetch: int = 1
    """Blocks gathered ahead."""

    grad_buffers: int = 2
    """Full gradients alive at a time where gradients are cut: one being filled, the others on the wires."""

    engine: EngineName = "sparing"
    """Whose memory is counted: this library's own engine, which runs on CPU alone, or PyTorch's ``fully_shard``
    (``"fsdp2"``), which keeps a shard beside parameters that stay whole. Times are the same."""

    specs: tuple[BucketSpec, ...] = ()
    """Buckets of an actual model; none: ``blocks`` equal ones and a root are assumed."""

    def __post_init__(self) -> None:
        _refuse(self)
        share = self.trainable <= 1
        object.__setattr__(self, "params", int(self.params))
        object.__setattr__(self, "trainable", round(self.trainable * self.params) if share else int(self.trainable))
        inside, why = 1 <= self.trainable <= self.params, f"the model has {self.params} parameters"
        require(inside, "trainable", self.trainable, why, "pass a share in (0, 1] or a count")
        counts = (sum(b.elements for b in self.specs), sum(b.elements for b in self.specs if b.trainable))
        given = (self.params, self.trainable)
        why, do = f"the buckets have {counts[0]} and {counts[1]}", "describe the buckets with Workload.of"
        require(not self.specs or counts == given, "params, trainable", given, why, do)

    @classmethod
    def of(cls, specs: Sequence[BucketSpec], **options: Any) -> Workload:
        """Describe a model by its buckets.

        Args:
            specs: Buckets in forward order.
            options: Other fields of a workload.

        Returns:
            A workload that counts its parameters from the buckets.
        """
        body = {spec.block for spec in specs if not spec.root}
        return cls(
            params=sum(spec.elements for spec in specs),
            trainable=sum(spec.elements for spec in specs if spec.trainable),
            blocks=max(len(body), 1),
            specs=tuple(specs),
            **options,
        )

    @property
    def forward(self) -> float:
        """Forward pass of one micro-step (s); 0 if unknown."""
        return self.seconds_forward or 0.0

    @property
    def backward(self) -> float:
        """Backward pass of one micro-step with recomputation (s); 0 if unknown."""
        backward = 2 * self.forward if self.seconds_backward is None else self.seconds_backward
        return backward + (self.forward if self.checkpointing else 0.0)

    @property
    def compute(self) -> float:
        """Arithmetic of one step without the optimizer's (s), t_comp."""
        return self.accumulate * (self.forward + self.backward)

    @property
    def activations(self) -> int:
        """Activations at the peak of one micro-step (bytes)."""
        if self.checkpointing:
            return self.boundary_bytes + -(-self.activation_bytes // self.blocks)
        return self.activation_bytes

    def buckets(self) -> tuple[BucketSpec, ...]:
        """Return one bucket per block and trainability class, in forward order, roots first."""
        if self.specs:
            return self.specs
        return _assumed(int(self.params), int(self.trainable), self.blocks, self.root_share)


@lru_cache(maxsize=64)
def _assumed(params: int, trainable: int, blocks: int, root_share: float) -> tuple[BucketSpec, ...]:
    """Equal blocks and a root, each trainable to the same share."""
    root, trained = int(params * root_share), int(trainable * root_share)
    body = zip(_even(params - root, blocks), _even(trainable - trained, blocks), strict=True)
    pairs = [(True, -1, root, trained)] + [(False, at, whole, live) for at, (whole, live) in enumerate(body)]
    return tuple(
        BucketSpec(elements=elements, trainable=learns, root=is_root, block=block)
        for is_root, block, whole, live in pairs
        for elements, learns in ((live, True), (whole - live, False))
        if elements > 0
    )


def _even(total: int, parts: int) -> list[int]:
    """Cut a count into parts that differ by at most one."""
    return [total // parts + (at < total % parts) for at in range(parts)]


def _refuse(given: Workload) -> None:
    """Refuse values out of range."""
    ones = ("params", "accumulate", "blocks", "grad_buffers", "param_bytes", "grad_bytes", "wire_bytes")
    zeros = (
        "prefetch", "state_bytes", "activation_bytes", "boundary_bytes", "seconds_update", "seconds_forward",
        "seconds_backward", "root_share", "trainable",
    )  # fmt: skip
    least = dict.fromkeys(ones, 1) | dict.fromkeys(zeros, 0)
    for name, smallest in least.items():
        value = getattr(given, name)
        sound = value is None or smallest <= value < math.inf
        require(sound, name, value, f"it is at least {smallest} and finite", f"pass {smallest} or more")
    share = given.root_share
    require(share < 1, "root_share", share, "some parameters are in blocks", "pass a share in [0, 1)")
    known, theirs = get_args(EngineName), given.engine == "fsdp2"
    require(given.engine in known, "engine", given.engine, "there is no such engine", f"pass {' or '.join(known)}")
    why, do = "low-bit wires are of our engine", "leave it out, or slow=…"
    require(not (theirs and given.slow), "engine", given.engine, why, do)
    own, why = any(spec.plan for spec in given.specs), "fully_shard has one plan, and buckets have their own"
    require(not (theirs and own), "engine", given.engine, why, "leave it out, or the plans of the buckets")
