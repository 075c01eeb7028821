"""Settings of an evaluation, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from sparing.errors import require
from sparing.jobs.hub import OnHub
from sparing.jobs.limits import Count, CountOrZero, Length
from sparing.jobs.settings import FromHub, OnDevice, Resumable


@dataclass(frozen=True, kw_only=True)
class Settings(Resumable, OnDevice, FromHub):
    """Measure a language model: its loss on text that it has not seen, and tasks by lm-evaluation-harness.

    With `--against` both models read the same records, and the difference has an interval that uses which records
    each finds hard. Nothing says that a model has not been trained on what it is measured on, but whoever chooses the
    files. OUT gets report.html and record.jsonl.
    """

    out: Path = Path("runs/evaluate")

    model: Annotated[Positional[Path], arg(metavar="MODEL"), OnHub("model")]
    """Folder of the model and its tokenizer (save_pretrained), or its name on the Hugging Face hub, OWNER/NAME."""

    against: Annotated[Path | None, OnHub("model")] = None
    """Another model to measure on the same, such as the one that MODEL was fine-tuned from; none: MODEL alone."""

    data: Annotated[tuple[Path, ...], OnHub("data")] = ()
    """Files or folders to measure the loss on, as `finetune` takes them: of a text every token counts, of prompts and
    conversations the answers. Of a data set on the hub its part `validation` or else `test`. None: no loss."""

    tasks: tuple[Path, ...] = ()
    """Task files of lm-evaluation-harness (.yaml) whose rows lie on this disk (dataset_path: json and data_files); they
    need `pip install 'sparing[eval]'`. None: no task."""

    shots: CountOrZero | None = None
    """Solved examples before each question of a task (count); none: as the task says."""

    items: Count | None = None
    """Items of each task to use (count), from the first; none: all."""

    length: Length = 512
    """Tokens per row (count): a longer text goes on in the next row, whose first tokens see nothing before them."""

    batch: Count = 1
    """Rows per step (count): at once in memory."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of weights and arithmetic."""

    def __post_init__(self) -> None:
        """Refuse to measure nothing."""
        # from Python a single file is given as it is
        for name in ("data", "tasks"):
            if isinstance(value := getattr(self, name), str | Path):
                object.__setattr__(self, name, (Path(value),))
        super().__post_init__()
        asked = bool(self.data or self.tasks)
        do = "pass --data FILE for a loss, or --tasks FILE.yaml"
        require(asked, "data", "none, and no tasks", "there is nothing to measure on", do)
        for name in ("shots", "items"):
            value, why = getattr(self, name), "it is of tasks, and none is given"
            require(value is None or bool(self.tasks), name, value, why, "pass --tasks, or omit it")
        same = self.against is not None and self.against == self.model
        require(not same, "against", self.against, "it is MODEL itself", "pass another, or omit it")
