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

# split -> (images, labels), as every distribution of these sets names them; colour images have a fourth axis
NAMES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}

FILES = tuple(name for pair in NAMES.values() for name in pair)  # the four files of a set

# split -> (sheets, labels) of the packaged CIFAR-10; "lables" is the package's spelling
SHEETS: dict[Split, tuple[tuple[str, ...], str]] = {
    "train": (tuple(f"data_batch_{number}.png" for number in range(1, 6)), "train_lables.json"),
    "test": (("test_batch.png",), "test_lables.json"),
}

SHEET_FILES = tuple(name for sheets, labels in SHEETS.values() for name in (*sheets, labels))  # its eight files


def read_idx(data: bytes) -> Tensor:
    """Read an idx file of unsigned bytes into a uint8 tensor of the file's shape."""
    # two zero bytes, the type (8: unsigned byte), the number of axes
    if len(data) < 4 or data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError("not an idx file of unsigned bytes")
    shape = struct.unpack_from(f">{data[3]}I", data, 4)
    # the header's fourth byte is the number of axes, each a big-endian uint32
    body = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * data[3])
    if body.size != int(np.prod(shape)):
        raise ValueError(f"the header asks for {shape}, the file has {body.size} bytes")
    # a copy: the bytes are read-only
    return torch.from_numpy(body.reshape(shape).copy())


def read_split(folder: Path, split: Split) -> tuple[Tensor, Tensor]:
    """Read one split: images uint8 (N, rows, columns) or (N, rows, columns, 3), labels int64 (N,)."""
    images, labels = (read_idx((folder / name).read_bytes()) for name in NAMES[split])
    if images.ndim not in {3, 4} or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(f"{tuple(images.shape)} images and {tuple(labels.shape)} labels do not belong together")
    return images, labels.long()


def build_idx(members: Path, out: Path) -> None:
    """Put the four idx files in place, decompressed where the package compressed them."""
    for name in FILES:
        if (members / f"{name}.gz").exists():
            # the largest of the four, the training images, has 47 MB
            gunzip(members / f"{name}.gz", out / name, limit=1 << 27)
        else:
            shutil.copyfile(members / name, out / name)


def write_idx(array: np.ndarray[Any, np.dtype[np.uint8]], path: Path) -> None:
    """Write an idx file of unsigned bytes."""
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    with path.open("wb") as file:
        file.write(header)
        file.write(array.tobytes())


def read_sheet(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read a PNG of which each row of pixels is one RGB image of 32 × 32, row after row: uint8 (N, 32, 32, 3)."""
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
    """Turn the sheets of CIFAR-10 into the four idx files, images with a last axis of red, green, blue."""
    for split, (sheets, labels) in SHEETS.items():
        images, targets = NAMES[split]
        write_idx(np.concatenate([read_sheet(members / name) for name in sheets]), out / images)
        write_idx(np.array(json.loads((members / labels).read_text()), dtype=np.uint8), out / targets)
