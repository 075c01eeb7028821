"""Curves of a run for TensorBoard or Weights & Biases, written as it goes."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from sparing.errors import UserError
from sparing.jobs.finetune.settings import Finetune
from sparing.jobs.finetune.state import TrainState
from sparing.report.atomic import write_whole
from sparing.report.record import plain

LOGS: Final = ("tensorboard", "wandb")  # directories
_SHOWN: Final = ("loss", "perplexity", "lr", "grad_norm")

Write = Callable[[int, Mapping[str, float]], None]  # a step, and values by name


def scalars(state: TrainState, table: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row that make curves, by the names they are shown under."""
    found = {f"{table}/{name}": float(row[name]) for name in _SHOWN if name in row}
    # the mean over the run so far, as the progress bar has it
    speed = {"train/tokens_per_second": state.seen / state.seconds} if table == "train" and state.seconds else {}
    return found | speed


# what brings each
_INSTALL: Final = {"tensorboard": "pip install 'sparing[log]'", "wandb": "pip install wandb"}


def _refuse(name: str) -> UserError:
    return UserError("log", got=name, why="it is not installed", do=f"run {_INSTALL[name]}")


@contextlib.contextmanager
def _tensorboard(settings: Finetune, step: int) -> Iterator[Write]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _refuse("tensorboard") from None
    # what an interrupted run wrote beyond its checkpoint comes again
    with SummaryWriter(str(settings.out / "tensorboard"), purge_step=step + 1 if step else None) as writer:

        def write(step: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield write


@contextlib.contextmanager
def _wandb(settings: Finetune, step: int) -> Iterator[Write]:
    try:
        import wandb
    except ImportError:
        raise _refuse("wandb") from None
    # kept in the folder, so that a run that is resumed goes on there too, and --overwrite begins another
    file = settings.out / "wandb" / "run-id"
    if not file.is_file():
        write_whole(file, secrets.token_hex(8))
    name = file.read_text(encoding="utf-8").strip()
    project, config = "sparing", {key: value for key, value in plain(settings, top=True).items() if key != "out"}
    run = wandb.init(
        project=project, id=name, resume="allow", dir=str(settings.out), config=config, settings={"silent": True}
    )
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()


@contextlib.contextmanager
def open_log(settings: Finetune, step: int) -> Iterator[Callable[[TrainState, str, Mapping[str, Any]], None] | None]:
    """What is told of every row of a run that has finished so many steps; None where no log is asked for."""
    if settings.log == "none":
        yield None
        return
    made = {"tensorboard": _tensorboard, "wandb": _wandb}[settings.log]
    with contextlib.ExitStack() as opened:
        with warnings.catch_warnings():
            # of the packages that these import
            warnings.simplefilter("ignore")
            write = opened.enter_context(made(settings, step))
        yield lambda state, table, row: write(int(row["step"]), scalars(state, table, row))


def check_log(settings: Finetune) -> None:
    """Refuse a log whose package is missing, before anything is read."""
    import importlib.util

    if settings.log != "none" and importlib.util.find_spec(settings.log) is None:
        raise _refuse(settings.log)
