"""The weights of the lowest held-out loss so far, on the disk, so that they can be exported at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.blocks import named_parameters
from sparing.errors import require
from sparing.jobs.checkpoint import saved
from sparing.jobs.disk import load_tensors, save_tensors
from sparing.jobs.finetune.state import TrainState
from sparing.jobs.folder import CHECKPOINTS
from sparing.jobs.lm.adapters import Lora
from sparing.report import Record

BEST = "best"  # the directory


def best_row(record: Record) -> Mapping[str, Any]:
    """The measurement of the lowest held-out loss, of equal ones the first."""
    return _lowest(record.table("held_out"))


def _lowest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return min(rows, key=lambda row: row["loss"])


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
        self._drop_old_()

    def _drop_old_(self) -> None:
        """Delete what is not the best, now or as the newest checkpoint knows it."""
        # one that resumes there may, on another device, find a later step no better
        found, rows = saved(self.out / CHECKPOINTS), self.record.table("held_out")
        newest = int(found[-1].name.removeprefix("step-")) if found else -1
        known = [row for row in rows if row["step"] <= newest]
        kept = {_file(self.out, _lowest(part)["step"]) for part in (rows, known) if part}
        for old in (self.out / BEST).glob("step-*.safetensors"):
            if old not in kept:
                old.unlink()

    def restore_(self, state: TrainState) -> None:
        """Put the best weights into the model; the record then says of which step they are."""
        row = best_row(self.record)
        file = _file(self.out, row["step"])
        require(file.is_file(), "keep", file, "the best weights are gone", "start over with --overwrite")
        values, parameters = load_tensors(file), _exported(state)
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)
        self._drop_old_()
        if not self.record.table("exported"):
            self.record.add("exported", step=row["step"], loss=row["loss"])
