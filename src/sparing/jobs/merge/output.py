"""The merge on the disk: merged by ``sparing.valley.stream``, with batch-norm statistics of its own put in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sparing.jobs.disk import refusing_to_write, write_folder
from sparing.jobs.merge.sources import Source
from sparing.valley.method import Method
from sparing.valley.stream import checkpoint, merge_files

MODEL, WEIGHTS = "model", "model.safetensors"  # names of the merge in OUT: a folder for folders, a file for files


def place_of(out: Path, first: Source) -> Path:
    """Where the merge is written: a folder for folders, a file for files."""
    return out / (MODEL if first.is_folder else WEIGHTS)


def write_merge(
    place: Path,
    method: Method,
    sources: Sequence[Source],
    base: Source | None,
    statistics: Mapping[str, Tensor],
    tell: Callable[[str, int], None] | None = None,
) -> None:
    """Merge models tensor by tensor, whole or not at all; ``tell`` is called with name and bytes of each tensor."""
    paths, ancestor = [source.path for source in sources], None if base is None else base.path

    def fill(draft: Path) -> None:
        # What differs between the files was reported when they were opened.
        merge_files(paths, draft, base=ancestor, method=method, tell=tell, note=lambda told: None)
        _replace(draft, statistics)

    if sources[0].is_folder:
        write_folder(place, fill)
        return
    # A file is written as a folder beside its place, then moved: a rename within one disk is whole or not at all.
    draft = place.with_name(f".{place.name}.draft")
    with refusing_to_write("saving", place):
        try:
            write_folder(draft, fill)
            (draft / WEIGHTS).replace(place)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _replace(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite tensors in the files that hold them; shapes and number formats stay."""
    places = checkpoint(folder)
    for name, tensor in tensors.items():
        place = places[name]
        data = tensor.to(_KINDS[place.kind]).contiguous()
        assert data.shape == place.shape
        with place.file.open("r+b") as file:
            file.seek(place.start)
            file.write(data.flatten().view(torch.uint8).numpy().data)


# Number formats of statistics and of their counters.
_KINDS: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
}  # fmt: skip
