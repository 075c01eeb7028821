"""The commands that a plan prints are typed, on a model small enough to run; each runs the step that was priced."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparing.cli import main
from sparing.jobs.plan import Settings, run
from sparing.jobs.plan.settings import Lisa, Lora
from sparing.report import Record

SIZE = {"length": 32, "lisa": Lisa(active=(1,)), "lora": Lora(ranks=(4,)), "optimizers": ("adamw-8bit", "apollo-mini")}


@pytest.fixture(scope="module")
def commands(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Way -> command; of the ways that differ by checkpointing alone every second."""
    out = tmp_path_factory.mktemp("plan")
    record = run(Settings(model=model_dir, dtype="float32", device="cpu", out=out / "plan", **SIZE))
    rows = {row["way"]: row["command"] for row in record.table("commands")}
    return {way: rows[way] for at, way in enumerate(rows) if at % 4 in {0, 3}}


@pytest.mark.slow
def test_every_way_runs_as_it_is_printed(
    commands: dict[str, str], data_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bytes that a run predicts come from the same step; its rows hold fewer documents than the dearest row."""
    assert len(commands) >= 8
    for index, (way, command) in enumerate(commands.items()):
        out = tmp_path / f"run{index}"
        words = command.replace("DATA.jsonl", str(data_file)).split()[1:]
        status = main([*words, "--steps", "3", "--max-new-tokens", "0", "--out", str(out)])
        assert status == 0, (way, capsys.readouterr().err)
        record = Record.read(out / "record.jsonl")
        assert len(record.table("train")) == 3
        (step,) = record.table("step")
        assert step["checkpointing"] == way.endswith("checkpointing")
        memory = {row["category"]: row for row in record.table("memory")}
        assert memory["total"]["predicted"] == pytest.approx(memory["total"]["measured"], rel=0.02), way
