"""Fine-tuning runs as every rank of a group starts them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"


def runs(cases: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Run one after another; what the last of each case recorded, or the error it ended with."""
    from sparing.jobs.finetune import job

    job.write_page = lambda record, path, caveats: path.write_text("\n".join(caveats))  # pages have tests of their own
    return {name: _last(job, settings) for name, settings in cases.items()}


def _last(job: Any, settings: Sequence[Any]) -> Any:
    try:
        return [job.run(one) for one in settings][-1].rows
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def weights(out: Path) -> dict[str, Any]:
    """The model that a run has left."""
    from safetensors.torch import load_file

    return load_file(out / "model" / "model.safetensors")
