"""What a sharded checkpoint says about itself: where each parameter lies, what trained, and a hash of every file.

``manifest.json`` is written last, into a folder that has its name only when everything is on the disk. It holds a
hash of itself, so that no byte of the folder can change unseen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.errors import UserError, require
from sparing.report.atomic import write_whole

# Version of the layout on the disk; the first knew of no parameters without state, the second of no low-bit wires, the
# third of no local steps.
FORMAT = 4

NAME = "manifest.json"
SUFFIX = ".safetensors"
# what the optimizer keeps as numbers, not as tensors
PLAIN: Mapping[str, Callable[[float], float]] = {"int": int, "float": float}
DAMAGED = "it would not resume to the same bits"
REMEDY = "copy it again from where it is whole, or take an earlier one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a parameter lies in a flat tensor."""

    name: str  # canonical
    shape: tuple[int, ...]
    offset: int  # first element in the flat tensor
    group: int  # index of its parameter group


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A saved bucket."""

    # Of the bucket; its tensors are NAME/master and NAME/state/KEY where it trains, else NAME/params.
    name: str
    plan: str  # it was saved under; does not matter for reading
    dtype: str  # of the parameters, such as ``bfloat16``
    saved: str  # dtype on the disk: the optimizer's where it trains
    trains: bool
    places: tuple[Place, ...]
    state: Mapping[str, str] = field(default_factory=dict)  # dtype of each flat tensor of the optimizer's state
    # Value and dtype of each 0-d one; "int" or "float" of what the optimizer keeps as a number.
    scalars: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    unused: Sequence[str] = ()  # parameters that never had a gradient, and so have no state
    # Whether NAME/params lags behind NAME/master, as low-bit wires let it, and is saved beside it.
    lags: bool = False
    residual: bool = False  # whether NAME/residual is what low-bit wires owe of gradients
    loss_scale: float = 1.0  # of those gradients
    # With local steps, the scalars of each group's state; those of the first are in ``scalars``.
    own_scalars: Sequence[Mapping[str, tuple[float, str]]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything about a checkpoint but its tensors."""

    world: int  # ranks that wrote it
    sizes: tuple[int, ...]  # ranks along each axis, innermost first
    steps: int
    skipped: int  # steps whose gradients were not finite
    optimizer: str  # class name
    groups: tuple[Mapping[str, Any], ...]  # options of each parameter group
    parts: tuple[Part, ...]
    names: Mapping[str, str]  # name in ``state_dict`` -> canonical name; tied ones have several
    buffers: Mapping[str, tuple[str, tuple[int, ...]]]  # name in ``state_dict`` -> dtype, shape
    extra: Mapping[str, Any]  # what the caller added
    files: Mapping[str, str]  # file name -> SHA-256, without the manifest
    # Steps since groups that train alone last met; None: all ranks take each step together. NAME/master is then what
    # groups have in common, NAME/own/… what each has for itself, and NAME/momentum the outer step's.
    inner: int | None = None

    @property
    def places(self) -> dict[str, tuple[Part, Place]]:
        """Canonical name -> where it is."""
        return {place.name: (part, place) for part in self.parts for place in part.places}


def dtype_of(name: str) -> torch.dtype:
    """The number format of a name such as ``bfloat16``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def name_of(dtype: torch.dtype) -> str:
    """Such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def scalar_of(value: Tensor | float, *, plain: bool = False) -> tuple[float, str]:
    """A 0-d tensor, or a ``plain`` number that may be held as one, as a manifest has it."""
    if isinstance(value, Tensor) and not plain:
        return value.item(), name_of(value.dtype)
    number = value.item() if isinstance(value, Tensor) else value
    return number, "float" if isinstance(number, float) else "int"


def scalar_from(value: float, kind: str, device: torch.device | None = None) -> Tensor | float:
    """What ``scalar_of`` was given; a plain number is one again."""
    if kind in PLAIN:
        return PLAIN[kind](value)
    return torch.tensor(value, dtype=dtype_of(kind), device=device)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and force it to the disk."""
    body = json.loads(json.dumps(dataclasses.asdict(manifest)))  # as it will be read: tuples are lists
    text = json.dumps({"format": FORMAT, "sha256": _seal(body), "body": body}, indent=1)
    write_whole(folder / NAME, text + "\n")


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint; refuse one that is missing, torn or of another format."""
    path = folder / NAME
    why, do = "a checkpoint that was written to its end has one", "name the folder of a checkpoint"
    require(path.is_file(), "checkpoint", f"no {NAME} in {folder}", why, do)
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        version, sealed, body = held["format"], held["sha256"], held["body"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"checkpoint {folder}", got=f"{NAME} is torn or changed", why=DAMAGED, do=REMEDY) from None
    why, do = f"this version of sparing reads formats 1 to {FORMAT}", "use the version that wrote it"
    require(version in range(1, FORMAT + 1), "checkpoint", f"format {version} in {path}", why, do)
    if _seal(body) != sealed:
        raise UserError(f"checkpoint {folder}", got=f"{NAME} is torn or changed", why=DAMAGED, do=REMEDY)
    parts = [
        part | {"places": tuple(Place(**(place | {"shape": tuple(place["shape"])})) for place in part["places"])}
        for part in body.pop("parts")
    ]
    body["sizes"] = tuple(body["sizes"])
    return Manifest(parts=tuple(Part(**part) for part in parts), **body)


def check_files(folder: Path, manifest: Manifest, rank: int = 0, world: int = 1) -> None:
    """Compare this rank's share of the files with their hashes, and refuse files that nothing names."""
    strange = sorted({path.name for path in folder.glob(f"*{SUFFIX}")} - manifest.files.keys())
    if strange:
        why, do = "the manifest does not name it, and its tensors would be read as shards", "move it elsewhere"
        raise UserError("checkpoint", got=f"{strange[0]} in {folder}", why=why, do=do)
    for name in sorted(manifest.files)[rank::world]:
        if not (folder / name).is_file():
            raise UserError(f"checkpoint {folder}", got=f"{name} is missing", why=DAMAGED, do=REMEDY)
        if digest(folder / name) != manifest.files[name]:
            raise UserError(f"checkpoint {folder}", got=f"{name} is torn or changed", why=DAMAGED, do=REMEDY)
