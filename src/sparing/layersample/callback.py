"""Layer sampling in Hugging Face's Trainer. Importing this module imports transformers."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

from sparing.errors import UserError, require
from sparing.layersample import draws
from sparing.layersample.apply import Sampler
from sparing.layersample.config import LayerSampling
from sparing.layersample.importance import Importance
from sparing.layersample.state import read_state, write_state

FILE = "layer_sampling.safetensors"  # file beside the Trainer's own in each of its checkpoints

_DO = "use one process, or FSDP2 with state='reset' or 'keep', and an ordinary optimizer such as adamw_torch"


class LayerSamplingCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Trains a few body blocks at a time in a ``Trainer``: ``Trainer(..., callbacks=[LayerSamplingCallback(...)])``.

    Freezes in ``on_train_begin``, when the Trainer has built its optimizer from all parameters and, on resume, loaded
    its state; draws in ``on_step_begin``, once per accumulation window; unfreezes in ``on_train_end``. What a resumed
    run needs is written to ``layer_sampling.safetensors`` in each checkpoint, and its plain part to the Trainer's own
    state, so a run may be resumed at any step.

    Source: the order of events in transformers 5.23.
    """

    def __init__(
        self,
        settings: LayerSampling | Mapping[str, Any] | None = None,
        *,
        seed: int = 0,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Note the settings; the model is seen when training begins.

        Args:
            settings: Which blocks train, and for how long; or their ``describe()``, as the Trainer's state has it.
            seed: Seed of the draws.
            resume_from: Checkpoint directory to resume from, if it is not the one of that step in the output directory.
        """
        self.settings = settings if isinstance(settings, LayerSampling) else settings_from(settings or {})
        self.seed, self.resume_from = seed, resume_from
        self.sampler: Sampler | None = None
        """The live sampler during training; closed, with its history, afterwards."""
        self.saved: dict[str, Any] | None = None
        """Plain part of the sampler's last saved state."""

    def state(self) -> dict[str, Any]:
        """Give what the Trainer stores in ``trainer_state.json`` with each checkpoint."""
        if self.sampler is not None:
            whole = self.sampler.state_dict()
            tensors = whole.pop("tensors")
            self.saved = whole | {"token": uuid.uuid4().hex, "tensors": bool(tensors)}
        return {"args": {"settings": self.settings.describe(), "seed": self.seed}, "attributes": {"saved": self.saved}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: torch.optim.Optimizer, **others: Any
    ) -> None:
        """Freeze, load a saved state, and draw for the first step.

        Args:
            args: The Trainer's arguments.
            state: The Trainer's state.
            control: Unused.
            model: The model without the Trainer's wrappers.
            optimizer: The Trainer's optimizer.
            others: Unused.
        """
        _refuse(args, self.settings)
        self.sampler = Sampler(model, optimizer, self.settings, seed=self.seed)
        # the Trainer calls no on_train_end after an error here: unfreeze before it leaves
        try:
            if state.global_step:
                self._resume(args, state)
            self.sampler.begin_step(state.global_step)
        except BaseException:
            self.sampler.close()
            raise

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Draw when an interval begins; gradients are empty here."""
        if self.sampler is not None:
            self.sampler.begin_step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Write the sampler's state next to the Trainer's."""
        if self.sampler is not None and self.saved is not None and state.is_world_process_zero:
            token = {"token": self.saved["token"]}  # of the Trainer's own file, written a moment ago
            write_state(_file(args, state), self.sampler.state_dict() | token)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Restore every parameter's ``requires_grad``."""
        if self.sampler is not None:
            self.sampler.close()

    def _resume(self, args: Any, state: Any) -> None:
        """Go on from the checkpoint's state; one made without this callback has none, and none is needed for it."""
        assert self.sampler is not None
        stored = (state.stateful_callbacks or {}).get(type(self).__name__)
        saved = stored["attributes"]["saved"] if isinstance(stored, dict) else None
        if saved is None:
            return
        path = _file(args, state) if self.resume_from is None else Path(self.resume_from) / FILE
        # the token ties our file to the Trainer's: after a crash between the two writes they are of different steps
        found = read_state(path) if path.is_file() else {"token": None}
        if found["token"] != saved["token"] and saved["tensors"]:
            raise UserError(
                "resumed checkpoint", got=f"no {FILE} of its own in {path.parent}",
                why="it holds optimizer state that the Trainer does not save",
                do="pass LayerSamplingCallback(resume_from=...), the checkpoint directory",
            )  # fmt: skip
        self.sampler.load_state_dict(found if saved["tensors"] else saved | {"tensors": {}})


def settings_from(description: Mapping[str, Any]) -> LayerSampling:
    """Rebuild settings from their ``describe()``."""
    values, sampler = dict(description), dict(description.get("sampler", {"name": "Uniform"}))
    values.pop("sampler", None)
    name = sampler.pop("name")
    known = {"Importance": Importance} | {each: getattr(draws, each) for each in draws.__all__ if each != "Draw"}
    if name not in known:
        raise UserError("sampler", got=name, why="it is not one of ours", do="pass the settings themselves")
    return LayerSampling(sampler=known[name](**_tuples(sampler)), **_tuples(values))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _file(args: Any, state: Any) -> Path:
    """Our file in the Trainer's checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE


def _refuse(args: Any, settings: LayerSampling) -> None:
    """Refuse set-ups of the Trainer that fix, or hold gradients for, more than the active blocks."""
    optim = str(getattr(args.optim, "value", args.optim))
    is_ddp = args.parallel_mode == ParallelMode.DISTRIBUTED and args.world_size > 1 and not args.fsdp
    has_tensors = settings.masters or settings.state == "offload"
    reasons = {
        "deepspeed": (bool(args.deepspeed), "DeepSpeed fixes which parameters train when it starts"),
        f"optim={optim}": ("layerwise" in optim or "lomo" in optim, "it steps inside the backward pass"),
        f"optim={optim} ": ("paged" in optim, "its paged buffers are never freed"),
        "optim_target_modules": (bool(args.optim_target_modules), "it gives each matrix hooks or projections"),
        "DistributedDataParallel": (is_ddp, "it holds a gradient bucket for every parameter"),
        "fsdp": (bool(args.fsdp) and has_tensors, "each process holds its own part of the state to save"),
        "DataParallel": (args.n_gpu > 1, "its replicas copy the frozen blocks each step"),
    }
    scaled = args.fp16 and settings.probe > 0
    why, do = "a probe drops gradients, and the gradient scaler finds none", "pass bf16=True, or probe=0"
    require(not scaled, "TrainingArguments", "fp16=True with a probe", why, do)
    for got, (found, why) in reasons.items():
        if found:
            raise UserError("TrainingArguments", got=got.strip(), why=why, do=_DO)
