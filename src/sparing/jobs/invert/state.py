"""The outer loop of one run: estimate the hypergradient, let Adam move p, note what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing import hypergrad as hg
from sparing.errors import RunError
from sparing.jobs.invert.arms import Arm
from sparing.jobs.invert.observations import Inputs, relative
from sparing.jobs.invert.settings import Settings
from sparing.jobs.schedule import rate
from sparing.seeds import stream


@dataclass(kw_only=True, slots=True, eq=False)
class TrainState:
    """What an outer step of one seed changes; its tree is what a checkpoint holds."""

    seed: int  # of guess, directions and batches
    p: Tensor  # the unknowns, float64
    adam: torch.optim.Adam
    carried: Any  # what an outer step leaves to the next: weights of a network, or None
    step: int = 0  # outer steps done (count)
    quiet: int = 0  # steps in a row that moved ν by less than ``still`` (count)
    seconds: float = 0.0  # CPU time of the outer steps alone (s)

    def tree(self) -> dict[str, Any]:
        """All of it as a nest of tensors and numbers."""
        plain = {name: getattr(self, name) for name in ("seed", "p", "carried", "step", "quiet", "seconds")}
        return {**plain, "adam": self.adam.state_dict()}


def start(settings: Settings, arm: Arm, seed: int, tree: Mapping[str, Any] | None = None) -> TrainState:
    """A run at its start, or where a checkpoint's tree left it."""
    p = arm.coefficient.guess(settings.model, seed) if tree is None else tree["p"].clone()
    adam = torch.optim.Adam([p], lr=settings.rate, betas=settings.memory)
    if tree is None:
        return TrainState(seed=seed, p=p, adam=adam, carried=arm.start(seed))
    adam.load_state_dict(tree["adam"])
    kept = {name: tree[name] for name in ("carried", "step", "quiet", "seconds")}
    return TrainState(seed=seed, p=p, adam=adam, **kept)


def ended(state: TrainState, settings: Settings) -> bool:
    """Whether a run has used its steps or stands still."""
    return state.step >= settings.steps or state.quiet >= settings.patience


def advance_(state: TrainState, settings: Settings, arm: Arm, inputs: Inputs) -> dict[str, Any]:
    """One outer step; its row holds loss and ν before it, and the CPU seconds up to its end."""
    start = time.process_time()
    before = arm.coefficient.value(state.p)
    seed = stream(state.seed, "outer", state.step).initial_seed()
    result = hg.hypergradient(arm.problem(state.carried), {"p": state.p}, arm.method, seed=seed)
    loss, gradient = float(result.value), result.grad["p"]
    if not (torch.isfinite(gradient).all() and torch.isfinite(result.value)):
        raise RunError(
            f"step {state.step}: loss {loss:g} or its gradient is not finite; a smaller --lr keeps ν in range"
        )
    # weights go on to the next step, tangents do not: each hypergradient is of its own inner run
    if state.carried is not None:
        state.carried = {name: weight.detach() for name, weight in result.theta.items()}
    # the rate is a function of the step, so a checkpoint needs no scheduler
    state.adam.param_groups[0]["lr"] = rate(state.step, peak=settings.rate, steps=settings.steps)
    state.p.grad = gradient.detach()
    state.adam.step()
    moved = (arm.coefficient.value(state.p) / before - 1).abs().max().item()
    state.quiet = state.quiet + 1 if moved < settings.still else 0
    state.step += 1
    state.seconds += time.process_time() - start
    # of before the step, like the loss
    error = relative(before.numpy(), inputs.coefficient)
    nu = float(before.log().mean().exp())
    return {"seed": state.seed, "step": state.step, "loss": loss, "nu": nu, "error": error, "seconds": state.seconds}
