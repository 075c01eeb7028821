"""The weights of the lowest held-out loss so far, on the disk, so that they can be exported at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.jobs.disk import load_tensors, save_tensors
from sparing.jobs.finetune.state import TrainState
from sparing.jobs.lm.adapters import Lora
from sparing.report import Record

BEST = "best"  # the directory


def best_row(record: Record) -> Mapping[str, Any]:
    """The measurement of the lowest held-out loss, of equal ones the first."""
    return min(record.table("held_out"), key=lambda row: row["loss"])


def _exported(state: TrainState) -> dict[str, Tensor]:
    """What differs from the model on the disk, now or later: adapters, or every parameter."""
    parameters, lora = named_parameters(state.model), isinstance(state.training.method, Lora)
    return {name: p.detach() for name, p in parameters.items() if p.requires_grad or not lora}


def _file(out: Path, step: int) -> Path:
    return out / BEST / f"step-{step:08d}.safetensors"


class Best:
    """Told of every measurement, it saves the weights of those that are better than all before."""

    def __init__(self, out: Path, record: Record) -> None:
        """Go on from the rows of a record."""
        self.out, self.record = out, record

    def __call__(self, state: TrainState, table: str, row: Mapping[str, Any]) -> None:
        """Save, if this is the best so far."""
        if table != "held_out" or best_row(self.record)["step"] != row["step"]:
            return
        save_tensors(_file(self.out, state.step), _exported(state))
        # a run that resumes before this step comes by it again with the same bits, and needs none of these
        for old in (self.out / BEST).glob("step-*.safetensors"):
            if old != _file(self.out, state.step):
                old.unlink()

    def restore_(self, state: TrainState) -> None:
        """Put the best weights into the model; the record then says of which step they are."""
        row = best_row(self.record)
        file = _file(self.out, row["step"])
        require(file.is_file(), "keep", file, "the best weights are gone", "start over with --overwrite")
        saved, parameters = load_tensors(file), _exported(state)
        with torch.no_grad():
            for name, value in saved.items():
                parameters[name].copy_(value)
        if not self.record.table("exported"):
            self.record.add("exported", step=row["step"], loss=row["loss"])
