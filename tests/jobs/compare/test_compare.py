"""A comparison says what differs, lines values up by their texts, and needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparing.cli import main
from sparing.errors import UserError
from sparing.jobs.compare import Settings, run, show
from sparing.jobs.compare.job import differing, labels, side_by_side
from sparing.report import Record

MACHINE = {"cpu": "A", "torch": "2.13.0"}


def write(path: Path, *, lr: float, fall: float, **environment: str) -> Path:
    record = Record(
        question="How far does the loss fall?", settings={"lr": lr, "lisa": {"active": 2}, "out": path.name},
        seed=0, units={"loss": "nat/token", "peak": "B"}, environment=MACHINE | environment,
    )  # fmt: skip
    for step in range(5):
        record.add("held_out", step=step, loss=4 - fall * step, tokens=10)
    for method, peak in (("full", 2**30 * fall), ("lisa", 2**29 * fall)):
        record.add("memory", method=method, peak=peak)
    record.add("twice", seconds=1.0)
    record.add("twice", seconds=2.0)
    path.mkdir(parents=True)
    record.write(path / "record.jsonl")
    return path


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return write(tmp_path / "slow", lr=0.1, fall=0.25), write(tmp_path / "fast", lr=0.2, fall=0.5, cpu="B")


def test_settings_that_differ_and_values_side_by_side(two: tuple[Path, Path]) -> None:
    runs = {path.name: Record.read(path / "record.jsonl") for path in two}
    assert list(differing(runs)) == [{"setting": "lr", "slow": "0.1", "fast": "0.2"}]
    # a curve is drawn, and rows that nothing tells apart are not lined up
    assert list(side_by_side(runs)) == [
        {"of": "memory", "row": "full", "quantity": "peak", "unit": "B", "slow": 2.0**28, "fast": 2.0**29},
        {"of": "memory", "row": "lisa", "quantity": "peak", "unit": "B", "slow": 2.0**27, "fast": 2.0**28},
    ]


@pytest.mark.parametrize("named", ["folder", "record"])
def test_a_comparison_does_not_overwrite_what_it_compares(two: tuple[Path, Path], named: str) -> None:
    slow, fast = two
    (slow / "run.json").write_text("{}")
    (slow / "checkpoints").mkdir()
    run_of = slow if named == "folder" else slow / "record.jsonl"
    before = (slow / "record.jsonl").read_bytes()
    with pytest.raises(UserError, match="reads from what it would delete"):
        run(Settings(runs=(run_of, fast), out=slow, overwrite=True))
    assert (slow / "record.jsonl").read_bytes() == before
    assert (slow / "checkpoints").is_dir()


def test_the_page_says_where_lines_end_and_what_was_not_equal(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(Settings(runs=(two[0], two[1] / "record.jsonl"), out=tmp_path / "out"))
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Held out loss ends at 3.00 nat/token (slow), 2.00 nat/token (fast)" in html.replace(
        "\N{NO-BREAK SPACE}", " "
    )
    for told in ("different processors", "One run of each", "Settings that differ", "512 MiB"):
        assert told in html.replace("\N{NO-BREAK SPACE}", " ")
    assert "Values that are equal" not in html
    assert str(tmp_path) not in html
    assert Record.read(tmp_path / "out" / "record.jsonl").rows == record.rows
    assert (tmp_path / "out" / "run.toml").is_file()
    show(record)
    assert "report: " in capsys.readouterr().out
    with pytest.raises(UserError, match="holds another run"):
        run(Settings(runs=two, out=tmp_path / "out"))


def test_a_comparison_loads_no_torch(two: tuple[Path, Path], tmp_path: Path) -> None:
    code = (
        "import sys; from sparing.cli import main\n"
        f"status = main(['compare', {str(two[0])!r}, {str(two[1])!r}, '--out', {str(tmp_path / 'out')!r}])\n"
        "sys.exit(status or 10 * ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_names_are_as_long_as_it_takes() -> None:
    files = [Path(name) for name in ("/r/a/x/record.jsonl", "/r/b/x/record.jsonl", "/r/y/record.jsonl", "/r/z.jsonl")]
    assert labels(files) == ["a/x", "b/x", "y", "z.jsonl"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slow"], "pass 2 to 8 runs"), (["slow", "slow"], "stands there twice"), (["slow", "none"], "cannot be read"),
        (["slow", "loop.jsonl"], "loop.jsonl"),
    ],
)  # fmt: skip
def test_what_is_no_comparison_is_refused(two, words, told, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.jsonl").symlink_to("loop.jsonl")
    assert main(["compare", *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
