"""Curves as TensorBoard reads them back: those of the record, once each, also of a run that died."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from sparing.errors import UserError
from sparing.jobs.finetune import Finetune, run, state


@pytest.fixture
def settings(model_dir: Path, data_file: Path, tmp_path: Path) -> Finetune:
    usual = {"length": 32, "held_out": 0.3, "steps": 6, "max_new_tokens": 0, "evaluate_every": 2}
    return Finetune(model=model_dir, data=data_file, out=tmp_path / "out", log="tensorboard", method="full", **usual)


@pytest.mark.usefixtures("brisk")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tensorboard_reads_the_rows_of_the_record(settings: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole = state.gradients_

    def dying(training, data):
        # a step after the last checkpoint, which the log has already
        if training.step == 3:
            raise RuntimeError("the power is gone")
        return whole(training, data)

    settings = replace(settings, save_every=2)
    with monkeypatch.context() as patch:
        patch.setattr(state, "gradients_", dying)
        with pytest.raises(RuntimeError, match="power"):
            run(settings)
    record = run(replace(settings, resume=True))
    events = EventAccumulator(str(settings.out / "tensorboard")).Reload()
    shown = {"train": ("loss", "lr", "grad_norm"), "held_out": ("loss", "perplexity")}
    for table, names in shown.items():
        for name in names:
            found = [(event.step, event.value) for event in events.Scalars(f"{table}/{name}")]
            # TensorBoard keeps float32
            assert found == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in record.table(table)]
    assert len(events.Scalars("train/tokens_per_second")) == 6


class StandInForWandb(ModuleType):
    """In place of wandb, which needs an account: notes what it is told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.ids: list[str] = []

    def init(self, **how: str) -> StandInForWandb:
        self.ids.append(how["id"])
        return self

    def log(self, values: dict[str, float], step: int) -> None: ...

    def finish(self) -> None: ...


def test_a_run_of_wandb_is_that_of_the_folder_until_it_is_overwritten(
    settings: Finetune, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = StandInForWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    settings = replace(settings, log="wandb", steps=1)
    run(settings)
    run(replace(settings, resume=True))
    run(replace(settings, overwrite=True))
    first, again, anew = wandb.ids
    assert first == again != anew
    # of another machine, in a folder of the same path, too
    assert len({*wandb.ids, hashlib.sha256(str(settings.out.resolve()).encode()).hexdigest()[:16]}) == 3


def test_a_log_whose_package_is_missing_is_refused_first(settings: Finetune, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(UserError, match="log: got wandb; it is not installed; run pip install wandb"):
        run(replace(settings, log="wandb", model=Path("nowhere")))
    assert not settings.out.exists()
