"""Kill every rank of a 2×2 fine-tuning run at a random step: all must end within 30 s, and resuming must lose nothing.

    python -m benchmarks.shard_kills                        # every rank once
    python -m benchmarks.shard_kills --ranks 0 --rounds 3   # rank 0 three times

Each trial starts ``torchrun … -m sparing finetune`` on a tiny float64 model, kills one rank with SIGKILL when a
checkpoint drawn at random is there, and resumes copies of the folder with four ranks and with two. With four, the
weights must have the bits of a run that was never killed; with two, sums have another order (relative 1e-9).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sparing.jobs.checkpoint import saved
from sparing.report import Progress, Record, print_table

RESULT = Path(__file__).parent / "results" / "shard_kills.jsonl"
STEPS, EVERY, PATIENCE = 12, 2, 300.0
LIMIT = 30.0
"""What the ranks that are left have to end (s)."""


def prepare(folder: Path) -> None:
    """A model of three small blocks, a tokenizer of bytes, and a few lines to learn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16, n_layer=3, n_head=2, vocab_size=258, n_positions=64, bos_token_id=256, eos_token_id=256
    )
    GPT2LMHeadModel(config).double().save_pretrained(folder / "model")
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>", "<|pad|>"]
    raw = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>")
    fast.save_pretrained(folder / "model")
    lines = [f'{{"text": "The {animal} sat on the mat."}}\n' for animal in ("cat", "dog", "hen", "cow", "pig", "fox")]
    (folder / "data.jsonl").write_text("".join(lines), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Where runs are, and which plan they follow."""

    folder: Path
    plan: str

    def start(self, out: Path, ranks: int, *, resume: bool = False) -> subprocess.Popen[bytes]:
        """Begin a run as a person would."""
        options = {
            "out": out, "length": 32, "steps": STEPS, "accumulate": 2, "held-out": 0.3, "dtype": "float64",
            "max-new-tokens": 0, "lisa.active": 1, "lisa.period": 3, "save-every": EVERY, "plan": self.plan,
            "groups": 2,
        }  # fmt: skip
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        job = ["-m", "sparing", "finetune", str(self.folder / "model"), str(self.folder / "data.jsonl")]
        with out.with_suffix(".txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, *torchrun, *job, *words, *(["--resume"] if resume else [])],
                stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip

    def whole(self, out: Path, ranks: int, *, resume: bool = False) -> dict[str, torch.Tensor]:
        """Run to the end; the weights."""
        process = self.start(out, ranks, resume=resume)
        if process.wait(timeout=PATIENCE):
            raise RuntimeError(out.with_suffix(".txt").read_text(encoding="utf-8")[-2000:])
        return load_file(out / "model" / "model.safetensors")

    def killed(self, out: Path, rank: int, step: int) -> dict[str, Any]:
        """Kill a rank of four when a checkpoint of this step or a later one is there."""
        process = self.start(out, 4)
        until = time.monotonic() + PATIENCE
        while newest(out) < step and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        pids = by_rank(process.pid)
        begin, at = time.monotonic(), newest(out)
        os.kill(pids[rank], signal.SIGKILL)
        try:
            status = process.wait(timeout=2 * LIMIT)
        finally:
            process.kill()
        seconds = time.monotonic() - begin
        text = out.with_suffix(".txt").read_text(encoding="utf-8")
        said = [line for line in text.splitlines() if line.startswith("sparing: ")]
        return {
            "rank": rank, "checkpoint": at, "seconds": seconds, "status": status, "said": "; ".join(said),
            "left": sum(Path(f"/proc/{pid}").exists() for pid in pids.values()),
            "named": any(f"rank {rank} is gone" in line for line in said),
            "finished": (out / "model").exists(),
        }  # fmt: skip


def newest(out: Path) -> int:
    """Step of the newest checkpoint."""
    found = saved(out / "checkpoints") if (out / "checkpoints").exists() else []
    return int(found[-1].name.rpartition("-")[2]) if found else 0


def by_rank(parent: int) -> dict[int, int]:
    """Process ids of the ranks that torchrun started."""
    found = {}
    for word in Path(f"/proc/{parent}/task/{parent}/children").read_text(encoding="utf-8").split():
        entries = Path(f"/proc/{word}/environ").read_bytes().split(b"\0")
        for entry in entries:
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = int(word)
    return found


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference, relative to the largest weight of its tensor."""
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in b)


def trial(place: Trial, rank: int, step: int, straight: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Kill, resume with four ranks and with two; a row."""
    out = place.folder / f"killed-{rank}-{step}"
    row = {"plan": place.plan, "drawn": step, **place.killed(out, rank, step)}
    fewer = out.with_name(f"{out.name}-fewer")
    shutil.copytree(out, fewer)
    same, other = place.whole(out, 4, resume=True), place.whole(fewer, 2, resume=True)
    return row | {
        "bits_equal": all(torch.equal(same[name], straight[name]) for name in straight),
        "apart_on_two": apart(other, straight),
    }


def good(row: dict[str, Any]) -> bool:
    """Whether a trial shows what it should."""
    ended = row["seconds"] < LIMIT and row["status"] == 1 and not row["left"] and not row["finished"]
    return bool(ended and row["named"] and row["bits_equal"] and row["apart_on_two"] < 1e-9)


def main() -> None:
    """Kill every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1, 2, 3])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plan", default="GGG")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    settings = {"plan": options.plan, "steps": STEPS, "save_every": EVERY}
    question = "Does a run of 2×2 ranks end and go on when one of them is killed?"
    record = Record(question=question, settings=settings, seed=options.seed, units={"seconds": "s"})
    with tempfile.TemporaryDirectory() as name:
        place = Trial(folder=Path(name), plan=options.plan)
        prepare(place.folder)
        straight = place.whole(place.folder / "straight", 4)
        todo = [rank for _ in range(options.rounds) for rank in options.ranks]
        with Progress("kills", total=len(todo), unit="trial") as bar:
            for rank in todo:
                row = trial(place, rank, draw.randrange(EVERY, STEPS // 2, EVERY), straight)
                record.add("kills", good=good(row), **row)
                record.write(options.out)
                bar.advance()
    print_table(record.table("kills"), units=record.units)
    if not all(row["good"] for row in record.table("kills")):
        raise SystemExit("a trial failed")


if __name__ == "__main__":
    main()
