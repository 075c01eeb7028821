"""Every job that resumes, at its smallest, as a user would start it, and what of its output must have the same bits."""

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
    "seconds", "seconds_sd", "cpu_seconds", "step_seconds", "tokens_per_second", "clients_per_second",
    "seconds_per_step", "predicted_seconds",
}  # fmt: skip
"""Columns that tell time."""

SMALL: dict[str, dict[str, Any]] = {
    "finetune": {
        "length": 32, "steps": 24, "accumulate": 2, "held-out": 0.3, "max-new-tokens": 4, "lr": 1e-2, "device": "cpu",
        "evaluate-every": 8, "save-every": 1, "lisa.active": 1, "lisa.period": 3, "lora.rank": 2,
    },
    "pretrain": {
        "data": "story.txt", "tokenizer": "char", "width": 16, "head-dim": 8, "layers": 2,
        "length": 16, "base-width": 8, "density": "1/2",
        "batch": 2, "lr": 8e-3, "steps": 24, "warmup": 3, "mask-updates.every": 4, "evaluate-every": 8, "save-every": 1,
        "samples": 1, "sample-tokens": 12, "device": "cpu",
    },
    "demo": {"scale": "tiny", "source": "bundled"},
    "condense": {
        "width": 4, "unroll": 3, "inner-lr": 0.1, "steps": 24, "batch": 16, "forward.directions": 2,
        "outer-lr": 0.1, "evaluation.steps": 20, "evaluation.nets": 1, "measurements": 3, "save-every": 1,
    },
    "federate": {
        "train-rows": 500, "test-rows": 200, "clients": 10, "participation": 0.5, "rounds": 12, "local-epochs": 1,
        "save-every": 1,
    },
    "scan": {"data": "story.txt", "parts": "noises", "points": 21, "draws": 5, "rows": 8, "length": 16},
    "merge": {"data": "story.txt", "points": 41, "rows": 8, "length": 16},
    "invert": {"grid": 48, "tolerance": 1e-7, "steps": 12, "save-every": 1},
    "adapt": {
        "data": "book.txt", "elsewhere": "story.txt", "documents": 2, "stream": 2, "held-out-documents": 2,
        "length": 64, "question-length": 16, "tune": 1, "rates": 0.01, "width": 4, "forward.directions": 2, "steps": 4,
        "seconds": 1e6, "measurements": 2,
    },
    "transfer": {
        "widths": 64, "rules": "supar", "base-width": 32, "layers": 1, "steps": 40, "batch": 16, "least-live": 1,
    },
}  # fmt: skip
"""Settings of a run of a few seconds that saves at every step, round or result."""

READS = {
    "finetune": ("model", "data.jsonl"),
    "scan": ("model",),
    "merge": ("model", "other"),
    "adapt": ("model",),
}
"""What stands first on the command line; a setting that is one of these names is a file too."""

FILES = ("model", "base", "other", "data.jsonl", "story.txt", "book.txt")
"""What ``prepare`` writes."""

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
    "demo": (
        ("--chapters", "transfer", "valley"), ("--chapters", "memory", "federate"),
    ),
    "federate": (
        ("--methods", "fedavg", "fedsign"), ("--methods", "feddyn", "scaffold"),
    ),
    "scan": (
        ("--noises", "gaussian", "uniform", "ternary"), ("--noises", "one", "binary", "--norm", "filter"),
    ),
    "merge": (
        ("--method", "auto"), ("--method", "ties", "--base", "base"),
    ),
    "invert": (
        ("--equation", "allen-cahn", "--seeds", "0", "1"),
        ("--equation", "burgers", "--method", "pinn", "--pinn.steps", "3", "--pinn.batch", "16", "--seeds", "0"),
    ),
    "adapt": (
        ("--methods", "uniform", "fg-phi", "rgu"), ("--methods", "checkpointed", "fg-psi"),
    ),
    "transfer": (
        ("--log2-rates", "-9", "-7", "-5", "--densities", "1", "0.25", "--seeds", "0", "1", "--no-coordinates"),
        ("--axis", "std", "--log2-stds", "-1", "0", "1", "--densities", "1", "0.5", "--seeds", "0"),
    ),
}  # fmt: skip
"""Ways of each job that keep different things in a checkpoint."""


def prepare(folder: Path | str) -> None:
    """What the jobs read: three models of three small blocks, a tokenizer of bytes, lines to learn, story and book."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = Path(folder)
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 258, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=256, eos_token_id=256))
    model.save_pretrained(folder / "model")
    torch.manual_seed(1)
    for name in ("base", "other"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    for name in ("model", "base", "other"):
        _bytes().save_pretrained(folder / name)
    lines = [f'{{"text": "The {animal} sat on the {place}."}}\n' for animal in ANIMALS for place in PLACES]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    story = [
        f"Once upon a time the {ANIMALS[i % 5]} sat down on the {PLACES[i % 4]}, and {i} birds flew by.\n\n"
        for i in range(60)
    ]
    (folder / "story.txt").write_text("".join(story), encoding="utf-8")
    (folder / "book.txt").write_text(_book(), encoding="utf-8")


def _book() -> str:
    towns = ("Madrid", "Toledo", "Sicily", "Palermo", "Lisbon", "Vienna")
    sentences = [f'One day {who} of {town} met Margery. "Where do you go?" said the cat to Pedro. They came to {town}.'
                 for town in towns for who in ("Robert", "Guido", "Rosalba", "Pedro")]  # fmt: skip
    return "THE FIRST CHAPTER\n\n" + "\n\n".join(sentences) + "\n"


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
        # invert and transfer take the seeds of their runs, which stand in the way
        options = SMALL[self.job] | {"out": out} | ({"seed": self.seed} if "--seeds" not in self.way else {}) | changes
        given = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        words = [*READS.get(self.job, ()), *given, *self.way, *(["--resume"] if resume else [])]
        return [self.job, *(str(self.place / word) if word in FILES else word for word in words)]

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


RESULTS = ("federate", "scan", "merge", "invert", "adapt", "transfer")
"""Jobs whose checkpoints are not named by a step."""


def newest(job: str, out: Path) -> int:
    """How far the newest checkpoint is: its step, or when it was written where no step stands in its name."""
    if job == "transfer":  # whose runs stand in a database, and its journal beside it
        return sum(path.stat().st_size for path in out.glob("*.db*"))
    folder = out / "checkpoints"
    if not folder.is_dir():
        return 0
    if job in RESULTS:
        return sum(path.stat().st_mtime_ns for path in folder.glob("[!.]*"))
    found = saved(folder)
    return int(found[-1].name.rpartition("-")[2]) if found else 0


WEIGHTS = {
    "finetune": ("model/model.safetensors", "adapter/adapter_model.safetensors"),
    "pretrain": ("model/model.safetensors",),
    "condense": ("images.safetensors",),
    "federate": ("models/*.safetensors", "split.json"),
    "scan": (),
    "merge": ("model/model.safetensors",),
    "invert": ("coefficients.safetensors",),
    "adapt": ("weights/*.safetensors",),
    "transfer": (),
    "demo": ("valley-*.safetensors", "federated/*/models/*.safetensors"),
}


def outcome(job: str, out: Path) -> dict[str, str]:
    """Hash of each file of weights, and of each table of the record without its times."""
    files = [path for pattern in WEIGHTS[job] for path in sorted(out.glob(pattern))]
    found = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
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
