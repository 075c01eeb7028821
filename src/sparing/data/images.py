"""Images in the idx format of MNIST and its relatives, and colour images brought into it.

Source: LeCun, Cortes & Burges, "The MNIST database of handwritten digits" (the format is at the foot of that page).
"""

from __future__ import annotations

import json
import shutil
import struct
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from sparing.data.archives import ArchiveError, gunzip

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Split = Literal["train", "test"]

NAMES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
"""Split -> (images, labels), as every distribution of these sets names them; colour images have a fourth axis."""

FILES = tuple(name for pair in NAMES.values() for name in pair)
"""The four files of a set."""

SHEETS: dict[Split, tuple[tuple[str, ...], str]] = {
    "train": (tuple(f"data_batch_{number}.png" for number in range(1, 6)), "train_lables.json"),
    "test": (("test_batch.png",), "test_lables.json"),
}
"""Split -> (sheets, labels) of the packaged CIFAR-10; the package spells labels so."""

SHEET_FILES = tuple(name for sheets, labels in SHEETS.values() for name in (*sheets, labels))
"""Its eight files."""


def read_idx(data: bytes) -> Tensor:
    """Read an idx file of unsigned bytes.

    Args:
        data: The whole file: two zero bytes, type 8, the number of axes, each axis as big-endian uint32, the bytes.

    Returns:
        uint8, in the file's shape.

    Raises:
        ValueError: If the file is no idx file of unsigned bytes, or its length is not what its header says.
    """
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError("not an idx file of unsigned bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    body = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3])
    if body.size != int(np.prod(shape)):
        raise ValueError(f"the header asks for {shape}, the file has {body.size} bytes")
    return torch.from_numpy(body.reshape(shape).copy())


def read_split(folder: Path, split: Split) -> tuple[Tensor, Tensor]:
    """Read one split of a set.

    Args:
        folder: Folder with the four idx files.
        split: Which half.

    Returns:
        Images uint8 (N, rows, columns), of colour images (N, rows, columns, 3); labels int64 (N,).

    Raises:
        ValueError: If a file is damaged or the two do not belong together.
    """
    images, labels = (read_idx((folder / name).read_bytes()) for name in NAMES[split])
    if images.ndim not in {3, 4} or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(f"{tuple(images.shape)} images and {tuple(labels.shape)} labels do not belong together")
    return images, labels.long()


def build_idx(members: Path, out: Path) -> None:
    """Put the four idx files in place, decompressed where the package compressed them.

    Args:
        members: Folder with the four files, each plain or with ``.gz`` at its end.
        out: Existing directory to fill.
    """
    for name in FILES:
        if (members / f"{name}.gz").exists():
            gunzip(members / f"{name}.gz", out / name, limit=1 << 27)
        else:
            shutil.copyfile(members / name, out / name)


def write_idx(array: np.ndarray[Any, np.dtype[np.uint8]], path: Path) -> None:
    """Write an idx file of unsigned bytes.

    Args:
        array: uint8, of one to 255 axes.
        path: File to write.
    """
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    with path.open("wb") as file:
        file.write(header)
        file.write(array.tobytes())


def read_sheet(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read a PNG of which each row of pixels is one image of 32 × 32, row after row.

    Args:
        path: The file, 1024 pixels wide, RGB.

    Returns:
        uint8 (N, 32, 32, 3).

    Raises:
        ArchiveError: If it is no such picture.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            kind, width = picture.mode, picture.width
            pixels = np.asarray(picture)
    except (UnidentifiedImageError, SyntaxError) as error:
        raise ArchiveError(f"{path.name} is no PNG ({error})") from error
    if kind != "RGB" or width != 1024:
        raise ArchiveError(f"{path.name} is {kind}, {width} pixels wide; RGB of 1024 was expected")
    return pixels.reshape(-1, 32, 32, 3)


def build_sheets(members: Path, out: Path) -> None:
    """Turn the sheets of CIFAR-10 into the four idx files, images with a last axis of red, green, blue.

    Args:
        members: Folder with the eight files of the package.
        out: Existing directory to fill.
    """
    for split, (sheets, labels) in SHEETS.items():
        images, targets = NAMES[split]
        write_idx(np.concatenate([read_sheet(members / name) for name in sheets]), out / images)
        write_idx(np.array(json.loads((members / labels).read_text()), dtype=np.uint8), out / targets)
