"""Checkpoints: safetensors and JSON, whole or not at all, each file known by its hash.

A checkpoint is a directory ``step-00000120`` with ``tensors.safetensors``, ``tree.json`` and ``manifest.json``; of a
sharded run also ``slices``, a folder of the sharding engine whose own manifest has the hashes of its files. It is
written under a temporary name and renamed, so that a full disk or a killed process leaves the one before untouched. The
manifest says of which step and of which run it is, so that one in the place of another is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from sparing.errors import UserError
from sparing.jobs.disk import digest, tight, write_folder

# checkpoints that stay on disk: two, so that ``load`` has one to offer where the newest is damaged
KEPT = 2

TENSORS, TREE, MANIFEST = "tensors.safetensors", "tree.json", "manifest.json"
SLICES = "slices"  # what several ranks wrote
DRAFT = f".{SLICES}.draft"  # where it waits for the rest of its checkpoint
_REFERENCE = "__tensor__"
# raised when the tree changes, so that an older run is refused in a line: in 3 finetune and pretrain had trees of their
# own
_FORMAT = 4


def to_plain(tree: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """A nest of dicts, lists and tensors as plain JSON, with a reference for each tensor, moved into ``tensors``.

    Dicts have string or integer keys, which come back as they were; tuples come back as lists.

    Example:
        >>> import torch
        >>> found = {}
        >>> to_plain({"a": torch.ones(1), "b": [1, None]}, found), list(found)
        ({'a': {'__tensor__': 'a'}, 'b': [1, None]}, ['a'])
    """
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach()
        return {_REFERENCE: path}
    if isinstance(tree, Mapping):
        # JSON makes texts of integer keys, and torch's optimizers number their parameters in ``state``
        if any(isinstance(key, int) for key in tree):
            return {"__items__": [[key, to_plain(tree[key], tensors, f"{path}/{key}")] for key in tree]}
        return {key: to_plain(tree[key], tensors, f"{path}/{key}" if path else key) for key in tree}
    if isinstance(tree, list | tuple):
        return [to_plain(item, tensors, f"{path}/{index}") for index, item in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"a checkpoint cannot hold a {type(tree).__name__} at {path!r}")


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``to_plain``."""
    if isinstance(plain, list):
        return [from_plain(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if set(plain) == {_REFERENCE}:
        return tensors[plain[_REFERENCE]]
    if set(plain) == {"__items__"}:
        return {key: from_plain(value, tensors) for key, value in plain["__items__"]}
    return {key: from_plain(value, tensors) for key, value in plain.items()}


def name_of(step: int) -> str:
    """The directory of a checkpoint, named by its step so that names sort."""
    return f"step-{step:08d}"


def save(folder: Path, step: int, tree: Mapping[str, Any], *, run: str = "", slices: bool = False) -> Path:
    """Write a checkpoint of a ``run``, then delete all but the newest two; ``slices`` wait in ``DRAFT``."""
    tensors: dict[str, Tensor] = {}
    plain = to_plain(tree, tensors)

    def fill(draft: Path) -> None:
        save_file(tight(tensors), draft / TENSORS)
        (draft / TREE).write_text(json.dumps(plain), encoding="utf-8")
        if slices:
            (folder / DRAFT).rename(draft / SLICES)
        files = {name: digest(draft / name) for name in _files(draft)}
        manifest = {"format": _FORMAT, "step": step, "run": run, "sha256": files}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    target = folder / name_of(step)
    write_folder(target, fill)
    # only now: a disk that is full while writing must leave the earlier ones
    for path in saved(folder)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def _files(path: Path) -> tuple[str, ...]:
    """Names of the files that a manifest has hashes of; the slices' own manifest has those of theirs."""
    return (TENSORS, TREE, f"{SLICES}/{MANIFEST}") if (path / SLICES).exists() else (TENSORS, TREE)


def saved(folder: Path) -> list[Path]:
    """The checkpoints in a folder that need not exist, oldest first; unfinished ones are left out."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def fault(path: Path, run: str = "") -> str:
    """What is wrong with a checkpoint of a run, in a few words; nothing if it is whole and of the step of its name."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            return f"{MANIFEST} is of another format"
        step, known = name_of(manifest["step"]), manifest["sha256"]
        # both lists: one alone would pass a file that the manifest omits, or slices that were deleted since
        wrong = [name for name in {*_files(path), *known} if digest(path / name) != known.get(name)]
        other = manifest["run"] != run
    except OSError as error:
        return f"{Path(error.filename).name} is missing" if error.filename else "unreadable"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # whatever JSON may hold in place of ours: a list has no ``get``, and brackets without end are a RecursionError
        return f"{MANIFEST} is broken"
    if wrong:
        return f"{', '.join(sorted(wrong))} changed since it was written"
    return "another run wrote it" if other else f"it was written as {step}" if step != path.name else ""


def load(path: Path, *, run: str = "") -> dict[str, Any]:
    """The tree of a checkpoint of a run whose files are as they were written, tensors on the CPU."""
    if wrong := fault(path, run):
        earlier = [other for other in saved(path.parent) if other < path and not fault(other, run)]
        do = f"remove {path} and run again with --resume"
        do += f" to go on from {earlier[-1].name}" if earlier else "; no whole checkpoint is left, so it starts anew"
        raise UserError("checkpoint", got=f"{path.name}: {wrong}", why="it would not resume to the same bits", do=do)
    tensors = load_file(path / TENSORS)
    tree: dict[str, Any] = from_plain(json.loads((path / TREE).read_text(encoding="utf-8")), tensors)
    return tree
