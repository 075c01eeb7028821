"""Tensors of models on disk, read in slices or by rows; those that a LoRA changes with B·A added as they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from sparing.errors import UserError, require
from sparing.valley.merging.files import TensorEntry, checkpoint, read_slices, read_tensor
from sparing.valley.merging.method import Slices

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_FROM_BASE: Final = ("pissa", "olora", "corda", "lora_ga", "loftq")  # they take the first B·A off the base weight


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one weight by a LoRA: scale · B A, of shape (rows, width), in float32."""

    a: Tensor  # (rank, width)
    b: Tensor  # (rows, rank)
    scale: float


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a model on disk, with the change of an adapter where there is one."""

    name: str
    entry: TensorEntry
    change: LowRank | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.entry.shape

    def slices(self) -> Slices:
        """The tensor in slices; with an adapter in float32."""
        plain = read_slices(self.name, self.entry)
        if self.change is None:
            return plain
        change, width = self.change, self.shape[-1]

        def read() -> Iterator[Tensor]:
            at = 0
            for part in plain():
                first, last = at // width, math.ceil((at + len(part)) / width)
                added = change.scale * (change.b[first:last] @ change.a)
                yield part.float() + added.view(-1)[at - first * width :][: len(part)]
                at += len(part)

        return Slices(read, self.shape)

    def rows(self, first: int, count: int) -> Tensor:
        """Rows along the first axis, shape (count, …)."""
        width = math.prod(self.shape[1:])
        size = self.entry.size // max(1, self.entry.count)
        place = TensorEntry(self.entry.file, (count, *self.shape[1:]), self.entry.kind,
                            self.entry.start + first * width * size)  # fmt: skip
        found = read_tensor(self.name, place)
        if self.change is None:
            return found
        return found.float() + self.change.scale * (self.change.b[first : first + count] @ self.change.a)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model on disk: its folder, for settings and tokenizer, and its tensors."""

    label: str
    folder: Path
    parts: Mapping[str, Part]


def open_model(name: str, beside: Path) -> ModelParts:
    """Open FOLDER or FOLDER+ADAPTER, sought where the process is and then beside the recipe; headers are read."""
    folder, _, adapter = name.partition("+")
    place = _place(folder, beside)
    parts = {key: Part(key, entry) for key, entry in checkpoint(place).items()}
    require(bool(parts), "model", place, "it holds no tensor", "pass a checkpoint with weights")
    return ModelParts(name, place, _adapted(parts, _place(adapter, beside)) if adapter else parts)


def _place(name: str, beside: Path) -> Path:
    found = next((path for path in (Path(name).expanduser(), beside / name) if path.exists()), None)
    why, do = "there is no such folder here or beside the recipe", "download it, and write the path of its folder"
    require(found is not None, "model", name, why, do)
    assert found is not None
    return found


def _adapted(parts: Mapping[str, Part], folder: Path) -> dict[str, Part]:
    """Tensors with the changes of an adapter of peft's."""
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    except (OSError, ValueError) as error:
        why = f"its {ADAPTER_CONFIG} cannot be read ({str(error)[:80]})"
        raise UserError("adapter", got=folder, why=why, do="pass the folder that peft saved") from None
    plain = config.get("peft_type") == "LORA" and not config.get("use_dora") and config.get("bias", "none") == "none"
    why, do = "only LoRA without DoRA and biases is a sum with B·A", "merge it with peft's merge_and_unload"
    require(plain, "adapter", folder, why, do)
    init = str(config.get("init_lora_weights", ""))
    why = f"init_lora_weights {init} changes the base weights too"
    do = "save it converted, or merge it with peft's merge_and_unload"
    require(not init.lower().startswith(_FROM_BASE), "adapter", folder, why, do)
    tensors, found = checkpoint(folder / ADAPTER), dict(parts)
    done: set[str] = set()
    for key, entry in tensors.items():
        module, factor, _ = key.removeprefix(_PREFIX).partition(".lora_A.")
        if factor:
            other = key.replace(".lora_A.", ".lora_B.")
            name = f"{module}.weight"
            known = name in parts and other in tensors
            require(known, f"adapter {folder} at {key!r}", "no such weight", "it is of another model", "pass its base")
            found[name] = Part(name, parts[name].entry, _low_rank(config, module, key, entry, other, tensors[other],
                               parts[name].shape))  # fmt: skip
            done |= {key, other}
    for key, entry in tensors.items():
        if key not in done:
            # A whole module that was trained beside the factors
            name = key.removeprefix(_PREFIX).replace(".modules_to_save.default", "")
            same = name in parts and entry.shape == parts[name].shape
            why, do = "it is neither a factor nor a weight of the model", "merge it with peft's merge_and_unload"
            require(same, f"adapter {folder} at {key!r}", entry.shape, why, do)
            found[name] = Part(name, entry)
    return found


def _low_rank(
    config: Mapping[str, Any], module: str, key: str, a: TensorEntry, other: str, b: TensorEntry, shape: tuple[int, ...]
) -> LowRank:
    low, high = read_tensor(key, a).float(), read_tensor(other, b).float()
    rank = _pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    # Conv1D of GPT-2 keeps its weight transposed, and so its change
    change = LowRank(high.T.contiguous(), low.T.contiguous(), scale) if config.get("fan_in_fan_out") else LowRank(
        low, high, scale)  # fmt: skip
    fits = low.ndim == 2 and (change.b.shape[0], change.a.shape[1]) == shape
    require(
        fits, f"adapter at {key!r}", tuple(low.shape), f"the weight has shape {shape}", "pass the adapter's own base"
    )
    why, do = f"its {ADAPTER_CONFIG} gives rank {rank}", "pass the folder that peft saved"
    require(rank == low.shape[0], f"adapter at {key!r}", f"rank {low.shape[0]}", why, do)
    return change


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """A setting of peft's by module: of the first regular expression that its name ends with."""
    each = (patterns or {}).items()
    return next((value for end, value in each if re.match(rf"(.*\.)?({end})$", module)), default)
