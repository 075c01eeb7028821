"""A scan end to end: its record, its page, going on after a kill, and every kind of model it opens."""

from __future__ import annotations

import json
import math
import signal
import sys

import pytest
import torch
from safetensors.torch import save_file

from sparing.cli import main
from sparing.errors import UserError
from sparing.jobs.interrupts import StoppedError
from sparing.jobs.scan import job, run, show
from sparing.report import Record


@pytest.fixture
def pageless(monkeypatch):
    """Drawing takes seconds, and most of these tests are about other files."""
    monkeypatch.setattr(job, "write_page", lambda record, path: path)


def bits(record: Record) -> list[dict]:
    """Everything but the clock."""
    return [{name: cell for name, cell in row.items() if name != "seconds"} for row in record.rows]


def test_a_scan_leaves_record_and_page(small, tmp_path, capsys):
    record = run(small())
    show(record)
    assert f"report: {tmp_path / 'run' / 'report.html'}" in capsys.readouterr().out
    assert bits(Record.read(tmp_path / "run" / "record.jsonl")) == bits(record)
    asked = {(row["kind"], row["sign"], row["group"]) for row in record.table("curves")}
    assert {("gaussian", "raw", "all"), ("gaussian", "consistent", "all"), ("gaussian", "0.5", "all")} < asked
    assert {("one", "raw", "all"), ("gaussian", "consistent", "classifier"), ("sign", "raw", "all")} < asked
    assert len(asked) == len(record.table("curves")) == 4 + 1 + 2 + 5  # noises, the ratio 0.5, classifier, special
    assert record.table("left_out") == [{"group": "conv"}]
    page = (tmp_path / "run" / "report.html").read_text()
    for words in (
        "Two noises, as drawn", "SCR", "Asymmetry", "sign-change ratio", "Scales of the norm layers", "(CLF)",
        "sign(θ − μ)", "sparing scan tiny_entry:make", "--points 41", "prefers-color-scheme: dark", "The model has no",
    ):  # fmt: skip
        assert words in page, words
    # for desk and phone: two grids, two of the ratio, groups, special directions, the histogram
    assert page.count("<svg") == 2 * 7


def test_a_precision_is_reached_or_its_miss_is_said(small, tmp_path, capsys):
    """64 rows are enough for a standard error of 0.5 along some noises, and for 0.001 along none."""
    record = run(small(parts=("noises", "special"), noises=("gaussian",), precision=0.001))
    rows = record.table("precision")
    # special directions are not drawn: they have no draws to add
    assert [(row["kind"], row["sign"], row["ended"]) for row in rows] == [
        ("gaussian", "raw", "data"), ("gaussian", "consistent", "data"),
    ]  # fmt: skip
    assert all(row["error_loss"] > 0.001 and row["draws"] * row["rows"] <= 64 for row in rows)
    assert "its 64 rows are used up" in capsys.readouterr().err
    page = (tmp_path / "run" / "report.html").read_text()
    assert "along 2 of 2 curves: more rows would" in page
    assert "How precisely" in page
    curves = record.table("curves", kind="gaussian")
    assert [row["n"] for row in curves] == [row["draws"] for row in rows]


@pytest.mark.usefixtures("pageless")
def test_numbers_of_a_curve_are_those_of_its_values(small):
    """Index and rises again by hand, from the rows of single draws."""
    record = run(small(parts=("noises",), points=5))
    for curve in record.table("curves"):
        rows = [row for row in record.table("values") if row["curve"] == curve["curve"]]
        bottom = next(row["loss"] for row in rows if row["step"] == 0)
        rise = {side: [row["loss"] - bottom for row in rows if row["step"] * side > 0] for side in (-1, 1)}
        minus, plus = (sum(rise[side]) / len(rise[side]) for side in (-1, 1))
        # the same few float64 sums in another order
        assert curve["minus_loss"] == pytest.approx(minus, rel=1e-12)
        assert curve["plus_loss"] == pytest.approx(plus, rel=1e-12)
        if curve["asymmetry_loss"] is not None:
            expected = (minus - plus) / (abs(minus) + abs(plus))
            assert curve["asymmetry_loss"] == pytest.approx(expected, rel=1e-9)
        if curve["sign"] == "consistent":
            assert curve["consistency"] == 1.0


@pytest.mark.usefixtures("pageless")
def test_a_killed_scan_goes_on_to_the_same_bits(small, tmp_path, monkeypatch):
    parts = ("noises", "norms")
    whole = run(small(parts=parts, out=tmp_path / "whole"))
    inner, done = job.measure_, []

    def measure_(*args):
        inner(*args)
        done.append(args[1])
        if len(done) == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(job, "measure_", measure_)
        with pytest.raises(StoppedError, match="--resume"):
            run(small(parts=parts, out=tmp_path / "cut"))
    assert len(done) == 2
    resumed = run(small(parts=parts, out=tmp_path / "cut", resume=True))
    assert bits(resumed) == bits(whole)
    assert bits(run(small(parts=parts, out=tmp_path / "cut", resume=True))) == bits(whole)


@pytest.mark.usefixtures("pageless")
def test_another_scan_or_other_weights_do_not_go_on(small, tmp_path):
    run(small(parts=("noises",), noises=("one",)))
    with pytest.raises(UserError, match="--overwrite"):
        run(small(parts=("noises",), noises=("one",)))
    with pytest.raises(UserError, match="draws"):
        run(small(parts=("noises",), noises=("one",), draws=3, resume=True))
    source = (tmp_path / "tiny_entry.py").read_text().replace("fill_(1.0)", "fill_(2.0)")
    (tmp_path / "tiny_entry.py").write_text(source + "\n")
    del sys.modules["tiny_entry"]
    with pytest.raises(UserError, match="weights"):
        run(small(parts=("noises",), noises=("one",), resume=True))


@pytest.mark.usefixtures("pageless")
def test_weights_from_a_file_and_from_before_training(small, entry, tmp_path):
    sys.path.insert(0, str(tmp_path))
    try:
        import tiny_entry

        model = tiny_entry.build()
    finally:
        sys.path.remove(str(tmp_path))
    with torch.no_grad():
        model[0].weight.mul_(3)
    save_file(model.state_dict(), tmp_path / "net.safetensors")
    start = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    save_file(start, tmp_path / "start.safetensors")
    files = {"model": str(tmp_path / "net.safetensors"), "entry": entry, "parts": ("special",)}
    record = run(small(**files, initial=tmp_path / "start.safetensors"))
    found = {row["kind"]: row for row in record.table("curves")}
    assert next(iter(found)) == "initial"
    positive = sum(int((value > 0).sum()) for value in model.parameters())
    voting = sum(int((value != 0).sum()) for value in model.parameters())
    assert found["initial"]["consistency"] == pytest.approx(positive / voting)  # ones agree with what is positive
    torch.testing.assert_close(found["self"]["consistency"], 1.0)

    save_file({**model.state_dict(), "3.weight": torch.ones(5, 6)}, tmp_path / "net.safetensors")
    with pytest.raises(UserError, match=r"'3.weight' is \(5, 6\), in the model \(2, 6\)"):
        run(small(**files, overwrite=True))
    save_file({"0.weight": torch.ones(6, 4)}, tmp_path / "net.safetensors")
    with pytest.raises(UserError, match=r"the file lacks '0.bias'"):
        run(small(**files, overwrite=True))
    save_file({"other": torch.ones(1)}, tmp_path / "start.safetensors")
    with pytest.raises(UserError, match=r"it lacks '0.weight'"):
        run(small(parts=("special",), initial=tmp_path / "start.safetensors", overwrite=True))
    (tmp_path / "net.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(UserError, match="torn, or no safetensors file"):
        run(small(**files, overwrite=True))


def test_a_model_without_batch_norm_and_with_a_measure_of_its_own(small, tmp_path):
    record = run(small(model="tiny_entry:own", noises=("gaussian",), parts=("noises", "norms"), draws=1))
    assert record.table("model")[0]["metric"] == "size"
    assert record.table("layers") == []
    assert all(row["asymmetry_size_low"] is None for row in record.table("curves"))  # one draw has no interval
    page = (tmp_path / "run" / "report.html").read_text()
    assert "asymmetry index of the size" in page
    assert "NaN" not in page


@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing-folder"], "there is no such file or folder"),
        (["net.pt"], "pickled files are not opened"),
        (["net.safetensors"], "weights alone are no model"),
        (["missing.safetensors", "--entry", "tiny_entry:make"], "there is no such file"),
        (["tiny_entry:wrong"], "it returns (model, evaluate) or (model, evaluate, calibrate)"),
        (["tiny_entry:broken"], "it raised RuntimeError (no such)"),
        (["tiny_entry:absent"], "it raised AttributeError"),
        (["tiny_entry:unsteady"], "evaluate"),
        (["tiny_entry:uncalibrated"], "calibrate"),
        (["no_such_module:make"], "it raised ModuleNotFoundError"),
        (["tiny_entry:make", "--data", "mnist"], "an entry point brings its own rows"),
        (["tiny_entry:make", "--points", "4"], "λ = 0 must be one of them"),
        (["tiny_entry:make", "--distances", "0"], "it is a positive finite size"),
        (["tiny_entry:make", "--ratios", "2"], "it is a share"),
        (["tiny_entry:make", "--noises", "one", "one"], "a value stands there twice"),
        (["tiny_entry:make", "--draws", "many"], "draws"),
        (["tiny_entry:make", "--resume"], "no run was started there"),
        ([], "MODEL"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_status_two(arguments, words, capsys, tmp_path):
    (tmp_path / "net.pt").touch()
    assert main(["scan", *arguments]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.strip().splitlines()) == 1
    assert words in streams.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("pageless", "entry")
def test_the_command_line_gives_one_document(capsys, tmp_path):
    fast = [
        "--points",
        "3",
        "--draws",
        "2",
        "--noises",
        "gaussian",
        "--parts",
        "noises",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(["scan", "tiny_entry:make", *fast, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["sign"] for row in document["tables"]["curves"]] == ["raw", "consistent"]
    assert len(document["tables"]["values"]) == 2 * 2 * 3
    assert math.isclose(document["tables"]["curves"][1]["consistency"], 1.0)
