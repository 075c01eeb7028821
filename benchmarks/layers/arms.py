"""The ways to fine-tune that are compared, as values: what trains, by which optimizer, and around which rate to look.

Layer sampling draws two of sixteen blocks every ten steps, as the paper's runs at 7 B did (γ 2, K 10 to 13 of 122
steps), so that a hundred steps make ten draws. BAdam's period is what takes it through all blocks once, its own advice;
GRASS probes for five steps instead of twenty, which would be a fifth of the run; MISA draws every ten steps as the
others do, and once more with as many parameters as two blocks have. LoRA's scale is 2 at every rank.

Bytes are those of one step on a GPU, predicted for the draw of blocks that costs most. State that LISA keeps, and does
not move to the host, is counted for all blocks: after a few draws it is there.

The first guesses of rates are from 20 steps at two to three rates of ten arms, on the model of ladder 1 after a tenth
of its training; sweeps go on from them until the best rate lies inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparing.blocks import find_blocks, submodule
from sparing.jobs.finetune.prices import predict_step, step_of
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import MakeStepper, local_stepper, start
from sparing.jobs.lm.adapters import Lora
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.lowrank import Apollo, GaLore
from sparing.jobs.lm.meta import Source
from sparing.jobs.lm.optimizer import AdamW, Optimizer
from sparing.jobs.lm.packing import Packed
from sparing.jobs.lm.prices import price
from sparing.jobs.lm.step import Method
from sparing.jobs.torch_state import measuring
from sparing.layersample import Adaptive, Fixed, LayerSampling, Reshuffle, Sampler, Weighted
from sparing.layersample.price.predict import Full
from sparing.memory import Bytes

ACTIVE, PERIOD = 2, 10
OUTLIER = 5.0
"""How many times the mean of its matrix an entry of |W|·‖X‖ must be to count; 13 in OwLore, where none would here."""
DRAWS = 8
"""Draws of which the dearest is priced, where what is drawn has no lowest choice (count)."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to fine-tune."""

    name: str
    method: Method | None
    """What trains; none: nothing does."""
    family: str
    """``full``, ``lora``, ``lisa``, or ``other``: between which families is decided."""
    centre: int
    """The middle of the first five rates, in half octaves: a rate of 2 to the power of half of this."""
    optimizer: Optimizer = field(default_factory=AdamW)
    weighted: bool = False
    """Whether the blocks' chances are their share of outliers, measured on training rows of the model."""
    stepper: MakeStepper = local_stepper
    """Makes the optimizer and the sampler; blocks are drawn by the seed of the data unless it says otherwise."""
    like: str = ""
    """Arm whose rate it takes over; none: it has a sweep of its own."""
    dtype: torch.dtype = torch.float32
    masters: bool = False

    def training(self, model: nn.Module, rows: Packed, *, rate: float, seed: int, pace: Mapping[str, Any]) -> Training:
        """A whole run of a model."""
        assert self.method is not None
        method = self.method
        if self.weighted:
            assert isinstance(method, LayerSampling)
            method = replace(method, sampler=Weighted(weights=outliers(model, rows)))
        return Training(method=method, optimizer=self.optimizer, lr=rate, seed=seed, masters=self.masters, **pace)


def rate_of(half_octaves: int) -> float:
    """A learning rate.

    Example:
        >>> rate_of(-20), rate_of(-21) / rate_of(-20) == 2**-0.5
        (0.0009765625, True)
    """
    return float(2.0 ** (half_octaves / 2))


def lora(rank: int, *, dora: bool = False) -> Lora:
    """Additions to every linear layer but the head, at twice their product."""
    return Lora(rank=rank, alpha=2.0 * rank, dora=dora)


EVERYWHERE = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,embed_tokens,lm_head"
"""Adapters on what LISA always trains as well: embedding and head alone take most of this change of text."""
WHOLE = "embed_tokens,lm_head"
"""The same, but whole, as peft's users have it; one rate for both."""


def lisa(**others: Any) -> LayerSampling:
    """Layer sampling at the pace of this study."""
    return LayerSampling(**{"active": ACTIVE, "period": PERIOD} | others)


def _arm(name: str, family: str, method: Method | None, centre: int, **others: Any) -> Arm:
    return Arm(name=name, family=family, method=method, centre=centre, **others)


def last(blocks: int, *, of: int, centre: int, **others: Any) -> Arm:
    """The blocks at the end of a model, always the same; with ``embed=False`` the backward pass ends before the rest.

    That is the control which every sampler has to beat: no draw, no score, no state that comes and goes.
    """
    method = lisa(active=blocks, sampler=Fixed(blocks=tuple(range(of - blocks, of))), **others)
    tail = ", embedding frozen" if "embed" in others else ""
    return Arm(name=f"LISA, last {blocks} blocks{tail}", family="lisa", method=method, centre=centre)


MISA = LayerSampling.misa(period=PERIOD)
ARMS: tuple[Arm, ...] = (
    _arm("no training", "other", None, 0),
    _arm("full", "full", Full(), -21),
    _arm("LoRA, rank 8", "lora", lora(8), -16),
    _arm("LoRA, rank 64", "lora", lora(64), -18),
    _arm("DoRA, rank 8", "lora", lora(8, dora=True), -16),
    _arm("LoRA, rank 8, embedding and head too", "lora", Lora(rank=8, alpha=16.0, targets=EVERYWHERE), -17),
    _arm("LoRA, rank 8, embedding and head whole", "lora", Lora(rank=8, alpha=16.0, modules_to_save=WHOLE), -20),
    _arm("GaLore, rank 64", "other", Full(), -14, optimizer=GaLore(rank=64, every=50)),
    _arm("APOLLO, rank 64", "other", Full(), -18, optimizer=Apollo(rank=64, every=50)),
    _arm("LISA", "lisa", lisa(), -20),
    _arm("LISA, reshuffled, state kept", "lisa", lisa(sampler=Reshuffle(), state="keep"), -20),
    _arm("LISA, embedding frozen", "lisa", lisa(embed=False), -20),
    _arm("LISA by gradient norm, embedding frozen", "lisa", lisa(embed=False, sampler=Adaptive()), -20),
    _arm("LISA by outliers (OWS)", "lisa", lisa(), -20, weighted=True),
    _arm("BAdam", "lisa", LayerSampling.badam(period=6), -16),
    _arm("GRASS", "lisa", LayerSampling.grass(active=ACTIVE, period=PERIOD, probe=5), -20),
    _arm("MISA, 3 %", "lisa", MISA, -15),
    _arm("MISA, 12 %", "lisa", replace(MISA, budget=0.12), -17),
    _arm("LISA, fixed blocks", "lisa", lisa(sampler=Fixed()), -20),
    _arm("embedding and head only", "other", lisa(active=0), -20),
    _arm("LISA, 3 blocks", "lisa", lisa(active=3), -20),
    _arm("LISA, 5 blocks", "lisa", lisa(active=5), -22),
    _arm("LISA, 10 blocks", "lisa", lisa(active=10), -21),
)
"""What ladder 1 compares: all at equal steps, and at equal bytes those of ``MATCHED``."""
MATCHED: Mapping[str, str] = {
    "LISA, 3 blocks": "LoRA, rank 8",
    "LISA, 5 blocks": "LoRA, rank 8, embedding and head whole",
    "LISA, 10 blocks": "LoRA, rank 64",
}
"""Arm of as many blocks as fit the bytes of an arm of LoRA -> that arm. No rank fits the bytes of two blocks: adapters
keep inputs of every linear layer, which at four rows of 128 tokens weigh more than what two blocks add."""


def outliers(model: nn.Module, rows: Packed, *, count: int = 8) -> tuple[float, ...]:
    """Share of each block's weights whose |W|·‖X‖ exceeds ``OUTLIER`` times the mean of its matrix, on some rows.

    Source: OwLore (arXiv:2405.18380), after OWL (arXiv:2310.05175); their threshold is for models of billions.
    """
    bodies = [submodule(model, block.name) for block in find_blocks(model) if block.role == "body"]
    squares: dict[nn.Module, Tensor] = {}

    def watch(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        squares[module] = squares.get(module, torch.zeros(())) + given[0].float().square().flatten(0, -2).sum(0)

    linears = [[m for m in body.modules() if isinstance(m, nn.Linear)] for body in bodies]
    handles = [m.register_forward_pre_hook(watch) for ms in linears for m in ms]
    with measuring(model):
        loss_sum(model, rows, torch.arange(count))
    for handle in handles:
        handle.remove()
    shares = []
    for ms in linears:
        sizes = [m.weight.detach().float().abs() * squares[m].sqrt() for m in ms]
        shares.append(sum(int((s > OUTLIER * s.mean()).sum()) for s in sizes) / sum(s.numel() for s in sizes))
    return tuple(shares)


def bytes_of(model: Any, arm: Arm, rows: Packed, *, pace: Mapping[str, Any]) -> int:
    """Bytes at the peak of a step of an arm, predicted."""
    if arm.method is None:
        return 0
    training = arm.training(model, rows, rate=1e-3, seed=0, pace=pace)
    method = training.method
    if isinstance(method, LayerSampling) and method.units == "module":
        return max(drawn.total for drawn in _drawn(model, training, rows))
    source = Source(model.config, model.config._attn_implementation)
    step = step_of(model, training, rows)
    return price(source, step, device="cuda").bytes.total


def _drawn(model: nn.Module, training: Training, rows: Packed) -> list[Bytes]:
    """The bytes of steps of the first draws, for units that are no blocks and have no order."""
    found = []
    with start(model, training, rows=rows.rows) as state:
        assert isinstance(state.sampler, Sampler)
        period = state.sampler.settings.period
        for draw in range(DRAWS):
            state.sampler.begin_step(draw * period)
            found.append(predict_step(model, training, rows))
    return found


def trainable(model: nn.Module, arm: Arm, rows: Packed, *, pace: Mapping[str, Any]) -> int:
    """Parameters that train in the first steps of a run (count), of a model that is changed by it."""
    if arm.method is None:
        return 0
    training = arm.training(model, rows, rate=1e-3, seed=0, pace=pace)
    probe = getattr(training.method, "probe", 0)
    with start(model, training, rows=rows.rows) as state:
        if state.sampler is not None:
            state.sampler.begin_step(probe)
        return sum(p.numel() for p in state.model.parameters() if p.requires_grad)
