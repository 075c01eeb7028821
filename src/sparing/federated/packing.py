"""Trees of tensors as bytes, without pickle: what checkpoints hold and what processes send each other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

Tree = Mapping[str, Any]
"""Names -> tensors or further trees."""

_KEY = "sparing"


def pack(tree: Tree, facts: Any = None) -> bytes:
    """Write a tree of tensors as a safetensors file in memory; ``unpack`` gives the same bits."""
    tensors: dict[str, Tensor] = {}
    empty: list[list[str]] = []
    storages: set[int] = set()
    for path, value in _leaves(tree, ()):
        if value is None:
            empty.append(list(path))
            continue
        plain = value.detach().to("cpu").contiguous()
        # The format has no views: tensors that share memory are written twice.
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        tensors[json.dumps(path)] = plain
    return save(tensors, {_KEY: json.dumps({"empty": empty, "order": list(tensors), "facts": facts})})


def unpack(data: bytes) -> tuple[dict[str, Any], Any]:
    """Read the tree and the facts that ``pack`` wrote; ``ValueError`` for other bytes."""
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        note = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
        tree: dict[str, Any] = {}
        # safetensors sorts by dtype and name; the note has the order in which names came.
        for key in note["order"]:
            _put(tree, json.loads(key), tensors[key])
        for path in note["empty"]:
            _put(tree, path, {})
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"not a whole safetensors file of ours: {error}") from None
    return tree, note["facts"]


def detached_copy(tree: Tree) -> dict[str, Any]:
    """Copy a tree, so that nothing shares memory with a model that goes on training."""
    return {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else detached_copy(value)
        for name, value in tree.items()
    }


def _leaves(tree: Tree, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    for name, value in tree.items():
        if isinstance(value, Tensor):
            yield (*above, name), value
        elif value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), None


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
