"""Assets in memory: text as a string, images as tensors."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from sparing.data.assets import ASSETS, Kind, asset
from sparing.data.images import read_split
from sparing.data.sources import fetch
from sparing.errors import UserError

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from sparing.data.images import Split


def load_text(
    name: str, *, first: int | None = None, path: str | os.PathLike[str] | None = None, progress: bool = True
) -> str:
    """Return a text asset, or its beginning.

    Args:
        name: As in ``ASSETS``, of kind ``text``.
        first: Length of the beginning to read (bytes; a character cut in two at the end is dropped); default: all.
            Because a few of ``enwik8``'s characters are rare, Python needs 400 MB to hold all of it.
        path: The user's own copy; see ``fetch``.
        progress: Whether to show a progress bar while fetching.

    Returns:
        The text (``enwik8`` is wiki XML; see ``wiki_articles``).

    Raises:
        UserError: If the asset is not text, cannot be fetched, or is not UTF-8.
    """
    _require(name, "text")
    file = fetch(name, path=path, progress=progress)
    with file.open("rb") as opened:
        data = opened.read(first)
    try:
        # incremental: a character cut in two at the end of the beginning is dropped, not an error
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=first is None)
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
        raise UserError(f"text {name}", got=file, why=why, do="save the file as UTF-8") from error


def load_images(
    name: str, *, split: Split = "train", path: str | os.PathLike[str] | None = None, progress: bool = True
) -> tuple[Tensor, Tensor]:
    """Return one split of an image asset.

    Args:
        name: As in ``ASSETS``, of kind ``images``.
        split: ``train`` or ``test``.
        path: The user's own copy; see ``fetch``.
        progress: Whether to show a progress bar while fetching.

    Returns:
        Images uint8 (N, 28, 28), for ``cifar10`` (N, 32, 32, 3) in red, green, blue, all 0 … 255; labels int64 (N,).

    Raises:
        UserError: If the asset is not an image set, cannot be fetched, or its files are damaged.
    """
    _require(name, "images")
    folder = fetch(name, path=path, progress=progress)
    try:
        return read_split(folder, split)
    except ValueError as error:
        raise UserError(
            f"images {name}", got=folder, why=str(error), do="give an undamaged copy, or no path"
        ) from error


def _require(name: str, kind: Kind) -> None:
    if asset(name).kind != kind:
        names = ", ".join(each.name for each in ASSETS if each.kind == kind)
        raise UserError("asset", got=repr(name), why=f"it is no asset of kind {kind}", do=f"use one of {names}")
