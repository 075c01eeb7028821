"""Under torchrun: a rank is killed, the others end soon and say who is gone, and the run goes on with fewer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zoo
from oracles.finetune_ranks import weights
from patience import PATIENCE
from sparing.errors import RunError
from sparing.jobs.checkpoint import saved
from sparing.jobs.finetune import Finetune, run
from sparing.jobs.finetune.settings import Lisa, Training
from sparing.jobs.finetune.state import start
from sparing.layersample.price.predict import Full
from sparing.sharding.engine.freed import GradientTaken

# slow: torchrun and two interpreters, which import torch and transformers
pytestmark = [pytest.mark.processes, pytest.mark.slow]

STEPS = 40


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Finetune:
    folder = tmp_path_factory.mktemp("killed")
    zoo.gpt2(layers=3, vocab=258).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 6, encoding="utf-8")
    return Finetune(
        model=folder / "model", data=folder / "data.jsonl", out=folder / "out", length=32, steps=STEPS, accumulate=2,
        held_out=0.3, dtype="float64", max_new_tokens=0, lisa=Lisa(active=1, period=3), save_every=2, plan="GGG",
        groups=2,
    )  # fmt: skip


def command(settings: Finetune) -> list[str]:
    """What a person types."""
    options: dict[str, Any] = {
        "out": settings.out, "length": 32, "steps": STEPS, "accumulate": 2, "held-out": 0.3, "dtype": "float64",
        "max-new-tokens": 0, "lisa.active": 1, "lisa.period": 3, "save-every": 2, "plan": "GGG", "groups": 2,
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [sys.executable, *torchrun, "-m", "sparing", "finetune", str(settings.model), str(settings.data[0]), *words]


def children(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8")
    return [int(word) for word in found.split()]


@pytest.mark.usefixtures("brisk")
def test_a_killed_rank_ends_all_and_the_run_goes_on_with_one(settings: Finetune) -> None:
    said = settings.out.with_name("said.txt")
    with said.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command(settings), stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        until = time.monotonic() + PATIENCE
        while not saved(settings.out / "checkpoints") and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        doomed = children(process.pid)
        os.kill(doomed[-1], signal.SIGKILL)
        try:
            status = process.wait(timeout=PATIENCE)
        finally:
            process.kill()
    words = said.read_text(encoding="utf-8")
    assert status == 1, words
    assert not any(Path(f"/proc/{child}").exists() for child in doomed)
    lines = [line for line in words.splitlines() if line.startswith("sparing: ")]
    assert lines == ["sparing: rank 1 is gone; run the same command with --resume to go on from the last checkpoint"]
    assert "jobs/finetune" not in words  # no traceback of ours
    assert not (settings.out / "model").exists()
    kept = [path.name for path in settings.out.joinpath("checkpoints").iterdir() if not path.name.startswith(".")]
    assert kept

    record = run(replace(settings, plan="NNN", groups=None, resume=True))
    assert [row["step"] for row in record.table("train")] == list(range(1, STEPS + 1))
    run(replace(settings, plan="NNN", groups=None, out=settings.out.with_name("straight")))
    ours, theirs = weights(settings.out), weights(settings.out.with_name("straight"))
    assert max(((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in ours) < 1e-9


def test_a_step_cut_short_keeps_its_words() -> None:
    """The engine has taken the gradients by then, and refuses looks at them."""

    def cut_short() -> None:
        model = zoo.gpt2(layers=1)
        with start(model, Training(method=Full(), steps=1), rows=4):
            for parameter in model.parameters():
                parameter.__class__ = GradientTaken
            raise RunError("the network broke")

    with pytest.raises(RunError, match="the network broke"):
        cut_short()
