"""Strangers brought into the order of the first model before they are merged: ``--align``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparing.jobs.disk import write_folder
from sparing.jobs.merge.inputs import Inputs
from sparing.jobs.merge.settings import Settings
from sparing.jobs.merge.sources import Source, open_source
from sparing.jobs.run import Run
from sparing.valley.aligning.align import Alignment, By, align
from sparing.valley.merging.files import INDEX, WEIGHTS

ALIGNED: Final = "aligned"  # folder in OUT of the reordered models

_IMAGES, _TEXTS = 64, 4  # rows in a batch that the forward pass is recorded on (count)


def aligned_sources(settings: Settings, sources: Sequence[Source], inputs: Inputs | None, run: Run) -> list[Source]:
    """The first model, and the others with their units in its order, written beside the merge."""
    assert inputs is not None
    found = [sources[0]]
    for at, source in enumerate(sources[1:], start=1):
        place = settings.out / ALIGNED / str(at)
        name = f"aligned: {source.label}"
        if not place.exists():
            run.forget(name)

        def work(place: Path = place, source: Source = source, inputs: Inputs = inputs) -> dict[str, Any]:
            return _written(place, sources[0], source, inputs, settings)

        row = run.once(name, work)
        sys.stderr.write(f"{name}: {row['moved']:.1%} of the units are in another place\n")
        found.append(open_source(place if source.is_folder else place / WEIGHTS, source.label))
    return found


def _written(place: Path, first: Source, source: Source, inputs: Inputs, settings: Settings) -> dict[str, Any]:
    """Reorder one model and write it as a folder; what it says beside the weights is copied."""
    assert settings.align is not None
    found = reordered(first, source, inputs, settings.align, settings.seed)
    tensors = {name: _like(source[name], found.state, inputs, name) for name in source}

    def fill(draft: Path) -> None:
        files = sorted(source.path.iterdir()) if source.is_folder else []
        for file in files:
            if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
                shutil.copyfile(file, draft / file.name)
        save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})

    place.parent.mkdir(parents=True, exist_ok=True)
    write_folder(place, fill)
    return {"moved": found.moved, "before": found.before, "after": found.after}


def reordered(first: Source, source: Source, inputs: Inputs, by: By, seed: int) -> Alignment:
    """Align one model with the first, on validation rows."""
    other = {name: value.clone() for name, value in inputs.load_(source.items()).state_dict().items()}
    model = inputs.load_(first.items())
    rows, texts = inputs.validation.inputs, inputs.validation.targets is None
    size = min(len(rows), _TEXTS if texts else _IMAGES)
    parts = [part for part in torch.split(rows, size) if len(part) == size]
    batches = [{"input_ids": part, "use_cache": False} if texts else part for part in parts]
    return align(model, other, batches, by=by, seed=seed)


def _like(old: Tensor, state: Mapping[str, Tensor], inputs: Inputs, name: str) -> Tensor:
    """The reordered tensor in the number format of the file; names may have, or lack, the prefix of the inner part."""
    return state[inputs.name_in(state, name)].to(old.dtype).contiguous().clone()
