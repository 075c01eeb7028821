"""The run engine: nothing before the claim, results once, loops that go on where they were, one writer among ranks."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparing.errors import UserError
from sparing.jobs import checkpoint
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.run import Run, take_steps
from sparing.report import Record


@dataclass(frozen=True)
class Settings:
    """Of a job that adds numbers."""

    out: Path
    seed: int = 0
    width: int = 4
    resume: bool = False
    overwrite: bool = False


@dataclass
class Sum:
    """The state of a loop: a drawn sum, so that a step that is taken twice or left out shows."""

    step: int = 0
    value: Tensor = field(default_factory=lambda: torch.zeros(3))

    def tree(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value}

    def add(self, seed: int) -> dict[str, float]:
        self.step += 1
        self.value = self.value * 1.5 + torch.rand(3, generator=torch.Generator().manual_seed(seed + self.step))
        return {"value": float(self.value.sum())}


def empty() -> Record:
    return Record(question="", settings={}, seed=0, environment={})


def loop(run: Run, name: str, seed: int, *, total: int = 5, stop_at: int = 0) -> Tensor:
    """One loop of a run, stopped by SIGTERM in a step if that is asked for."""
    state = Sum() if run.interrupted is None else Sum(**run.interrupted)

    def take_step() -> dict[str, float]:
        told = state.add(seed)
        run.record.add("steps", loop=name, step=state.step, **told)
        if state.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return told

    run.steps(state, take_step, total=total, label=name)
    return state.value


def whole(settings: Settings, order: str = "ab", stop: tuple[str, int] = ("", 0)) -> tuple[dict[str, Tensor], Record]:
    """A run of two loops, each one result."""
    with Run(settings) as run:
        run.resume(empty())
        run.claim()
        found = {
            name: run.once(name, lambda n=name: loop(run, n, 10 * ord(n), stop_at=stop[1] if stop[0] == n else 0))
            for name in order
        }
    return found, run.record


def test_loops_that_are_stopped_end_in_the_same_bits_and_rows(tmp_path: Path) -> None:
    expected, rows = whole(Settings(tmp_path / "whole"))
    settings, again = Settings(tmp_path / "cut"), Settings(tmp_path / "cut", resume=True)
    with pytest.raises(StoppedError, match=r"a, step 2 of 5 is saved in .*step-00000001; run the same"):
        whole(settings, stop=("a", 2))
    with pytest.raises(StoppedError, match="b, step 4 of 5"):
        whole(again, stop=("b", 4))
    found, record = whole(again)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert record.rows == rows.rows


def test_each_interrupted_loop_keeps_its_own_state(tmp_path: Path) -> None:
    """Also where loops come in another order when the run goes on."""
    expected, rows = whole(Settings(tmp_path / "whole"))
    with pytest.raises(StoppedError):
        whole(Settings(tmp_path / "cut"), "ab", stop=("a", 3))
    again = Settings(tmp_path / "cut", resume=True)
    with pytest.raises(StoppedError):
        whole(again, "ba", stop=("b", 1))
    found, record = whole(again)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(map(str, record.rows)) == sorted(map(str, rows.rows))


def test_nothing_is_written_before_the_claim(tmp_path: Path) -> None:
    with Run(Settings(tmp_path / "out")) as run:
        assert not run.resume(empty())
        assert run.once("early", lambda: 3) == 3
        assert not (tmp_path / "out").exists()
        run.claim()
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"run.json", "run.toml"}


def test_a_result_is_computed_once(tmp_path: Path) -> None:
    calls: list[str] = []
    for resume in (False, True):
        with Run(Settings(tmp_path, resume=resume)) as run:
            run.resume(empty())
            run.claim()
            tensor = run.once("tensor", lambda: calls.append("tensor") or torch.arange(3))
            assert run.once("tensor", lambda: calls.append("again")) is tensor
            assert run.once("nothing", lambda: calls.append("nothing")) is None
            run.save()
            assert torch.equal(tensor, torch.arange(3))
            assert run.results("t").keys() == {"ensor"}
            run.forget("tensor")
    assert calls == ["tensor", "nothing"]


def test_another_run_is_refused_and_what_may_differ_is_not(tmp_path: Path) -> None:
    with Run(Settings(tmp_path)) as run:
        run.resume(empty(), hashes={"data": "one"})
        run.claim()
    with Run(Settings(tmp_path, resume=True, seed=1)) as run, pytest.raises(UserError, match="seed"):
        run.resume(empty(), hashes={"data": "one"})
    with Run(Settings(tmp_path, resume=True)) as run, pytest.raises(UserError, match=r"data \(other content\)"):
        run.resume(empty(), hashes={"data": "two"})
    with pytest.raises(UserError, match="holds another run"), Run(Settings(tmp_path)):
        pass


def test_settings_that_are_ignored_may_differ(tmp_path: Path) -> None:
    for settings in (Settings(tmp_path, width=4), Settings(tmp_path, width=8, resume=True)):
        with Run(settings, ignore={"width"}) as run:
            run.resume(empty())
            run.claim()


def test_a_loop_that_is_the_whole_run_names_checkpoints_by_its_steps(tmp_path: Path) -> None:
    state = Sum()
    with Run(Settings(tmp_path)) as run:
        run.resume(empty())
        run.claim()
        run.steps(state, lambda: state.add(0), total=7, label="sum", every=3)
    assert [path.name for path in checkpoint.saved(tmp_path / "checkpoints")] == ["step-00000003", "step-00000006"]


class Second:
    """The second of two processes, to whom a signal of the first is told."""

    first, several = False, True

    def __init__(self) -> None:
        self.asked = 0

    def on_first_rank(self, work: object) -> None:
        """The first does it."""

    def agree_to_stop(self, signals: list[int]) -> list[int]:
        self.asked += 1
        return signals


def test_of_several_ranks_the_first_alone_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state, ranks = Sum(), Second()
    with Run(Settings(tmp_path / "out"), ranks=ranks) as run:
        run.resume(empty())
        run.claim()
        run.steps(state, lambda: state.add(0), total=4, label="sum", every=1)
    assert (state.step, ranks.asked) == (4, 4)
    assert not (tmp_path / "out").exists()
    assert capfd.readouterr().err == ""


@dataclass
class File:
    """Slices of one process: a number in a file beside the manifest that seals it."""

    value: int = 0

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(str(self.value))

    def load_(self, folder: Path) -> None:
        self.value = int((folder / "manifest.json").read_text())


def attached(settings: Settings, slices: File, steps: int) -> None:
    with Run(settings) as run:
        resumed = run.resume(empty())
        run.attach(slices)
        state = Sum(**run.interrupted) if resumed else Sum()
        run.claim()

        def take_step() -> dict[str, float]:
            slices.value += 1
            return state.add(0)

        run.steps(state, take_step, total=steps, label="sum")
        run.save(state)


def test_slices_lie_in_the_checkpoint_and_are_sealed_with_it(tmp_path: Path) -> None:
    attached(Settings(tmp_path), File(), 3)
    slices = File()
    attached(Settings(tmp_path, resume=True), slices, 5)
    assert slices.value == 5
    place = tmp_path / "checkpoints" / "step-00000005"
    names = ["manifest.json", "slices", "tensors.safetensors", "tree.json"]
    assert sorted(path.name for path in place.iterdir()) == names
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]
    (place / "slices" / "manifest.json").write_text("7")
    with pytest.raises(UserError, match=r"slices/manifest.json changed .* to go on from step-00000003"):
        attached(Settings(tmp_path, resume=True), File(), 6)


def test_slices_are_neither_found_nor_lost(tmp_path: Path) -> None:
    state = Sum()
    with Run(Settings(tmp_path)) as run:
        run.resume(empty())
        run.claim()
        run.save(state)
    with pytest.raises(UserError, match=r"step-00000000 was written without; omit --plan"):
        attached(Settings(tmp_path, resume=True), File(), 1)
    with Run(Settings(tmp_path, resume=True)) as run:
        run.resume(empty())
        assert not run.sharded


def test_steps_may_end_early_and_the_bar_is_full_then(capfd: pytest.CaptureFixture[str]) -> None:
    state = Sum()
    take_steps(state, lambda: state.add(0), total=9, label="sum", until=lambda: state.step == 2)
    assert state.step == 2
    assert "sum: 9 steps in" in capfd.readouterr().err


def test_signals_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Run(Settings(tmp_path)) as run:
        run.resume(empty())
        run.claim()
        assert signal.getsignal(signal.SIGTERM) is not before
        with pytest.raises(ZeroDivisionError):
            run.once("broken", lambda: 1 / 0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_are_deferred_between_claim_and_finish_alone(tmp_path: Path) -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []
    with Run(Settings(tmp_path)) as run:
        run.resume(empty())
        run.claim(defer_signals=False)
        assert signal.getsignal(signal.SIGTERM) is before
        run.defer_signals()
        assert signal.getsignal(signal.SIGTERM) is not before
        run.finish(lambda record, path: seen.append(signal.getsignal(signal.SIGTERM)))
    assert seen == [before]
