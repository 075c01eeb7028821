"""Four jobs at their smallest, as a person would start them, and what of their output must have the same bits."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trust.nursery import Child, Nursery
from sparing.jobs.checkpoint import saved
from sparing.report import Record

ANIMALS, PLACES = ("cat", "dog", "hen", "old fox", "young owl"), ("mat", "log", "high wall", "barn roof")

CLOCK = {
    "seconds", "step_seconds", "tokens_per_second", "clients_per_second", "seconds_per_step", "predicted_seconds",
}  # fmt: skip
"""Columns that tell time."""

SMALL: dict[str, dict[str, Any]] = {
    "finetune": {
        "length": 32, "steps": 24, "accumulate": 2, "held-out": 0.3, "max-new-tokens": 4, "lr": 1e-2, "device": "cpu",
        "evaluate-every": 8, "save-every": 1, "lisa.active": 1, "lisa.period": 3, "lora.rank": 2,
    },
    "pretrain": {
        "tokenizer": "char", "width": 16, "head-dim": 8, "layers": 2, "context": 16, "base-width": 8, "density": "1/2",
        "batch": 2, "lr": 8e-3, "steps": 24, "warmup": 3, "every": 4, "eval-every": 8, "checkpoint-every": 1,
        "samples": 1, "sample-tokens": 12, "device": "cpu",
    },
    "condense": {
        "width": 4, "unroll": 3, "inner-lr": 0.1, "steps": 24, "batch": 16, "directions": 2, "outer-lr": 0.1,
        "terms": 2, "truncate": 1, "eval-steps": 20, "eval-nets": 1, "looks": 3, "save-every": 1,
    },
    "federate": {
        "rows": 500, "test-rows": 200, "clients": 10, "participation": 0.5, "rounds": 12, "local-epochs": 1,
        "save-every": 1,
    },
}  # fmt: skip
"""Settings of a run of a few seconds that saves at every step or round."""

WAYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "finetune": (
        ("--method", "lisa", "--lisa.sampler", "adaptive", "--lisa.state", "keep"), ("--method", "lora"),
    ),
    "pretrain": (
        ("--dynamic", "rigl"), ("--optimizer", "muon"),
    ),
    "condense": (
        ("--method", "forward-gradient"), ("--method", "two-phase"),
    ),
    "federate": (
        ("--method", "fedavg", "fedsign"), ("--method", "feddyn", "scaffold"),
    ),
}  # fmt: skip
"""Ways of each job that keep different things in a checkpoint."""


def prepare(folder: Path | str) -> None:
    """What the jobs read: a model of three small blocks with a tokenizer of bytes, lines to learn, and a story."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = Path(folder)
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 258, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=256, eos_token_id=256)).save_pretrained(folder / "model")
    _bytes().save_pretrained(folder / "model")
    lines = [f'{{"text": "The {animal} sat on the {place}."}}\n' for animal in ANIMALS for place in PLACES]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    story = [
        f"Once upon a time the {ANIMALS[i % 5]} sat down on the {PLACES[i % 4]}, and {i} birds flew by.\n\n"
        for i in range(60)
    ]
    (folder / "story.txt").write_text("".join(story), encoding="utf-8")


def _bytes() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>", "<|pad|>"]
    raw = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job in one of its ways, with a seed."""

    place: Path
    """Where ``prepare`` wrote."""

    job: str
    """The verb."""

    way: tuple[str, ...] = ()
    """Words that choose the way."""

    seed: int = 0
    """Of the run."""

    def words(self, out: Path, *, resume: bool = False, **changes: Any) -> list[str]:
        """The command line after ``sparing``."""
        reads = {
            "finetune": [str(self.place / "model"), str(self.place / "data.jsonl")],
            "pretrain": ["--data", str(self.place / "story.txt")],
        }.get(self.job, [])
        options = SMALL[self.job] | {"out": out, "seed": self.seed} | changes
        given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        return [self.job, *reads, *given, *self.way, *(["--resume"] if resume else [])]

    def start(self, nursery: Nursery, out: Path, *, resume: bool = False, disk: Any = None, **changes: Any) -> Run:
        """Begin a run; with ``resume`` it goes on, if there is something to go on with."""
        words = self.words(out, resume=resume and (out / "run.json").is_file(), **changes)
        said = out.with_name(f"{out.name}.txt")
        said.unlink(missing_ok=True)
        return Run(nursery.start(words, said, **(disk or {})), said)


@dataclass(frozen=True)
class Run:
    """A run under way."""

    child: Child
    said: Path

    def begun(self, patience: float = 600.0) -> float:
        """Wait until the progress bar has spoken, or the run is over; the moment."""
        until = time.monotonic() + patience
        while self.child.poll() is None and time.monotonic() < until:
            text = self.said.read_text(encoding="utf-8") if self.said.exists() else ""
            if " to do\n" in text or ": resumes at " in text:
                break
            time.sleep(0.005)
        return time.monotonic()

    def end(self) -> None:
        """Wait for the end, which must be good."""
        if status := self.child.wait():
            raise RuntimeError(f"status {status}: {self.said.read_text(encoding='utf-8')[-2000:]}")


def newest(job: str, out: Path) -> int:
    """How far the newest checkpoints are: a step, or bytes written of a federated one (no step stands in its name)."""
    folder = out / "checkpoints"
    if not folder.is_dir():
        return 0
    if job == "federate":
        return sum(path.stat().st_mtime_ns for path in folder.glob("[!.]*"))
    found = saved(folder)
    return int(found[-1].name.rpartition("-")[2]) if found else 0


WEIGHTS = {
    "finetune": ("model/model.safetensors", "adapter/adapter_model.safetensors"),
    "pretrain": ("model/model.safetensors",),
    "condense": ("images.safetensors",),
    "federate": ("models/*.safetensors", "split.json"),
}


def outcome(job: str, out: Path) -> dict[str, str]:
    """Hash of each file of weights, and of each table of the record without its times."""
    files = [path for pattern in WEIGHTS[job] for path in sorted(out.glob(pattern))]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    record = Record.read(out / "record.jsonl")
    for name in record.tables:
        rows = [
            {key: cell for key, cell in row.items() if key not in CLOCK}
            for row in record.table(name)
            if row.get("unit") != "s"
        ]
        found[name] = hashlib.sha256(repr(rows).encode()).hexdigest()
    return found


def leftovers(out: Path) -> list[str]:
    """Temporary files and folders that a run left."""
    return sorted(str(path.relative_to(out)) for path in out.rglob(".*") if path.suffix in {".part", ".draft", ".old"})
