"""Sparse training in Hugging Face's Trainer. Importing this module imports transformers.

model = LlamaForCausalLM(config)
plan = scaling.plan(model, base=256, density=1 / 16)
scaling.apply_(model, plan)
optimizer = torch.optim.AdamW(plan.groups(model, lr=2**-8, weight_decay=0.1))
Trainer(model, args, optimizers=(optimizer, None), callbacks=[SparseCallback()], train_dataset=data).train()
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.utils import SAFE_WEIGHTS_NAME

from sparing.blocks import tied
from sparing.errors import UserError
from sparing.scaling.masks.dynamic import Method
from sparing.scaling.masks.evolve import Evolution, Scale
from sparing.scaling.masks.mask_set import masks_of
from sparing.scaling.model.loading import PLAN_HASH

FILE = "sparse.safetensors"  # beside the Trainer's own files in each checkpoint: the model before it was folded


class SparseCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Trains a model after ``apply_`` in a ``Trainer``: checks its optimizer, moves its masks, saves it folded.

    Each checkpoint is an ordinary model, which ``from_pretrained`` loads without this library. Next to it is
    ``sparse.safetensors`` with masks and multipliers: a resumed run, and ``load_best_model_at_end``, take it instead.

    Source: the order of events in transformers 5.23.
    """

    def __init__(
        self,
        method: Method | None = None,
        *,
        scale: Scale = "density",
        seed: int = 0,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Note the settings; the Trainer brings model and optimizer.

        Args:
            method: How masks change, such as ``RigL()``; None leaves them.
            scale: What the forward factor follows: see ``Evolution``.
            seed: Of random growth; the same in every process.
            resume_from: Checkpoint directory to resume from, if it does not lie in the output directory.
        """
        self.method, self.scale, self.seed, self.resume_from = method, scale, seed, resume_from
        self.evolution: Evolution | None = None
        """What moves the masks, from the Trainer's construction on; None without a method."""

    def state(self) -> dict[str, Any]:
        """Give what the Trainer stores in ``trainer_state.json`` with each checkpoint."""
        settings = {"scale": self.scale, "seed": self.seed}  # a method is no JSON: the script gives it again
        evolution = None if self.evolution is None else self.evolution.state_dict()
        return {"args": settings, "attributes": {"saved": evolution}}

    def on_init_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        **others: Any,
    ) -> None:
        """Install hooks before the Trainer builds its scheduler and before it loads a checkpoint.

        Args:
            args: The Trainer's arguments.
            state: Unused.
            control: Unused.
            model: The scaled model.
            optimizer: The one that was passed to the Trainer.
            others: Unused.

        Raises:
            UserError: If the model was not scaled, the Trainer is to build the optimizer, or it shards the model.
        """
        _refuse(args, optimizer)
        masks = masks_of(model)
        if self.method is not None:
            # The length of the run is known when training begins; a schedule asks for it no sooner.
            length = max(1, args.max_steps)
            assert optimizer is not None
            self.evolution = Evolution(
                model, masks, optimizer, self.method, steps=length, seed=self.seed, scale=self.scale
            )
        folders = [Path(self.resume_from)] if self.resume_from is not None else None

        def unfold(module: nn.Module, loaded: dict[str, Tensor], prefix: str, *_: Any) -> None:
            if not prefix and PLAN_HASH not in loaded:
                found = _unfolded(loaded, folders or sorted(Path(args.output_dir).glob("checkpoint-*")))
                loaded.clear()
                loaded.update(found)

        root: Any = model
        handle = root.register_load_state_dict_pre_hook(unfold)
        # First: the guard of the scaled model would refuse a folded checkpoint.
        root._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **others: Any
    ) -> None:
        """Check the rates that optimizer and scheduler have set, and load a saved state.

        Args:
            args: Unused.
            state: The Trainer's state.
            control: Unused.
            model: The model without the Trainer's wrappers.
            optimizer: The Trainer's optimizer, wrapped by accelerate.
            others: Unused.
        """
        stored = (state.stateful_callbacks or {}).get(type(self).__name__) if state.global_step else None
        if self.evolution is not None:
            self.evolution.steps = state.max_steps
            if stored and stored["attributes"]["saved"]:
                self.evolution.load_state_dict(stored["attributes"]["saved"])
        masks_of(model).plan.check_optimizer(getattr(optimizer, "optimizer", optimizer))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Move the masks if this step says so; gradients are still there."""
        if self.evolution is not None:
            self.evolution.step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        """Write the scaled model next to the folded one.

        Args:
            args: The Trainer's arguments.
            state: The Trainer's state.
            control: Unused.
            model: The model without the Trainer's wrappers.
            others: Unused.
        """
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folded = folder / SAFE_WEIGHTS_NAME
        if not state.is_world_process_zero or not folded.is_file():
            return
        aliases = tied(model)
        whole = {n: t.detach().cpu().contiguous() for n, t in model.state_dict().items() if n not in aliases}
        # Named by the folded model it lies beside: loading is told of tensors, not of a folder.
        save_file(whole, folder / f"{FILE}.part", metadata={"folded": _digest(load_file(folded))})
        Path(folder / f"{FILE}.part").replace(folder / FILE)


def _unfolded(loaded: Mapping[str, Tensor], folders: list[Path]) -> dict[str, Tensor]:
    """Return the scaled model that was saved beside a folded one."""
    wanted = _digest(loaded)
    for folder in reversed(folders):
        if (folder / FILE).is_file():
            with safe_open(folder / FILE, "pt") as held:
                if (held.metadata() or {}).get("folded") == wanted:
                    return load_file(folder / FILE)
    raise UserError(
        "resumed checkpoint", got=f"no {FILE} of its own in {len(folders)} folders",
        why="a folded model has neither masks nor multipliers to train on with",
        do="pass SparseCallback(resume_from=...), the checkpoint directory that a run with this callback saved",
    )  # fmt: skip


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes and bits."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _refuse(args: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse set-ups in which the plan's rates, or the masks, would be lost."""
    if optimizer is None:
        do = "pass Trainer(optimizers=(torch.optim.AdamW(plan.groups(model, lr=...)), None))"
        raise UserError("Trainer", got="no optimizer", why="its own would give every weight one rate", do=do)
    reasons = {
        "deepspeed": (bool(args.deepspeed), "DeepSpeed flattens the weights that masks are kept on"),
        "fsdp": (bool(args.fsdp), "the checkpoint of a process would hold its part of the weights"),
    }
    for got, (found, why) in reasons.items():
        if found:
            do = "use one process or data parallelism; for FSDP2 a loop of your own with masks.shard_()"
            raise UserError("TrainingArguments", got=got, why=why, do=do)
