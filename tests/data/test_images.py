"""The idx format, read and refused."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from sparing.data import load_images
from sparing.data.archives import ArchiveError
from sparing.data.images import (
    FILES,
    NAMES,
    SHEET_FILES,
    SHEETS,
    build_idx,
    build_sheets,
    read_idx,
    read_split,
    write_idx,
)


def idx(array: torch.Tensor) -> bytes:
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + bytes(array.flatten().tolist())


IMAGES = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
LABELS = torch.tensor([7, 250], dtype=torch.uint8)


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\x08", b"\0\0\x0d\x01\0\0\0\x00", idx(IMAGES)[:9], b"\x1f\x8b\x08\x00" * 9]
)
def test_refuses_what_is_no_idx_file(data: bytes) -> None:
    with pytest.raises(ValueError, match="not an idx file"):
        read_idx(data)


@pytest.mark.parametrize("data", [idx(IMAGES)[:-1], idx(IMAGES) + b"\0"])
def test_refuses_a_length_that_contradicts_the_header(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
        read_idx(data)


def write(folder: Path, *, zipped: bool = False, labels: torch.Tensor = LABELS) -> Path:
    for images_name, labels_name in NAMES.values():
        for name, array in ((images_name, IMAGES), (labels_name, labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))
    return folder


@pytest.mark.parametrize("zipped", [False, True])
def test_builds_plain_files_from_either_packing(tmp_path: Path, zipped: bool) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    build_idx(write(tmp_path / "in", zipped=zipped), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)
    images, labels = read_split(tmp_path / "out", "test")
    assert images.dtype == torch.uint8
    assert labels.tolist() == [7, 250]


def test_refuses_images_and_labels_of_different_lengths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        read_split(write(tmp_path, labels=LABELS[:1]), "train")


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (2, 3, 4, 3), (0, 3, 3)])
def test_what_is_written_is_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = torch.arange(int(np.prod(shape)), dtype=torch.uint8).reshape(shape)
    write_idx(array.numpy(), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == idx(array)
    torch.testing.assert_close(read_idx((tmp_path / "x").read_bytes()), array, rtol=0, atol=0)


def sheets(folder: Path, *, rows: int = 3, width: int = 1024) -> dict[str, np.ndarray]:
    """PNG sheets as the package lays them out, and what was drawn on each."""
    from PIL import Image

    folder.mkdir()
    drawn, generator = {}, np.random.default_rng(0)
    for names, labels in SHEETS.values():
        for name in names:
            drawn[name] = generator.integers(0, 256, (rows, width, 3), dtype=np.uint8)
            Image.fromarray(drawn[name]).save(folder / name)
        (folder / labels).write_text(json.dumps(list(range(rows * len(names)))))
    return drawn


def test_a_row_of_a_sheet_is_one_colour_image(tmp_path: Path) -> None:
    drawn = sheets(tmp_path / "in")
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == sorted(SHEET_FILES)
    (tmp_path / "out").mkdir()
    build_sheets(tmp_path / "in", tmp_path / "out")
    images, labels = read_split(tmp_path / "out", "train")
    assert images.shape == (15, 32, 32, 3)
    assert labels.tolist() == list(range(15))
    # pixel 33 of row 1 of the second sheet is row 1, column 1 of the fifth image (index 4), all three colours
    assert images[4, 1, 1].tolist() == drawn["data_batch_2.png"][1, 33].tolist()
    assert len(read_split(tmp_path / "out", "test")[0]) == 3


def test_a_sheet_of_another_kind_is_refused(tmp_path: Path) -> None:
    sheets(tmp_path / "in", width=64)
    with pytest.raises(ArchiveError, match="64 pixels wide"):
        build_sheets(tmp_path / "in", tmp_path)
    (tmp_path / "in" / "data_batch_1.png").write_bytes(b"no picture")
    with pytest.raises(ArchiveError, match="no PNG"):
        build_sheets(tmp_path / "in", tmp_path)


@pytest.mark.asset
def test_the_real_photographs_are_the_known_ones(fetched) -> None:
    fetched("cifar10")
    images, labels = load_images("cifar10", split="train")
    assert images.shape == (50_000, 32, 32, 3)
    means = images.view(-1, 3).double().mean(0) / 255
    assert [round(mean, 4) for mean in means.tolist()] == [0.4914, 0.4822, 0.4465]  # as published with the set
    assert labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert labels.bincount().tolist() == [5000] * 10
    assert load_images("cifar10", split="test")[1].bincount().tolist() == [1000] * 10


@pytest.mark.asset
@pytest.mark.parametrize(
    ("name", "mean", "per_class"),
    # means and counts as published with the sets
    [("mnist", 0.1307, None), ("fashion-mnist", 0.2860, [6000] * 10)],
)
def test_the_real_sets_are_the_known_ones(fetched, name: str, mean: float, per_class) -> None:
    fetched(name)
    images, labels = load_images(name, split="train")
    assert images.shape == (60_000, 28, 28)
    assert round(images.double().mean().item() / 255, 4) == mean
    counts = labels.bincount().tolist()
    assert len(counts) == 10
    assert per_class is None or counts == per_class
    assert [len(part) for part in load_images(name, split="test")] == [10_000, 10_000]
