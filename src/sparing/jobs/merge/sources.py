"""Checkpoints as they lie on the disk: opened by their headers, checked against each other, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparing.errors import UserError, require
from sparing.jobs.subjects.folders import PICKLED
from sparing.valley.companions import compare_folders, dtype_notes
from sparing.valley.compatible import lora_pairs
from sparing.valley.stream import Checkpoint, TensorEntry, checkpoint, floating_kinds, read_tensor


@dataclass(frozen=True, slots=True)
class Source(Mapping[str, Tensor]):
    """A checkpoint as a mapping of names to tensors, each read when it is asked for and never cached."""

    path: Path  # a folder with config.json, or a .safetensors file
    label: str  # what messages and pages call it
    entries: Checkpoint  # what its headers say

    def __getitem__(self, name: str) -> Tensor:
        """Read one tensor."""
        place = self.entries[name]
        try:
            return read_tensor(name, place)
        except (SafetensorError, OSError) as error:
            _refuse(place.file, f"it changed while it was read ({_words(error)})", "run again")

    def __iter__(self) -> Iterator[str]:
        """Names, in the order of the files."""
        return iter(self.entries)

    def __len__(self) -> int:
        """Tensors (count)."""
        return len(self.entries)

    @property
    def files(self) -> list[Path]:
        """Its files of weights, in order."""
        return list(dict.fromkeys(entry.file for entry in self.entries.values()))

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, which says itself what its model is."""
        return self.path.is_dir()


@dataclass(frozen=True, slots=True)
class Derived(Mapping[str, Tensor]):
    """Tensors that are worked out when they are asked for, such as the change of a model since its base."""

    names: tuple[str, ...]
    make: Callable[[str], Tensor]  # works out the tensor of a name

    def __getitem__(self, name: str) -> Tensor:
        """Work out one tensor."""
        return self.make(name)

    def __iter__(self) -> Iterator[str]:
        """The names, in order."""
        return iter(self.names)

    def __len__(self) -> int:
        """Tensors (count)."""
        return len(self.names)


def changes(source: Source, base: Source | None, names: Sequence[str]) -> Derived:
    """What a model changed of its base, or without one its weights, in float32 or finer; read on demand."""

    def make(name: str) -> Tensor:
        value = source[name]
        wide = value.to(torch.promote_types(value.dtype, torch.float32))
        return wide if base is None else wide - base[name].to(wide.dtype)

    return Derived(tuple(names), make)


def _refuse(path: Path, why: str, do: str) -> NoReturn:
    raise UserError("checkpoint", got=path, why=why, do=do) from None


def _words(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:100]


def _folder(path: Path) -> Path:
    """The folder itself, or ``model`` in that of one of our runs; adapters and quantised models are refused."""
    inner = path / "model"
    folder = inner if (inner / "config.json").is_file() and not (path / "config.json").is_file() else path
    if (folder / "adapter_config.json").is_file() or (folder / "adapter_model.safetensors").is_file():
        why = "it holds a LoRA adapter: (A, B) and (−A, −B) are one model, so signs and means of factors say nothing"
        _refuse(folder, why, "merge each adapter into its base first: peft's merge_and_unload, then save_pretrained")
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        quantised = bool(config.get("quantization_config"))
    except FileNotFoundError:
        _refuse(folder, "it has no config.json", "pass the folder that save_pretrained wrote")
    except (ValueError, AttributeError, OSError, RecursionError) as error:
        _refuse(folder, f"its config.json is broken ({_words(error)})", "save the model again with save_pretrained")
    if quantised:
        _refuse(folder, "its weights are quantised, and such have no average", "pass the unquantised model")
    return folder


def open_source(path: Path, label: str) -> Source:
    """Open a checkpoint; only headers are read."""
    if path.suffix in PICKLED:
        _refuse(path, "pickled files are not opened: they can run code", "save it with safetensors.torch.save_file")
    if not path.exists():
        _refuse(path, "there is no such file or folder", "pass a folder of save_pretrained, or a .safetensors file")
    place = _folder(path) if path.is_dir() else path
    pickled = place.is_dir() and not any(place.glob("*.safetensors"))
    why, do = "it has no *.safetensors weights, and pickled ones are not opened", "save it again with save_pretrained"
    require(not pickled, "checkpoint", place, why, do)
    entries = checkpoint(place)
    require(bool(entries), "checkpoint", place, "it holds no tensor", "pass a checkpoint with weights")
    if pairs := lora_pairs(entries):
        why = f"{pairs[0]!r} has LoRA factors: (A, B) and (−A, −B) are one model, so their mean says nothing"
        _refuse(place, why, "merge each adapter into its base first: peft's merge_and_unload, then save_pretrained")
    return Source(place, label, entries)


def open_all(models: Sequence[Path], labels: Sequence[str], base: Path | None) -> tuple[list[Source], Source | None]:
    """Open the models and their base, and check by their headers that they belong together."""
    sources = [open_source(path, label) for path, label in zip(models, labels, strict=True)]
    origin = None if base is None else open_source(base, "the base")
    checkpoints = sources if origin is None else [*sources, origin]
    for at, one in enumerate(checkpoints):
        for other in checkpoints[:at]:
            same = one.files[0].samefile(other.files[0])
            why = f"{other.label} and {one.label} are the same file"
            require(not same, "models", one.path, why, "name each model once, and none of them as the base")
            _require_alike(other, one)
    compare_folders([one.path for one in checkpoints], [one.label for one in checkpoints])
    return sources, origin


def differences(sources: Sequence[Source], base: Source | None) -> list[str]:
    """What differs between checkpoints but changes no function: training settings, chat templates, number formats."""
    checkpoints = [*sources, *([base] if base else [])]
    labels = [one.label for one in checkpoints]
    kinds = [floating_kinds(one.entries) for one in checkpoints]
    return [*compare_folders([one.path for one in checkpoints], labels), *dtype_notes(kinds, labels)]


def _require_alike(one: Source, other: Source) -> None:
    """Name the first tensor in which two checkpoints differ."""
    # Both directions: a tensor may be in either checkpoint alone.
    for name in [*one, *(name for name in other if name not in one.entries)]:
        mine, theirs = one.entries.get(name), other.entries.get(name)
        fits = mine is not None and theirs is not None and mine.shape == theirs.shape
        got = f"{_shape(mine)} in {one.label} and {_shape(theirs)} in {other.label}"
        why, do = "only models of one architecture can be merged", "pass checkpoints of the same model"
        require(fits, f"models, which first differ at {name!r}", got, why, do)
        assert mine is not None
        assert theirs is not None
        kinds = is_floating(mine) == is_floating(theirs)
        got = f"{mine.kind} in {one.label} and {theirs.kind} in {other.label}"
        why, do = "one of them is quantised or is a counter", "pass the unquantised model"
        require(kinds, f"models, which first differ at {name!r}", got, why, do)


def _shape(entry: TensorEntry | None) -> str:
    return "nothing" if entry is None else f"shape {entry.shape}"


def is_floating(entry: TensorEntry) -> bool:
    """Whether a tensor holds floating numbers."""
    return entry.kind.startswith(("F", "BF"))
