"""Images in the idx format of MNIST and its relatives.

Source: LeCun, Cortes & Burges, "The MNIST database of handwritten digits" (the format is at the foot of that page).
"""

from __future__ import annotations

import shutil
import struct
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from sparing.data.archives import gunzip

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Split = Literal["train", "test"]

NAMES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
"""Split -> (images, labels), as every distribution of these sets names them."""

FILES = tuple(name for pair in NAMES.values() for name in pair)
"""The four files of a set."""


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
        Images uint8 (N, rows, columns), labels int64 (N,).

    Raises:
        ValueError: If a file is damaged or the two do not belong together.
    """
    images, labels = (read_idx((folder / name).read_bytes()) for name in NAMES[split])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
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
