"""The controls of a run: n-grams of its text, and its model trained without a body by as many steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparing.jobs.lm.controls import ngram_losses, remove_body_, rows_of
from sparing.jobs.pretrain.inputs import Inputs
from sparing.jobs.pretrain.loop import evaluate
from sparing.jobs.pretrain.models import fresh_model
from sparing.jobs.pretrain.settings import Pretrain, Updates
from sparing.jobs.pretrain.state import make_plan, start, take_step_
from sparing.jobs.settings import Local
from sparing.jobs.step import DivergedError
from sparing.jobs.torch_state import device_for
from sparing.report import Progress, Record


def note_controls(settings: Pretrain, inputs: Inputs, config: Any, record: Record, *, loss: float) -> None:
    """Add the table "controls" to a record: what each reaches on the test text, where the model has ``loss``."""
    rows = inputs.test.rows
    found: dict[str, float | None] = dict(
        ngram_losses(inputs.train, rows.ids[:, :-1], rows.labels[:, 1:], vocabulary=len(inputs.tokenizer))
    )
    if settings.control:
        found["no body"] = bare_loss(settings, inputs, config)
    for row in rows_of(found, loss):
        record.add("controls", **row)


def bare_loss(settings: Pretrain, inputs: Inputs, config: Any) -> float | None:
    """Test loss (nat/token) of the model without its body, trained by the same steps; None where it diverged."""
    # dense and fixed: nothing that could be masked is left
    own = replace(
        settings, density=1.0, dynamic="none", masks="fan-in", backend="dense", mask_updates=Updates(), plan="none",
        groups=None, topology=None, memory=None, local=Local(), engine=None,
    )  # fmt: skip
    model = fresh_model(config, seed=own.seed, device=device_for(own.device))
    # planned and scaled whole: roles and widths are read from a forward pass through the blocks
    state = start(own, model, inputs.train, make_plan(own, model))
    state.masks.verify()  # while all weights are there to look at
    remove_body_(model)
    try:
        with Progress("control without a body", total=own.steps) as bar:
            for _ in range(own.steps):
                bar.advance(loss=take_step_(state)["loss"])
    except DivergedError:
        return None
    return float(evaluate(model, inputs.test, batch=own.batch)["loss"])
