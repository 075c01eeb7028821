"""Hugging Face's Trainer and TRL's SFTTrainer over a few rows, and what they fed to the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from idioms.layersample.families import VOCAB, Family
from idioms.layersample.reference import apart, train_by_hand_
from sparing.layersample import LayerSampling, LayerSamplingCallback

STEPS, ACCUMULATE = 4, 2
COMMON: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATE,
    "learning_rate": 1e-2, "adam_epsilon": 1e-4, "lr_scheduler_type": "constant", "save_strategy": "no",
    "report_to": [], "disable_tqdm": True, "use_cpu": True, "optim": "adamw_torch", "logging_strategy": "no",
}  # fmt: skip
SAMPLING = LayerSampling(active=1, period=2)


class Rows(torch.utils.data.Dataset):
    def __init__(self, family: Family) -> None:
        self.rows = [{key: value[0] for key, value in family.batch(row).items()} for row in range(8)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


def trainer(model: nn.Module, family: Family, out: Path, callbacks: list[Any], **changes: Any) -> Any:
    args = tf.TrainingArguments(output_dir=str(out), **COMMON | changes)
    return tf.Trainer(
        model=model, args=args, train_dataset=Rows(family), eval_dataset=Rows(family), callbacks=callbacks
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, VOCAB)}
    raw = Tokenizer(models.WordLevel(vocab=words))
    return tf.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def sft(model: nn.Module, family: Family, out: Path, callbacks: list[Any], **changes: Any) -> Any:
    import trl
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [family.batch(row)["input_ids"][0].tolist() for row in range(8)]})
    args = trl.SFTConfig(output_dir=str(out), **COMMON | {"bf16": False, "max_length": 8} | changes)
    return trl.SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks)


Make = Callable[..., Any]


def difference(make: Make, family: Family, out: Path, settings: LayerSampling = SAMPLING, **changes: Any) -> float:
    """Train under a trainer with LISA, and by hand over the windows that it fed: how far are the weights apart?"""
    model = family.make()
    twin = copy.deepcopy(model)
    job = make(model, family, out, [LayerSamplingCallback(settings)], **changes)
    windows, whole = [], job.compute_loss

    def recording(model: nn.Module, inputs: Any, *rest: Any, num_items_in_batch: Any = None, **named: Any) -> Any:
        if model.training:
            windows.append((copy.deepcopy(dict(inputs)), num_items_in_batch))
        return whole(model, inputs, *rest, num_items_in_batch=num_items_in_batch, **named)

    job.compute_loss = recording
    job.train()
    hand = make(twin, family, out, [], **changes)  # a trainer may patch what it is given; this one never trains
    hand.current_gradient_accumulation_steps = ACCUMULATE
    if model.is_activation_checkpointing:
        twin.activation_checkpointing_enable({"use_reentrant": False})
    twin.train()

    def loss(model: nn.Module, micro: Any) -> Tensor:
        inputs, items = micro
        found = hand.compute_loss(model, dict(inputs), num_items_in_batch=items)
        whole_window = hand.model_accepts_loss_kwargs and items is not None
        return found * ACCUMULATE if whole_window else found

    parts = [windows[at : at + ACCUMULATE] for at in range(0, len(windows), ACCUMULATE)]
    off = family.frozen if settings.embed else ("model.embed",)
    clip = changes.get("max_grad_norm", 1.0)
    train_by_hand_(twin, family.lists, parts, loss=loss, off=off, clip=clip)
    return apart(model, twin)
