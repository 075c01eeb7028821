"""The whole job: its files, going on after a kill, two processes on one study, and what it refuses."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import multiprocessing
import os
import signal
import time
from multiprocessing.context import ForkServerProcess

import pytest

from patience import PATIENCE
from sparing.errors import UserError
from sparing.jobs.transfer import StoppedError, Transfer, run, show
from sparing.jobs.transfer import job as module
from sparing.jobs.transfer.settings import cells
from sparing.jobs.transfer.study import Study, study_name
from sparing.report import Record

pytest.importorskip("optuna")
pytest.importorskip("sklearn")


@pytest.fixture
def unseen(monkeypatch) -> None:
    """No pictures: drawing them takes longer than the runs."""
    monkeypatch.setattr(module, "write_page", lambda *_: None)


def numbers(record: Record) -> list[dict]:
    """The runs without their clocks, in one order."""
    rows = [{key: cell for key, cell in row.items() if key != "seconds"} for row in record.table("runs")]
    return sorted(rows, key=str)


def test_it_leaves_database_record_and_page(tiny, capsys) -> None:
    record = run(dataclasses.replace(tiny, coordinates=True))

    assert {"study.db", "record.jsonl", "report.html", "run.json"} <= {path.name for path in tiny.out.iterdir()}
    assert Record.read(tiny.out / "record.jsonl").rows == record.rows
    assert set(record.tables) == {"runs", "optima", "transfer", "summary", "coordinates"}  # too narrow for slopes
    assert len(record.table("runs")) == len(cells(tiny)) == 8
    assert str(tiny.out) not in (tiny.out / "record.jsonl").read_text()
    page = (tiny.out / "report.html").read_text()
    assert "SμPar" in page
    assert "0 of 8 runs diverged" in page
    show(record)
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tiny.out / 'report.html'}"


@pytest.mark.usefixtures("unseen")
def test_dense_runs_at_the_base_are_the_same_under_every_rule(tiny) -> None:
    rules = ("sp", "mup", "supar", "init-only", "rate-only")
    record = run(dataclasses.replace(tiny, widths=(16,), densities=(1.0,), rules=rules, log2_rates=(-6.0,)))
    assert len({row["loss"] for row in record.table("runs")}) == 1
    assert len({row["held_out_loss"] for row in record.table("runs")}) == 1


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("how", [signal.SIGINT, "in the middle"])
def test_an_interrupted_study_goes_on_to_the_same_numbers(tiny, tmp_path, monkeypatch, how) -> None:
    whole = run(dataclasses.replace(tiny, out=tmp_path / "whole"))
    real, done = module.train, []

    def train(*args):
        done.append(args)
        if len(done) == 3 and how == "in the middle":
            raise RuntimeError("killed")
        if len(done) == 3:
            os.kill(os.getpid(), how)
        return real(*args)

    monkeypatch.setattr(module, "train", train)
    with pytest.raises((StoppedError, RuntimeError)):
        run(tiny)
    done += [None] * 3  # no further interruption
    resumed = run(dataclasses.replace(tiny, resume=True))

    assert numbers(resumed) == numbers(whole)


@pytest.mark.usefixtures("unseen")
def test_the_grid_may_grow_and_nothing_is_done_twice(tiny, monkeypatch) -> None:
    run(tiny)
    real, done = module.train, []
    monkeypatch.setattr(module, "train", lambda *args: done.append(args[2]) or real(*args))

    record = run(dataclasses.replace(tiny, resume=True, seeds=(0, 1)))

    assert len(record.table("runs")) == 16
    assert {cell.seed for cell in done} == {1}


@pytest.mark.usefixtures("unseen")
def test_another_seed_that_rates_are_measured_by_is_another_study(tiny) -> None:
    """The unit of a spectral rate is a norm of the first seed: rates of two first seeds are no one axis."""
    spectral = dataclasses.replace(tiny, follow="spectral", rules=("supar",))
    run(spectral)
    with pytest.raises(UserError, match="seeds"):
        run(dataclasses.replace(spectral, resume=True, seeds=(1, 0)))
    run(dataclasses.replace(spectral, resume=True, seeds=(0, 1)))


def program(settings: Transfer, *more: str) -> str:
    """What a process that does a tiny study runs."""
    return (
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from sparing.jobs.transfer import Transfer, job\n"
        "job.write_page = lambda *_: None\n"
        f"job.run(Transfer(out=Path({str(settings.out)!r}), widths=(32,), base_width=16, densities=(1.0, 0.25),\n"
        "    log2_rates=(-8.0, -5.0), seeds=(0,), rules=('sp', 'supar'), steps=10, batch=32, layers=2,\n"
        f"    coordinates=False, {', '.join(more)}))\n"
    )


def started(code: str) -> ForkServerProcess:
    """A process of its own, forked from one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=exec, args=(code, {"__name__": "__main__"}), daemon=True)
    process.start()
    return process


def ended(*processes: ForkServerProcess) -> list[int | None]:
    for process in processes:
        process.join(PATIENCE)
    return [process.exitcode for process in processes]


def open_study(settings: Transfer) -> Study:
    """Claim the directory and open its study, as a first process does."""
    with module.run_of(settings) as run:
        module.open_study(settings, run)
        run.claim()
    return Study(settings.out, study_name(run.mark), storage=None, fresh=False)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_two_processes_on_one_study_do_every_run_once(tiny, tmp_path) -> None:
    whole = run(dataclasses.replace(tiny, out=tmp_path / "whole"))
    study = open_study(tiny)
    assert ended(*[started(program(tiny, "resume=True")) for _ in range(2)]) == [0, 0]

    trials = study._trials("RUNNING", "COMPLETE", "FAIL", "WAITING")
    counts = collections.Counter(str(sorted(trial.params.items())) for trial in trials)
    assert len(trials) == len(counts) == 8
    assert {trial.state.name for trial in trials} == {"COMPLETE"}
    assert numbers(Record.read(tiny.out / "record.jsonl")) == numbers(whole)


HELD = """
import time
def wait_for(name):
    until = time.monotonic() + PATIENCE
    while not Path(OUT, name).exists() and time.monotonic() < until:
        time.sleep(0.02)
"""
LAST = """
real = job.train
def train(*args):
    Path(OUT, "has-one").touch()
    wait_for("telling")
    return real(*args)
job.train = train
finish = Study.finish
def finished(*args):
    finish(*args)
    Path(OUT, "all-done").touch()
Study.finish = finished
"""
FIRST = """
real = job.analyse
def analyse(*args):
    Path(OUT, "telling").touch()
    wait_for("all-done")
    time.sleep(1)
    real(*args)
job.analyse = analyse
"""
"""Two processes: one holds the last run until the other has read the results and is about to write them."""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_a_process_that_tells_late_does_not_undo_what_one_with_more_runs_told(tiny) -> None:
    open_study(tiny)
    start = f"OUT, PATIENCE = {str(tiny.out)!r}, {PATIENCE}\nfrom sparing.jobs.transfer.study import Study\n" + HELD
    last, first = (
        program(tiny, "resume=True").replace("job.run(", start + part + "job.run(", 1) for part in (LAST, FIRST)
    )
    holder = started(last)
    while not (tiny.out / "has-one").exists() and holder.is_alive():
        time.sleep(0.05)
    assert ended(holder, started(first)) == [0, 0]
    assert len(Record.read(tiny.out / "record.jsonl").table("runs")) == 8


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.usefixtures("unseen")
def test_a_killed_process_gives_its_run_back(tiny, tmp_path) -> None:
    """SIGKILL in the middle of a run: no handler runs, the run is marked as under way for ever."""
    stuck = "job.train = lambda *_: __import__('time').sleep(6000)\njob.run("
    process = started(program(tiny).replace("job.run(", stuck, 1))
    database = tiny.out / "study.db"
    while process.is_alive():
        if database.exists() and (tiny.out / "run.json").exists():
            with open_study(dataclasses.replace(tiny, resume=True)) as study:
                if study.under_way:
                    break
        time.sleep(0.2)
    with open_study(dataclasses.replace(tiny, resume=True)) as study:
        assert study.free_dead_() == 0  # it lives
        process.kill()
        process.join()
        assert study.free_dead_() == 1
    resumed = run(dataclasses.replace(tiny, resume=True))
    assert numbers(resumed) == numbers(run(dataclasses.replace(tiny, out=tmp_path / "whole")))


@pytest.mark.usefixtures("unseen")
def test_divergence_is_kept(tiny) -> None:
    record = run(dataclasses.replace(tiny, log2_rates=(-7.0, 12.0), rules=("sp",), densities=(1.0,)))
    wild = next(row for row in record.table("runs") if row["x"] == 12)
    assert wild["diverged"]
    assert record.table("optima")[0]["diverged"] == 1
    assert record.table("optima")[0]["best_tried"] == -7


@pytest.mark.usefixtures("unseen")
def test_another_study_in_the_directory_is_refused(tiny) -> None:
    run(tiny)
    with pytest.raises(UserError, match="another run"):
        run(tiny)
    with pytest.raises(UserError, match="steps"):
        run(dataclasses.replace(tiny, steps=11, resume=True))
    record = run(dataclasses.replace(tiny, steps=11, overwrite=True))
    assert {row["steps"] for row in record.table("runs")} == {11}


def test_a_database_that_cannot_be_opened_is_told_in_one_line(tiny) -> None:
    with pytest.raises(UserError, match="storage: got nowhere"):
        run(dataclasses.replace(tiny, storage="nowhere"))


@pytest.mark.parametrize("url", ["postgresql://me:s3cret@host/db", "mysql://me:s3@s3cret@host/db?password=s3cret"])
def test_the_password_of_a_database_is_told_nobody(tiny, url, capsys):
    """Neither in the line, where a driver is missing or quotes the host, nor in the record of the settings."""
    with pytest.raises(UserError, match=r"storage: got .*://me:\*\*\*@host/db") as caught:
        run(dataclasses.replace(tiny, storage=url))
    assert "s3cret" not in str(caught.value) + "".join(capsys.readouterr())
    assert all("s3cret" not in path.read_text() for path in tiny.out.rglob("*") if path.is_file())
    record = Record(question="q", settings=dataclasses.replace(tiny, storage=url), seed=0)
    assert "s3cret" not in str(record.settings)


@pytest.mark.parametrize(("missing", "word"), [("optuna", r"sparing\[sweep\]"), ("sklearn", "scikit-learn")])
def test_missing_packages_are_named_with_the_line_that_installs_them(tiny, monkeypatch, missing, word) -> None:
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == missing:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=word):
        run(tiny)
    assert not tiny.out.exists()
