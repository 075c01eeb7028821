"""What each part of layer sampling does, on ladder 1: γ, K, seeds of the draws, state, warm-up, 1/π, number formats.

``python -m benchmarks.layers.ablations`` goes on where it stopped, with as many workers as are started; ``--list`` says
what is left. Each arm has a sweep and four seeds as in the study, and rows that both ask for are made once. What moves
no update by much takes over the rate of the arm it is held against, so that nothing else differs: where state goes, and
which blocks a seed draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layers.arms import ACTIVE, ARMS, Arm, lisa
from benchmarks.layers.study import LADDER_1, PACE, SEEDS, command
from sparing.blocks import find_blocks
from sparing.jobs.finetune.settings import Training
from sparing.jobs.finetune.state import MakeStepper, local_stepper
from sparing.jobs.lm.optimizer import AdamW
from sparing.jobs.step import LocalStepper
from sparing.layersample import LayerSampling, Sampler
from sparing.layersample.price.predict import Full
from sparing.seeds import stream

LAYER_SEEDS = range(8)
ALL = 16
"""Blocks of the model, N."""


def drawing(layer_seed: int) -> MakeStepper:
    """Blocks drawn by a seed of their own; rows stay those of the run's."""

    def make(model: nn.Module, training: Training) -> tuple[LocalStepper, Sampler | None]:
        return local_stepper(model, replace(training, seed=layer_seed))

    return make


def corrected(model: nn.Module, training: Training) -> tuple[LocalStepper, Sampler | None]:
    """Updates of blocks times 1/π = N/γ, so that a block moves as far on average as what is always on."""
    # Adam's steps do not change with the scale of a gradient, so the rate is scaled, while the optimizer steps
    stepper, sampler = local_stepper(model, training)
    method, optimizer = training.method, stepper.optimizer
    assert isinstance(method, LayerSampling)
    blocks = [block for block in find_blocks(model) if block.role == "body"]
    body = {p for block in blocks for p in block.params.values()}
    for group in list(optimizer.param_groups):
        parts = [[i for i, p in enumerate(group["params"]) if (p in body) is drawn] for drawn in (False, True)]
        if all(parts):
            pairs = [
                list(zip(*((group["param_names"][i], group["params"][i]) for i in at), strict=True)) for at in parts
            ]
            group["param_names"], group["params"] = map(list, pairs[0])
            same = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
            optimizer.add_param_group(same | {"params": list(zip(*pairs[1], strict=True))})
    factor = len(blocks) / method.active
    drawn = [group for group in optimizer.param_groups if group["params"][0] in body]
    optimizer.register_step_pre_hook(lambda *_: _scale_(drawn, factor))
    optimizer.register_step_post_hook(lambda *_: _scale_(drawn, 1 / factor))
    return stepper, sampler


def _scale_(groups: Sequence[dict[str, Any]], factor: float) -> None:
    for group in groups:
        group["lr"] *= factor


class Rounded(torch.optim.AdamW):
    """AdamW of 16-bit weights that are rounded up or down by chance; moments are 32 bits, and there are no masters."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, lr=lr)
        self._generator = stream(0, "layers", "rounded")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step on 32-bit copies, which live as long as the step of their parameter."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[p], p.grad.float()
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(grad), "exp_avg_sq": torch.zeros_like(grad)}
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
                scale = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                update = state["exp_avg"] / (1 - beta1 ** state["step"]) / scale
                wide = p.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
                p.copy_(by_chance(wide, self._generator))


def by_chance(wide: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, up or down with the odds that keep the mean.

    Source: Gupta et al. 2015 (arXiv:1502.02551).
    """
    # bfloat16 is the upper half of a float32: a carry out of the lower half happens as often as that half says
    bits = wide.view(torch.int32) + torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, generator=generator)
    return (bits & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


class StochasticAdamW(AdamW):
    """``Rounded`` as a value; priced as AdamW with 32-bit moments would be."""

    def make(self, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
        """The optimizer, without state."""
        return Rounded(groups, lr=lr)

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of both moments."""
        return super().state(shape, torch.float32)


def _lisa(name: str, method: LayerSampling, centre: int = -20, **others: Any) -> Arm:
    return Arm(name=name, family="lisa", method=method, centre=centre, **others)


def _formats(name: str, method: Any, family: str, centre: int) -> list[Arm]:
    same: dict[str, Any] = {"method": method, "family": family, "centre": centre, "dtype": torch.bfloat16}
    return [
        Arm(name=f"{name}, bfloat16", **same),
        Arm(name=f"{name}, bfloat16 with masters", masters=True, **same),
        Arm(name=f"{name}, bfloat16 rounded by chance", optimizer=StochasticAdamW(), **same),
    ]


BASE = [arm for arm in ARMS if arm.name in {"no training", "full", "LISA", "LISA, fixed blocks"}]
ABLATIONS: tuple[Arm, ...] = (
    *BASE,
    *(_lisa(f"LISA, γ {n}", lisa(active=n), -20 - (n > ACTIVE)) for n in (1, 4, ALL)),
    *(_lisa(f"LISA, K {n}", lisa(period=n)) for n in (1, 5, 20, PACE["steps"])),
    *(_lisa(f"LISA, state {policy}", lisa(state=policy), like="LISA") for policy in ("keep", "offload", "reset_all")),
    _lisa("LISA, 3 steps of warm-up", lisa(warmup=3)),
    _lisa("LISA, 1/π", lisa(), -24, stepper=corrected),
    *_formats("full", Full(), "full", -22),
    *_formats("LISA", lisa(), "lisa", -20),
)
"""Held against "LISA": two blocks, ten steps, state dropped, float32."""
DRAWN: tuple[Arm, ...] = (
    *(arm for arm in BASE if arm.name == "LISA"),
    *(_lisa(f"LISA, draws {n}", lisa(), stepper=drawing(1000 + n), like="LISA") for n in LAYER_SEEDS),
)
"""The same rows with other draws: the spread over layer seeds."""

STUDIES = (
    replace(LADDER_1, arms=ABLATIONS, seeds=SEEDS[:4]),
    replace(LADDER_1, arms=DRAWN, seeds=SEEDS[:1]),
)


def main() -> None:
    """Do what is missing, or say what it is."""
    command(__doc__, *(lambda rows, study=study: study for study in STUDIES))


if __name__ == "__main__":
    main()
