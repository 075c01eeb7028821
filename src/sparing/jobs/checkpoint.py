"""Checkpoints: safetensors and JSON, whole or not at all, each file known by its hash.

A checkpoint is a directory ``step-00000120`` with ``tensors.safetensors``, ``tree.json`` and ``manifest.json``. It is
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

KEPT = 2
"""Checkpoints that stay on disk."""

TENSORS, TREE, MANIFEST = "tensors.safetensors", "tree.json", "manifest.json"
_REFERENCE = "__tensor__"
_FORMAT = 3  # 2: each job had a tree of its own, which the run engine cannot go on from


def to_plain(tree: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """A nest of dicts, lists and tensors as plain JSON, with each tensor moved out.

    Args:
        tree: Dicts with string or integer keys, lists, tuples, tensors, numbers, strings, booleans, None. Tuples come
            back as lists; integer keys come back as integers.
        tensors: Receives the tensors by their path in the tree.
        path: Where ``tree`` stands.

    Returns:
        The tree with ``{"__tensor__": path}`` in place of each tensor.

    Raises:
        TypeError: If the tree holds anything else.

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
        if any(isinstance(key, int) for key in tree):
            return {"__items__": [[key, to_plain(tree[key], tensors, f"{path}/{key}")] for key in tree]}
        return {key: to_plain(tree[key], tensors, f"{path}/{key}" if path else key) for key in tree}
    if isinstance(tree, list | tuple):
        return [to_plain(item, tensors, f"{path}/{index}") for index, item in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"a checkpoint cannot hold a {type(tree).__name__} at {path!r}")


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``to_plain``.

    Args:
        plain: What ``to_plain`` returned.
        tensors: What it moved out.

    Returns:
        The tree.
    """
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
    """The directory of a checkpoint.

    Args:
        step: Optimizer steps finished.

    Returns:
        A name that sorts by step.
    """
    return f"step-{step:08d}"


def save(folder: Path, step: int, tree: Mapping[str, Any], *, run: str = "") -> Path:
    """Write a checkpoint, then delete all but the newest two.

    Args:
        folder: Where checkpoints live.
        step: Optimizer steps finished.
        tree: What ``load`` shall give back.
        run: Whose it is, in any words; ``load`` asks for the same ones.

    Returns:
        The checkpoint's directory.

    Raises:
        UserError: If it cannot be written; the ones before are then untouched.
    """
    tensors: dict[str, Tensor] = {}
    plain = to_plain(tree, tensors)

    def fill(draft: Path) -> None:
        save_file(tight(tensors), draft / TENSORS)
        (draft / TREE).write_text(json.dumps(plain), encoding="utf-8")
        files = {name: digest(draft / name) for name in (TENSORS, TREE)}
        manifest = {"format": _FORMAT, "step": step, "run": run, "sha256": files}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    target = folder / name_of(step)
    write_folder(target, fill)
    for path in saved(folder)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def saved(folder: Path) -> list[Path]:
    """The checkpoints of a run.

    Args:
        folder: Where they live; need not exist.

    Returns:
        Their directories, oldest first; unfinished ones are left out.
    """
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def fault(path: Path, run: str = "") -> str:
    """What is wrong with a checkpoint.

    Args:
        path: Its directory.
        run: Whose it should be.

    Returns:
        A few words, or nothing if it is that step of that run and both files have the hash that the manifest names.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        step, known = name_of(manifest["step"]), manifest["sha256"]
        if manifest["format"] != _FORMAT:
            return f"{MANIFEST} is of another format"
        wrong = [name for name in (TENSORS, TREE) if digest(path / name) != known[name]]
        other = manifest["run"] != run
    except OSError as error:
        return f"{Path(error.filename).name} is missing" if error.filename else "unreadable"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is broken"
    if wrong:
        return f"{', '.join(wrong)} changed since it was written"
    return "another run wrote it" if other else f"it was written as {step}" if step != path.name else ""


def load(path: Path, *, run: str = "") -> dict[str, Any]:
    """Read a checkpoint whose files are as they were written.

    Args:
        path: Its directory.
        run: Whose it should be, as ``save`` was told.

    Returns:
        The tree that was saved, tensors on the CPU.

    Raises:
        UserError: If it is damaged or another's; the message names the whole one before it, if there is one.
    """
    if wrong := fault(path, run):
        earlier = [other for other in saved(path.parent) if other < path and not fault(other, run)]
        do = f"remove {path} and run again with --resume"
        do += f" to go on from {earlier[-1].name}" if earlier else "; no whole checkpoint is left, so it starts anew"
        raise UserError("checkpoint", got=f"{path.name}: {wrong}", why="it would not resume to the same bits", do=do)
    tensors = load_file(path / TENSORS)
    tree: dict[str, Any] = from_plain(json.loads((path / TREE).read_text(encoding="utf-8")), tensors)
    return tree
