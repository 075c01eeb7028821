"""The folder that a fuzzed run stands in: tiny inputs of every verb, files of others, and a repository that bites."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.trust.cases import SMALL, prepare

LEAST: dict[str, list[str]] = {
    "finetune": ["model", "data.jsonl", "--batch", "2"],
    "pretrain": [],
    "transfer": [
        "--log2-rates", "-8", "-6", "--widths", "16", "--densities", "1", "--rules", "sp", "--seeds", "0",
        "--base-width", "16", "--layers", "1", "--steps", "10", "--batch", "8", "--least-live", "1", "--no-coordinates",
    ],
    "condense": [],
    "adapt": [
        "model", "--data", "book.txt", "--elsewhere", "story.txt", "--documents", "2", "--stream", "2",
        "--held-out-documents", "2", "--length", "64", "--question-length", "16", "--tune", "0", "--rates", "0.01",
        "--width", "4", "--forward.directions", "1", "--steps", "1", "--seconds", "1", "--measurements", "1",
        "--methods", "uniform", "fg-phi",
    ],
    "scan": [
        "model", "--data", "story.txt", "--parts", "noises", "--noises", "gaussian", "--points", "3", "--draws", "1",
        "--rows", "2", "--length", "16",
    ],
    "merge": ["model", "other", "--data", "story.txt", "--points", "3", "--rows", "2", "--length", "16"],
    "federate": ["--data", "rows.safetensors"],
    "attribute": [
        "--data", "story.txt", "--predictions", "0", "--train-rows", "6", "--epochs", "1", "--batch", "2", "--width",
        "4", "--length", "16", "--shown", "1", "--retrain", "1", "--share", "0.2",
    ],
    "invert": ["--grid", "16", "--steps", "1", "--seeds", "0"],
    "plan": ["model", "--memory", "1GB", "--length", "32", "--lisa.active", "1", "--lora.ranks", "2", "--no-maps"],
    "fetch": [],
    "probe": ["--seconds", "0.05"],
    "demo": ["--chapters", "transfer", "--scale", "tiny"],
    "compare": ["runs/one", "runs/two"],
    "evaluate": ["model", "--against", "other", "--data", "data.jsonl", "--length", "16"],
}  # fmt: skip
"""Words of each verb's smallest run."""

FEW: dict[str, dict[str, Any]] = {
    "finetune": {"steps": 2, "accumulate": 1, "max-new-tokens": 2, "evaluate-every": 1},
    "pretrain": {"steps": 2, "warmup": 1, "mask-updates.every": 1, "evaluate-every": 1},
    "condense": {
        "steps": 1, "unroll": 2, "batch": 8, "evaluation.steps": 2, "measurements": 1, "held-out-images": 8,
    },
    "federate": {
        "train-rows": 40, "test-rows": 20, "clients": 4, "participation": 0.5, "rounds": 2, "members": "no",
        "workers": 1,
    },
}  # fmt: skip
"""What ``cases.SMALL`` has more of."""

READS = {
    "finetune": ("model", "data.jsonl", "chats.jsonl", "topology.json"),
    "pretrain": ("story.txt", "config.json", "model", "topology.json"),
    "adapt": ("model", "book.txt", "story.txt"),
    "scan": ("model", "story.txt", "data.jsonl"),
    "merge": ("model", "other", "story.txt"),
    "federate": ("rows.safetensors",),
    "attribute": ("story.txt",),
    "plan": ("model", "config.json", "topology.json"),
    "fetch": ("story.txt",),
    "compare": ("runs/one/record.jsonl", "runs/two/record.jsonl"),
    "evaluate": ("model", "other", "data.jsonl", "chats.jsonl"),
}
"""Inputs of each verb that may be damaged."""

KIND = {
    "model": ["model"], "data": ["story.txt", "data.jsonl", "chats.jsonl", "rows.safetensors"],
    "topology": ["topology.json"], "model_config": ["config.json", "model"], "held_out_data": ["data.jsonl"],
    "base": ["model"], "against": ["other"], "tasks": ["config.json"], "initial": ["other", "model"],
    "books": ["book.txt"], "elsewhere": ["story.txt"],
    "tokenizer": ["model", "char", "bpe"], "checkpoint": ["other"], "models": ["model"], "path": ["story.txt"],
    "directory": ["model", "config.json"], "text": ["alice"], "storage": ["sqlite:///shared.db"],
}  # fmt: skip
"""Values of settings that are files, beside strange ones."""


def least(verb: str) -> list[str]:
    """The words of a verb's smallest run, without the verb and its folder."""
    more = [
        f"--{name}" if value == "yes" else f"--no-{name}" if value == "no" else f"--{name}={value}"
        for name, value in (SMALL[verb] | FEW[verb] if verb in FEW else {}).items()
    ]
    return [*LEAST[verb], *more]


def build(folder: Path) -> None:
    """Write the world."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from sparing.sharding.planner.config import Topology

    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    for name in ("model", "other"):
        tokenizer.save_pretrained(folder / name)
    (folder / "config.json").write_text((folder / "model" / "config.json").read_text())
    rows = [{"role": role, "content": f"{role} speaks"} for role in ("user", "assistant")]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": rows}) + "\n") * 6)
    machine = Topology(groups=2, per_group=2, inter="8Gbps", intra="80Gbps")
    (folder / "topology.json").write_text(machine.to_json() + "\n")
    images, targets = torch.rand(60, 1, 8, 8), torch.arange(60) % 3
    parts = {"inputs": images[:40], "targets": targets[:40], "test_inputs": images[40:], "test_targets": targets[40:]}
    save_file({name: part.contiguous() for name, part in parts.items()}, folder / "rows.safetensors")
    _records(folder / "runs")
    theirs = folder / "theirs"
    theirs.mkdir()
    for name in ("record.jsonl", "report.html", "topology.json", "notes.txt"):
        (theirs / name).write_text("somebody's")
    _bite(folder)


def _records(folder: Path) -> None:
    """Write two finished runs, as far as a comparison reads them."""
    from sparing.report import Record

    for number, name in enumerate(("one", "two"), start=1):
        record = Record(question="How far does it fall?", settings={"lr": number / 10}, seed=0, environment={})
        for step in range(4):
            record.add("train", step=step, loss=4.0 - step / number)
        record.add("speed", method="lisa", seconds=float(number))
        (folder / name).mkdir(parents=True)
        record.write(folder / name / "record.jsonl")


def _bite(folder: Path) -> None:
    """Make the folder a repository whose configuration names a program: git would run it on ``describe``."""
    hook = folder / "hook"
    hook.write_text("#!/bin/sh\ntouch bitten\n")
    hook.chmod(0o755)
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q", "--template="], ["add", "book.txt"], [*who, "commit", "-q", "-m", "bait"],
                  ["config", "core.fsmonitor", "./hook"]):  # fmt: skip
        subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def shrink() -> None:
    """Make what comes from elsewhere tiny: images of two kinds, and a chapter of the demo."""
    import torch

    from sparing.jobs.condense import job
    from sparing.jobs.condense.inputs import Inputs
    from sparing.jobs.demo import transfer

    def pair(count: int) -> tuple[Any, Any]:
        stream = torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (count, 1, 16, 16), dtype=torch.uint8, generator=stream), torch.arange(count) % 2

    small = Inputs(name="mnist", train=pair(40), held_out=pair(8), test=pair(20), classes=("up", "down"))
    job.gather = lambda name, held_out: small  # type: ignore[assignment]
    transfer.WORKS["tiny"] = dataclasses.replace(
        transfer.WORK, widths=(64,), base_width=32, layers=1, densities=(1.0, 0.5), log2_rates=(-8, -6), steps=10,
        batch=8, least_live=4,
    )  # fmt: skip
