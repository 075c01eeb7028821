import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from sparing.errors import UserError
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.invert import Settings, job, run, show
from sparing.jobs.invert.settings import Numerical, Pinn
from sparing.report import Record


@pytest.fixture
def pageless(monkeypatch):
    """Drawing takes seconds, and most of these tests are about other files."""
    monkeypatch.setattr(job, "write_page", lambda record, path: path)


def small(out, **changes):
    fast = {"equation": "allen-cahn", "grid": 48, "tolerance": 1e-7, "steps": 3, "seeds": (0, 1), "save_every": 1}
    return Settings(out=out, **fast | changes)


def bits(record):
    """Everything but the clock."""
    return [{name: cell for name, cell in row.items() if not name.startswith("seconds")} for row in record.rows]


def interrupted(monkeypatch, settings, after):
    """Run until ``after`` outer steps are done, then receive SIGTERM."""
    inner, done = job.advance_, []

    def advance_(*args):
        row = inner(*args)
        done.append(row)
        if len(done) == after:
            signal.raise_signal(signal.SIGTERM)
        return row

    with monkeypatch.context() as patch:
        patch.setattr(job, "advance_", advance_)
        with pytest.raises(StoppedError, match="--resume"):
            run(settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Record and folder of a run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return run(small(out)), out


def test_a_run_leaves_record_page_and_coefficients(whole, capsys):
    record, out = whole
    show(record)
    assert str(out / "report.html") in capsys.readouterr().out
    assert bits(Record.read(out / "record.jsonl")) == bits(record)
    assert [row["seed"] for row in record.table("runs")] == [0, 1]
    assert len(record.table("path")) == 6
    saved = load_file(out / "coefficients.safetensors")
    assert float(saved["seed1"].exp()) == pytest.approx(record.table("runs")[1]["nu"])
    assert "Shen et al. 2024" in (out / "report.html").read_text()


@pytest.mark.usefixtures("pageless")
def test_it_finds_the_coefficient(tmp_path):
    settings = small(tmp_path, grid=64, steps=60, seeds=(0,), tolerance=1e-8)
    (found,) = run(settings).table("runs")
    assert found["coefficient_error"] < 0.2  # what 64 points leave: the front is 0.03 wide, the cells as well
    assert found["solution_error"] < 0.02


@pytest.mark.usefixtures("pageless")
def test_a_killed_run_resumes_to_the_same_bits(whole, tmp_path, monkeypatch):
    """Killed in its first seed, then in its second; and once more when it has ended."""
    cut = small(tmp_path)
    interrupted(monkeypatch, cut, 2)
    cut = small(tmp_path, resume=True)
    interrupted(monkeypatch, cut, 2)
    record, out = whole
    for _ in range(2):
        assert bits(run(cut)) == bits(record)
    one, other = (load_file(place / "coefficients.safetensors") for place in (out, tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("pageless")
def test_a_network_resumes_with_its_weights(tmp_path, monkeypatch):
    changes = {"method": "pinn", "pinn": Pinn(depth=2, width=4, steps=2, batch=4), "seeds": (0,)}
    whole = run(small(tmp_path / "whole", **changes))
    interrupted(monkeypatch, small(tmp_path / "cut", **changes), 2)
    assert bits(run(small(tmp_path / "cut", resume=True, **changes))) == bits(whole)


def test_a_field_has_its_picture_and_its_penalty(tmp_path):
    record = run(
        small(
            tmp_path,
            equation="burgers",
            field=8,
            observe=(4, 8),
            seeds=(0,),
            steps=2,
            numerical=Numerical(law="orthonormal", directions=4),
        )
    )
    assert len(record.table("fields")) == 48
    assert "Smoothness is rewarded" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("pageless")
def test_a_run_that_stands_still_stops_early(tmp_path):
    record = run(small(tmp_path, steps=9, outer_lr=1e-9, patience=2, seeds=(0,)))
    assert record.table("runs")[0]["steps"] == 2


@pytest.mark.usefixtures("pageless")
def test_another_run_is_neither_overwritten_nor_continued(tmp_path):
    settings = small(tmp_path, steps=1, seeds=(0,))
    with pytest.raises(UserError, match="no run was started there"):
        run(small(tmp_path, steps=1, seeds=(0,), resume=True))
    run(settings)
    with pytest.raises(UserError, match="--overwrite"):
        run(settings)
    with pytest.raises(UserError, match="noise"):
        run(small(tmp_path, steps=1, seeds=(0,), noise=0.1, resume=True))
    run(small(tmp_path, steps=2, seeds=(0,), overwrite=True))
    assert json.loads((tmp_path / "run.json").read_text())["steps"] == 2


def test_summary_is_mean_and_standard_deviation():
    record = Record(question="", settings={}, seed=0, environment={})
    for value in (1.0, 2.0, 6.0):
        record.add("runs", coefficient_error=value, solution_error=2 * value, seconds=1.0)
    found = job.summary(record)
    assert found["coefficient_error"] == 3
    assert found["solution_error_sd"] == pytest.approx(2 * 7**0.5)
    assert found["n"] == 3
