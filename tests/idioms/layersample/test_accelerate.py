"""The loop of accelerate's guide, and TRL's trainer under options people set: the weights of the loop by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from idioms.layersample.families import FAMILIES
from idioms.layersample.loops import SETTINGS, adamw, by_hand, loss_of, pair, windows
from idioms.layersample.reference import apart
from idioms.layersample.trainers import difference, sft
from sparing.layersample import Sampler


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
def test_accelerates_own_loop(checkpointing: bool) -> None:
    """Prepared model, optimizer and schedule, accumulation by its context, clipping by its method."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    (model, twin), data = pair(), windows(accumulate=3)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    prepared: Any = accelerator.prepare(model, optimizer, schedule)
    model, optimizer, schedule = prepared
    model.train(), twin.train()
    sampler = Sampler(model, optimizer, SETTINGS)
    for step, window in enumerate(data):
        sampler.begin_step(step)
        for micro in window:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, micro))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    hand = by_hand(twin, data, clip=0.5, lr=lambda step: 1e-2 / (1 + step))
    # the same sums in another order, in float64
    assert apart(accelerator.unwrap_model(model), hand) < 1e-13


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "changes", [{"activation_checkpointing": True}, {"max_grad_norm": 0.01}, {"packing": True}], ids=str
)
def test_options_of_the_trainer_of_trl(changes: dict[str, Any], tmp_path: Path) -> None:
    assert difference(sft, FAMILIES["Llama"], tmp_path, **changes) < 1e-13
