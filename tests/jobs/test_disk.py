"""Folders and tensors appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sparing.errors import UserError
from sparing.jobs.disk import digest, load_tensors, refusing_to_write, save_tensors, tight, write_folder


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert digest(path) == hashlib.sha256(b"abc").hexdigest()


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("I/O error: No space (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=["disk", "quota", "safetensors"])
def test_a_full_disk_is_one_line(error: Exception) -> None:
    with (
        pytest.raises(UserError, match=r"saving: got out; the disk is full.*--resume"),
        refusing_to_write("saving", Path("out")),
    ):
        raise error


def test_other_errors_of_the_disk_say_theirs() -> None:
    with pytest.raises(UserError, match=r"Permission denied.*pass a writable --out"), refusing_to_write("out", Path()):
        raise OSError(errno.EACCES, "Permission denied")


def test_errors_of_the_program_pass() -> None:
    with pytest.raises(KeyError), refusing_to_write("out", Path()):
        raise KeyError


def test_a_folder_replaces_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    write_folder(target, lambda draft: (draft / "old").write_text("1"))
    write_folder(target, lambda draft: (draft / "new").write_text("2"))
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_folder_that_fails_half_way_leaves_the_one_before(tmp_path: Path) -> None:
    target = tmp_path / "model"
    write_folder(target, lambda draft: (draft / "old").write_text("1"))

    def torn(draft: Path) -> None:
        (draft / "new").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="full"):
        write_folder(target, torn)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["model", "model/old"]


def test_tight_tensors_have_their_storage_for_themselves() -> None:
    whole = torch.arange(12.0).view(3, 4).requires_grad_()
    given = {"t": whole.T, "row": whole[1], "whole": whole, "again": whole, "apart": torch.ones(2)}
    got = tight(given)
    assert all(torch.equal(got[name], given[name]) for name in given)
    places = [value.untyped_storage().data_ptr() for value in got.values()]
    assert len(set(places)) == len(places)
    assert all(value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes for value in got.values())
    assert not any(value.requires_grad for value in got.values())
    assert got["apart"] is not None
    assert got["apart"].data_ptr() == given["apart"].data_ptr()  # no copy where none is needed


def test_tensors_come_back(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).view(2, 3).T, "b": torch.tensor(2.5, dtype=torch.bfloat16)}
    save_tensors(tmp_path / "deep" / "x.safetensors", tensors)
    back = load_file(tmp_path / "deep" / "x.safetensors")
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    usual = tmp_path / "usual"
    usual.touch()
    assert (tmp_path / "deep" / "x.safetensors").stat().st_mode == usual.stat().st_mode  # others may read it


def test_tensors_that_fail_half_way_leave_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(2)})

    def torn(tensors: object, path: Path, **more: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", torn)
    with pytest.raises(UserError, match="full"):
        save_tensors(path, {"a": torch.zeros(2)})
    assert torch.equal(load_file(path)["a"], torch.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_as_they_were_written(tmp_path, dtype):
    tensors = {"a": torch.arange(6).reshape(2, 3).to(dtype), "b": torch.tensor(1).to(dtype), "empty": torch.ones(0)}
    save_tensors(tmp_path / "x.safetensors", tensors)
    found = load_tensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())


@pytest.mark.parametrize("damage", ["a byte of data", "half of it", "nothing there", "another's file"])
def test_tensors_that_changed_since_are_refused(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(4)})
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    if damage == "nothing there":
        path.unlink()
    elif damage == "another's file":
        save_file({"a": torch.ones(4)}, path)
    else:
        path.write_bytes(content if damage == "a byte of data" else content[:50])
    with pytest.raises(UserError, match=r"^resume: got .*x\.safetensors; .*or start over with --overwrite"):
        load_tensors(path)
