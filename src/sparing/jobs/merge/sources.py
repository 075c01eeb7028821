"""Checkpoints on the disk: opened by their headers, checked against each other, read and merged tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparing.errors import UserError, require
from sparing.jobs import hub
from sparing.jobs.disk import refusing_to_write, write_folder
from sparing.jobs.subjects.folders import PICKLED
from sparing.valley.merging.compatible import lora_pairs, require_same_tensors
from sparing.valley.merging.files import Checkpoint, checkpoint, floating_kinds, merge_files, read_tensor
from sparing.valley.merging.method import Method
from sparing.valley.merging.model_folders import compare_folders, dtype_notes

MODEL, WEIGHTS = "model", "model.safetensors"  # names of the merge in OUT: a folder for folders, a file for files

# Number formats of batch-norm statistics and of their counters.
_KINDS: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
}  # fmt: skip

_MERGE_FIRST = "merge each adapter into its base first: peft's merge_and_unload, then save_pretrained"


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
        _refuse(folder, why, _MERGE_FIRST)
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
    path = hub.folder_of(path)
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
        _refuse(place, why, _MERGE_FIRST)
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
            layouts = [{name: entry.layout for name, entry in source.entries.items()} for source in (other, one)]
            require_same_tensors(layouts[0], layouts[1], other.label, one.label)
    compare_folders([one.path for one in checkpoints], [one.label for one in checkpoints])
    return sources, origin


def differences(sources: Sequence[Source], base: Source | None) -> list[str]:
    """What differs between checkpoints but changes no function: training settings, chat templates, number formats."""
    checkpoints = [*sources, *([base] if base else [])]
    labels = [one.label for one in checkpoints]
    kinds = [floating_kinds(one.entries) for one in checkpoints]
    return [*compare_folders([one.path for one in checkpoints], labels), *dtype_notes(kinds, labels)]


def place_of(out: Path, first: Source) -> Path:
    """Where the merge is written: a folder for folders, a file for files."""
    return out / (MODEL if first.is_folder else WEIGHTS)


def write_merge(
    place: Path,
    method: Method,
    sources: Sequence[Source],
    base: Source | None,
    statistics: Mapping[str, Tensor],
    tell: Callable[[str, int], None] | None = None,
) -> None:
    """Merge models tensor by tensor, whole or not at all; ``tell`` is called with name and bytes of each tensor.

    ``statistics``, by name, replace those of the merge; shapes and number formats stay.
    """
    paths, ancestor = [source.path for source in sources], None if base is None else base.path

    def fill(draft: Path) -> None:
        # What differs between the files was reported when they were opened.
        merge_files(paths, draft, base=ancestor, method=method, on_tensor=tell, note=lambda told: None)
        places = checkpoint(draft)
        for name, tensor in statistics.items():
            data = tensor.to(_KINDS[places[name].kind]).contiguous()
            assert data.shape == places[name].shape
            # over the old bytes: shape and number format stay, so the header and all other tensors do too
            with places[name].file.open("r+b") as file:
                file.seek(places[name].start)
                file.write(data.flatten().view(torch.uint8).numpy().data)

    if sources[0].is_folder:
        write_folder(place, fill)
        return
    # A file is written as a folder beside its place, then moved: a rename within one disk is whole or not at all.
    draft = place.with_name(f".{place.name}.draft")
    with refusing_to_write("saving", place):
        try:
            write_folder(draft, fill)
            (draft / WEIGHTS).replace(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
