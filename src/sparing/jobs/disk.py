"""What a run leaves on the disk, whole or not at all: folders, tensors, and a full disk told in one line.

Single files of text or bytes are written by ``sparing.report.atomic``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from sparing.errors import UserError, require

if TYPE_CHECKING:
    from torch import Tensor


def digest(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def refusing_to_write(what: str, target: Path) -> Iterator[None]:
    """Turn the errors of a disk, which is full or cannot be written, into one line: ``what`` was done to ``target``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # tokenizers have no class of their own for what a disk says, only Rust's words: (os error 28)
        if not isinstance(error, OSError | SafetensorError) and "(os error " not in str(error):
            raise
        said = str(error).partition("\n")[0]
        why, do = f"it cannot be written ({said})", "pass a writable --out"
        # safetensors gives these numbers in words only
        full = {errno.ENOSPC, errno.EDQUOT}
        if getattr(error, "errno", None) in full or any(f"os error {number}" in str(error) for number in full):
            why, do = "the disk is full; what was saved before is whole", "free space and run again with --resume"
        raise UserError(what, got=target, why=why, do=do) from error


def _flush(*paths: Path) -> None:
    """Force files and folders to the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Write a directory whole or not at all, in place of one of its name; ``fill`` writes into a temporary one."""
    draft, old = (target.with_name(f".{target.name}.{kind}") for kind in ("draft", "old"))
    with refusing_to_write("saving", target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # a process was killed between the two renames below
            if old.exists() and not target.exists():
                old.rename(target)
            for leftover in (draft, old):
                shutil.rmtree(leftover, ignore_errors=True)
            draft.mkdir()
            fill(draft)
            # before the renames: after a power cut the final name could otherwise lead to empty files
            _flush(*draft.iterdir(), draft)
            if target.exists():
                target.rename(old)
            draft.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            if old.exists() and not target.exists():
                old.rename(target)


def tight(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, each alone in its storage, as safetensors wants them; copies only where one is needed."""
    seen: set[int] = set()
    alone: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().contiguous()
        shared = value.untyped_storage().data_ptr() in seen
        seen.add(value.untyped_storage().data_ptr())
        alone[name] = value.clone() if shared or value.untyped_storage().nbytes() != value.nbytes else value
    return alone


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, whole or not at all; ``load_tensors`` holds them to the hash in their header."""
    draft = path.with_name(f".{path.name}.draft")
    with refusing_to_write("saving", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # an empty file first, to learn which permissions the umask gives
            draft.touch()
            mode = draft.stat().st_mode
            alone = tight(tensors)
            # here, because it loads torch, without which folders are written too
            from safetensors.torch import save_file

            save_file(alone, draft, metadata={"sha256": _sealed(alone)})
            # safetensors makes files that only their owner reads; a result is to be shared
            draft.chmod(mode)
            _flush(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read what ``save_tensors`` wrote; refused if it is gone or not as it was written."""
    do = "bring it back as it was, or start over with --overwrite"
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            seal = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError) as error:
        said = str(error).partition("\n")[0]
        raise UserError("resume", got=path, why=f"it cannot be read ({said})", do=do) from None
    # of the values, not of the file's bytes: the seal lies in the header of that same file
    require(seal == _sealed(tensors), "resume", path, "it changed since it was written", do)
    return tensors


def _sealed(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    import torch

    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        # as bytes, for numpy has no bfloat16; flat, for a tensor without dimensions cannot be viewed as bytes
        found.update(value.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
