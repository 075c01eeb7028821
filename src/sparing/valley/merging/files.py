"""Merging checkpoints on disk, one tensor at a time: a model need not fit into memory to be merged.

A checkpoint is a safetensors file, or a folder with one or with shards and their index, as transformers saves it.
The headers say where each tensor is, in the result too. So tensors are read slice by slice, merged, and written in the
order of the result; no tensor is ever whole in memory. Files are read, not mapped: mapped pages would count as memory
of the process until the system reclaims them.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO
from warnings import warn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparing.errors import UserError, require
from sparing.valley.merging.compatible import (
    Layout,
    must_agree,
    require_averageable,
    require_finite,
    require_same_tensors,
    surely_finite,
)
from sparing.valley.merging.linear import Linear
from sparing.valley.merging.merge import is_weight, require_base, rule_for, warn_of_factors
from sparing.valley.merging.method import Method, Slices, slice_lengths, zip_slices
from sparing.valley.merging.model_folders import CONFIG, compare_folders, config_text, dtype_notes

WEIGHTS = "model.safetensors"  # name of a checkpoint's only file
INDEX = "model.safetensors.index.json"  # name of the file that says which shard holds which tensor
# files of a model folder that are copied: settings, tokenizer, chat template
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")

KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint: what it is, and where."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # dtype as safetensors spells it, such as ``BF16``
    start: int  # offset of its data in the file (bytes)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return KINDS[self.kind].itemsize * self.count

    @property
    def floating(self) -> bool:
        """Whether it holds floating numbers."""
        return KINDS[self.kind].is_floating_point

    @property
    def layout(self) -> Layout:
        """What must be equal for two tensors to be merged."""
        return self.shape, self.floating, self.kind


Checkpoint = Mapping[str, TensorEntry]


def merge_files(
    models: Sequence[str | Path],
    out: str | Path,
    *,
    base: str | Path | None = None,
    method: Method | None = None,
    on_tensor: Callable[[str, int], None] | None = None,  # called after each tensor with name and size (bytes)
    note: Callable[[str], object] = warn,  # called with each difference that does not change the function
) -> Path:
    """Merge checkpoints from disk to disk, with the numbers of ``merge``; return the new folder.

    The result has the files, names and dtypes of the first model, and the config and tokenizer of the base (of the
    first model where there is none); its config.json names the dtype of the weights.
    """
    method, out = Linear() if method is None else method, Path(out).absolute()
    require(bool(models), "models", "none", "there is nothing to merge", "pass at least one")
    require_base(method, base)
    free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    require(free, "out", out, "there is something already", "name a folder that does not exist")
    paths = [Path(path) for path in (*models, *([] if base is None else [base]))]
    found = [checkpoint(path) for path in paths]
    labels = [str(path) for path in paths]
    for other, label in zip(found[1:], labels[1:], strict=True):
        layouts = [{name: entry.layout for name, entry in one.items()} for one in (found[0], other)]
        require_same_tensors(layouts[0], layouts[1], labels[0], label)
    for sentence in [*compare_folders(paths, labels), *dtype_notes([floating_kinds(each) for each in found], labels)]:
        note(sentence)
    warn_of_factors(list(found[0]))
    with drafted(out) as folder:
        _write_weights(folder, found, labels, base is not None, method, on_tensor)
        _copy_companions(folder, paths[-1 if base is not None else 0], paths[0], floating_kinds(found[0]))
    return out


@contextlib.contextmanager
def drafted(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its name when it is complete; what a killed process left of one is deleted."""
    draft = out.with_name(f".{out.name}.draft")
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        if out.exists():
            out.rmdir()
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def floating_kinds(entries: Checkpoint) -> set[str]:
    """Dtypes of the floating tensors of a checkpoint, as safetensors spells them."""
    return {entry.kind for entry in entries.values() if entry.floating}


def checkpoint(path: str | Path) -> dict[str, TensorEntry]:
    """List the tensors of a checkpoint without reading them, in the order of the files and then of safetensors."""
    path = Path(path)
    if (path / INDEX).is_file():
        promised = _weight_map(path / INDEX)
        files = [path / name for name in dict.fromkeys(promised.values())]
    else:
        promised, files = {}, [path / WEIGHTS if path.is_dir() else path]
    entries: dict[str, TensorEntry] = {}
    for file in files:
        do = f"give a .safetensors file or a folder with {WEIGHTS} or {INDEX}"
        require(file.is_file(), "checkpoint", file, "there is no such file", do)
        entries |= _read_header(file)
    for name, file_name in promised.items():
        if name not in entries or entries[name].file.name != file_name:
            why = f"{INDEX} says that it holds {name!r}, and it does not"
            raise UserError("checkpoint", got=path / file_name, why=why, do="download the checkpoint again")
    return entries


def read_tensor(name: str, entry: TensorEntry) -> Tensor:
    """Read one tensor from disk, to the CPU."""
    with entry.file.open("rb", buffering=0) as file:
        file.seek(entry.start)
        return _read_numbers(file, name, entry, entry.count).view(entry.shape)


def read_slices(name: str, entry: TensorEntry) -> Slices:
    """Return the slices of a tensor on disk, read when they are asked for."""

    def read() -> Iterator[Tensor]:
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start)
            for count in slice_lengths(entry.count):
                yield _read_numbers(file, name, entry, count)

    return Slices(read, entry.shape)


def checked(source: Slices, name: str, label: str) -> Slices:
    """Return slices of a model's tensor that are refused at their first reading where they are not finite."""
    known = False

    def read() -> Iterator[Tensor]:
        nonlocal known
        for part in source():
            if not known and not surely_finite(part):
                require_finite(f"{label} at {name!r}", source())  # counts all bad numbers
            yield part
        known = True

    return Slices(read, source.shape)


def _read_numbers(file: FileIO, name: str, entry: TensorEntry, count: int) -> Tensor:
    """Read ``count`` elements at the file's position."""
    tensor = torch.empty(count, dtype=KINDS[entry.kind])
    left = memory_of(tensor)
    # An unbuffered read goes straight to the tensor's memory, and may return less than it was asked for
    while len(left):
        got = file.readinto(left)
        if not got:
            why = f"it ends within {name!r}, and did not when it was opened: it changed while it was read"
            raise UserError("checkpoint", got=entry.file, why=why, do="run again")
        left = left[got:]
    return tensor


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    # NumPy has no bfloat16; bytes it has
    return tensor.view(torch.uint8).numpy().data


def _write_weights(
    folder: Path, found: Sequence[Checkpoint], labels: Sequence[str], ancestor: bool, method: Method,
    on_tensor: Callable[[str, int], None] | None,
) -> None:  # fmt: skip
    """Write every file of the first checkpoint with merged tensors, and the index."""
    weights = [name for name, entry in found[0].items() if is_weight(name, entry.floating)]
    readers = [
        {name: checked(read_slices(name, entry), name, label) for name, entry in each.items()}
        for each, label in zip(found, labels, strict=True)
    ]
    # Lazy readers: only a method that needs whole models reads here, a slice at a time
    known = [{name: each[name] for name in weights} for each in readers]
    method = method.ready(known[:-1] if ancestor else known, known[-1] if ancestor else None)
    shards: dict[Path, dict[str, TensorEntry]] = {}
    for name, entry in found[0].items():
        shards.setdefault(entry.file, {})[name] = entry
    # The names of the first checkpoint's shards: whatever loads that one loads the merge
    for shard, entries in shards.items():
        target = WEIGHTS if len(shards) == 1 else shard.name
        with (folder / target).open("wb") as file:
            write_header(file, entries, _metadata(shard))
            for name, entry in entries.items():
                models = [each[name] for each in readers]
                if must_agree(name, floating=entry.floating):
                    for parts in zip_slices(models):
                        require_averageable(name, parts, labels)
                origin = models.pop() if ancestor else None
                if origin is not None and not (method.needs_base and is_weight(name, entry.floating)):
                    collections.deque(origin(), maxlen=0)  # nobody reads it, and it is looked at all the same
                for piece in rule_for(method, name, entry.floating)(name, models, origin):
                    file.write(memory_of(piece))
                if on_tensor is not None:
                    on_tensor(name, entry.size)
    if len(shards) > 1:
        weight_map = {name: entry.file.name for name, entry in found[0].items()}
        total = {"total_size": sum(entry.size for entry in found[0].values())}
        text = json.dumps({"metadata": total, "weight_map": weight_map}, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def _metadata(shard: Path) -> dict[str, str]:
    """What a file says of itself."""
    with safe_open(shard, framework="pt") as original:
        return dict(original.metadata() or {"format": "pt"})


def write_header(file: BinaryIO, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
    """Write the header of a safetensors file: a length in 8 bytes, and JSON padded to a multiple of 8."""
    contents: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, entry in entries.items():
        end = start + entry.size
        contents[name] = {"dtype": entry.kind, "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(contents, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def _copy_companions(folder: Path, base: Path, first: Path, kinds: set[str]) -> None:
    """Copy config and tokenizer files, from the base where it has them; config.json names the dtype of the merge."""
    if (config := config_text(base, kinds) or config_text(first, kinds)) is not None:
        (folder / CONFIG).write_text(config, encoding="utf-8")
    for source in (base, first):
        if source.is_dir():
            for file in sorted(each for pattern in COMPANIONS for each in source.glob(pattern)):
                if not file.name.endswith(".index.json") and not (folder / file.name).exists():
                    shutil.copyfile(file, folder / file.name)


def _weight_map(index: Path) -> dict[str, str]:
    """Read an index; refuse file names that lead out of the folder."""
    try:
        promised: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        fine = bool(promised) and all(Path(file).name == file for file in promised.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise _unreadable(index, error) from error
    require(fine, "checkpoint", index, "its shards must be files beside it", "download the checkpoint again")
    return promised


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """List the tensors of one file."""
    entries = {}
    try:
        # safe_open checks that the file is as long as its header says; it does not give the offsets
        with safe_open(file, framework="pt"), file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            for name, fields in json.loads(opened.read(length)).items():
                if name != "__metadata__":
                    # Offsets count from the end of the header, which starts with its own length in 8 bytes
                    start = 8 + length + fields["data_offsets"][0]
                    entries[name] = TensorEntry(file, tuple(fields["shape"]), fields["dtype"], start)
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    for name, entry in entries.items():
        why, do = "such numbers cannot be averaged", "convert it to a floating dtype"
        require(entry.kind in KINDS, f"{file} at {name!r}", entry.kind, why, do)
    # As safetensors orders tensors when it writes them: wide dtypes first, then names
    return dict(sorted(entries.items(), key=lambda item: (-KINDS[item[1].kind].itemsize, item[0])))


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError("checkpoint", got=file, why=f"it is torn or no safetensors ({error})", do="download it again")
