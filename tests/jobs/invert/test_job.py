import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from sparing.errors import UserError
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.invert import Settings, job, run, show
from sparing.jobs.invert.arms import residuals
from sparing.jobs.invert.coefficient import coefficient_of
from sparing.jobs.invert.descent import Descent
from sparing.jobs.invert.observations import observe
from sparing.jobs.invert.settings import Numerical, Pinn
from sparing.report import Record


@pytest.fixture
def pageless(monkeypatch):
    """Drawing takes seconds, and most of these tests are about other files."""
    monkeypatch.setattr(job, "write_page", lambda record, path: path)


def small(out, **changes):
    fast = {"equation": "allen-cahn", "grid": 48, "tolerance": 1e-7, "steps": 3, "seeds": (0, 1), "save_every": 1}
    fast |= {"method": "numerical"}
    return Settings(out=out, **fast | changes)


def bits(record):
    """Everything but the clock."""
    return [{name: cell for name, cell in row.items() if not name.startswith("seconds")} for row in record.rows]


def interrupted(monkeypatch, settings, after):
    """Run until ``after`` outer steps are done, then receive SIGTERM."""
    place, name = (Descent, "advance_") if settings.method == "least-squares" else (job, "advance_")
    inner, done = getattr(place, name), []

    def advance_(*args):
        row = inner(*args)
        done.append(row)
        if len(done) == after:
            signal.raise_signal(signal.SIGTERM)
        return row

    with monkeypatch.context() as patch:
        patch.setattr(place, name, advance_)
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
    settings = small(tmp_path, method="least-squares", grid=64, steps=60, seeds=(0,), tolerance=1e-8)
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


FIELD = {
    "method": "least-squares", "equation": "burgers", "field": 8, "grid": 32, "observe": (4, 8), "noise": 0.05,
    "steps": 9,
}  # fmt: skip


def test_least_squares_finds_a_field_and_says_how_surely(tmp_path):
    """A field of 8 unknowns cannot follow the true one closely; scipy's trust region ends at the same one."""
    from scipy.optimize import least_squares

    settings = small(tmp_path, **FIELD, seeds=(0,), penalty=1e-5)
    record = run(settings)
    inputs, p = observe(settings), load_file(tmp_path / "coefficients.safetensors")["seed0"]
    problem = residuals(settings, inputs)

    def both(at):
        phi = {"p": torch.from_numpy(at)}
        misfit = problem.residuals(problem.solve(phi), phi)
        return torch.cat([misfit, problem.penalty**0.5 * problem.prior(phi)]).numpy()

    theirs = least_squares(both, coefficient_of(settings).guess(settings.model, 0).numpy(), diff_step=1e-3)
    # the job ends where a fall of 1e-4 of the sum of squares is left: within a tenth of a standard error of some .1
    torch.testing.assert_close(p, torch.from_numpy(theirs.x), rtol=0, atol=2e-2)
    (found,) = record.table("runs")
    assert found["converged"]
    assert found["noise"] == pytest.approx(0.05, rel=0.5)
    assert 1 < found["freedom"] < 8
    rows = record.table("fields")
    assert all(row["low"] < row["found"] < row["high"] for row in rows)
    page = (tmp_path / "report.html").read_text()
    assert "intervals hold the truth at" in page
    assert "finite differences on two finer grids" in page


@pytest.mark.slow
@pytest.mark.usefixtures("pageless")
def test_least_squares_killed_in_its_middle_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """Killed after its first Jacobian, and again in the second seed; two guesses a run."""
    changes = {**FIELD, "starts": 2, "observe": (3, 6), "steps": 3}
    whole = run(small(tmp_path / "whole", **changes))
    interrupted(monkeypatch, small(tmp_path / "cut", **changes), 1)
    interrupted(monkeypatch, small(tmp_path / "cut", resume=True, **changes), 9)
    again = run(small(tmp_path / "cut", resume=True, **changes))
    assert bits(again) == bits(whole)
    one, other = (load_file(tmp_path / name / "coefficients.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_trial_step_to_a_coefficient_of_zero_does_not_end_the_run(tmp_path):
    """Where ν underflows, least squares finds residuals that are not finite, and makes a shorter step."""
    settings = small(tmp_path, method="least-squares", grid=16)
    problem = residuals(settings, observe(settings))
    assert problem.solve({"p": torch.tensor([-1e3], dtype=torch.float64)}).isnan().all()


@pytest.mark.usefixtures("pageless")
def test_of_several_guesses_the_best_fit_is_kept(tmp_path):
    """One end is put into another basin: the misfit decides, not the order."""
    record = run(small(tmp_path, method="least-squares", grid=32, starts=3, steps=2, seeds=(0,)))
    rows = record.table("starts")
    kept = [row for row in rows if row["kept"]]
    assert [row["misfit"] for row in kept] == [min(row["misfit"] for row in rows)]
    assert len({row["nu"] for row in rows}) == 3
    assert record.table("runs")[0]["nu"] == pytest.approx(kept[0]["nu"])


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
