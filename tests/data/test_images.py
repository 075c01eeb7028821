"""The idx format, read and refused."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from sparing.data import load_images
from sparing.data.images import FILES, NAMES, build_idx, read_idx, read_split


def idx(array: torch.Tensor) -> bytes:
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + bytes(array.flatten().tolist())


IMAGES = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
LABELS = torch.tensor([7, 250], dtype=torch.uint8)


@pytest.mark.parametrize("array", [IMAGES, LABELS, torch.zeros(0, 3, 3, dtype=torch.uint8)])
def test_round_trip(array: torch.Tensor) -> None:
    torch.testing.assert_close(read_idx(idx(array)), array, rtol=0, atol=0)


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
