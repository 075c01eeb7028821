"""Ways to damage a checkpoint: pure functions of a folder and a stream of random numbers, each told in a word."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = 4096
"""Bytes of a page of the disk."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is damaged, and what may take its place."""

    files: tuple[Path, ...]
    """Files of the checkpoint that would be loaded, and the run's mark where there is one."""

    donors: tuple[Path, ...]
    """The same files of another run, in the same order."""

    older: tuple[Path, ...] = ()
    """The same files of an older checkpoint of this run, those that it has; none where only one is kept."""


Damage = Callable[[Target, random.Random], None]


def _chosen(target: Target, draw: random.Random) -> tuple[Path, bytearray]:
    path = draw.choice([path for path in target.files if path.stat().st_size])
    return path, bytearray(path.read_bytes())


def flip(target: Target, draw: random.Random) -> None:
    """One bit, anywhere."""
    path, raw = _chosen(target, draw)
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


def scribble(target: Target, draw: random.Random) -> None:
    """Sixteen random bytes in a row."""
    path, raw = _chosen(target, draw)
    at = draw.randrange(len(raw))
    raw[at : at + 16] = draw.randbytes(len(raw[at : at + 16]))
    path.write_bytes(raw)


def truncate(target: Target, draw: random.Random) -> None:
    """The end is missing."""
    path, raw = _chosen(target, draw)
    path.write_bytes(raw[: draw.randrange(len(raw))])


def extend(target: Target, draw: random.Random) -> None:
    """Something follows the end: zeros, spaces, the beginning once more or noise."""
    path, raw = _chosen(target, draw)
    count = draw.randint(1, 64)
    path.write_bytes(raw + draw.choice([bytes(count), b" " * count, bytes(raw[:count]), draw.randbytes(count)]))


def zero_page(target: Target, draw: random.Random) -> None:
    """A page, or all of a smaller file, reads as zeros."""
    path, raw = _chosen(target, draw)
    at = PAGE * draw.randrange(-(-len(raw) // PAGE))
    raw[at : at + PAGE] = bytes(len(raw[at : at + PAGE]))
    path.write_bytes(raw)


def copy_page(target: Target, draw: random.Random) -> None:
    """A stretch stands where another should."""
    path, raw = _chosen(target, draw)
    size = min(PAGE, max(1, len(raw) // 4))
    here, there = (draw.randrange(len(raw) - size + 1) for _ in range(2))
    raw[there : there + size] = raw[here : here + size]
    path.write_bytes(raw)


def swap(target: Target, draw: random.Random) -> None:
    """Two files have each other's content."""
    one, other = draw.sample(target.files, 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def delete(target: Target, draw: random.Random) -> None:
    """A file is gone."""
    draw.choice(target.files).unlink()


def replace(target: Target, draw: random.Random) -> None:
    """A file is another run's."""
    at = draw.randrange(len(target.files))
    shutil.copyfile(target.donors[at], target.files[at])


def replace_all(target: Target, draw: random.Random) -> None:
    """All files but the run's mark are another run's."""
    for path, donor in zip(target.files, target.donors, strict=True):
        if path.name != "run.json":
            shutil.copyfile(donor, path)


def put_back(target: Target, draw: random.Random) -> None:
    """One or all of the files are an older checkpoint's, under the newer one's name."""
    # a sharded checkpoint has two manifests, of which one lies with its slices
    place = lambda path: (path.parent.name == "slices", path.name)  # noqa: E731  a line says it
    files = {place(path): path for path in target.files}
    for path in draw.choice([target.older, [draw.choice(target.older)]]):
        shutil.copyfile(path, files[place(path)])


def edit_json(target: Target, draw: random.Random) -> None:
    """One entry of a JSON file, or of the JSON at the head of a safetensors file, is another one, lacking or new."""
    path = draw.choice(target.files)
    raw = path.read_bytes()
    head = b"" if path.suffix == ".json" else raw[:8]
    size = int.from_bytes(head, "little") if head else len(raw)
    tree = json.loads(raw[len(head) : len(head) + size])
    _edit(tree, draw)
    text = json.dumps(tree).encode()
    path.write_bytes((len(text).to_bytes(8, "little") if head else b"") + text + raw[len(head) + size :])


def _edit(tree: Any, draw: random.Random) -> None:
    """Change a nest of dicts and lists in one place."""
    places = list(_places(tree))
    inside, key = draw.choice(places)
    act = draw.choice(["change", "change", "change", "drop", "rename"])
    if act == "drop":
        del inside[key]
    elif act == "rename" and isinstance(inside, dict):
        inside[f"{key} "] = inside.pop(key)
    else:
        inside[key] = _other(inside[key], draw)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    keys: Sequence[Any] = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in _places(tree[key])]


def _other(value: Any, draw: random.Random) -> Any:
    """Something else than a value, often of the same kind."""
    strange = [None, [], {}, "", -1, 1e308, True, "0" * 64, [[]]]
    if isinstance(value, bool):
        near: list[Any] = [not value]
    elif isinstance(value, int):
        near = [value + 1, -value - 1, value * 2 + 1, value + 0.5]
    elif isinstance(value, float):
        near = [value * 1.5 + 1, -value - 1]
    elif isinstance(value, str):
        near = [value[::-1] + "x", value[:-1] + "~", f"../{value}"]
    else:
        near = [value * 2 if isinstance(value, list) and value else {"a": 1}]
    return draw.choice([*near, *near, draw.choice([one for one in strange if one != value])])


KINDS: tuple[Damage, ...] = (
    flip, scribble, truncate, extend, zero_page, copy_page, swap, delete, replace, replace_all, put_back, edit_json,
)  # fmt: skip
"""Every way."""
