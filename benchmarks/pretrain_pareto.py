"""Loss and downstream accuracy against density, with hyperparameters that were tuned on a small dense model.

Run ``python -m benchmarks.pretrain_pareto`` (about twenty minutes of CPU time on one core; every row is kept as it is
done, so the same command goes on after an interruption). The paper's Figure 3 and Table 2 in miniature: a Llama of
width 128 learns the prose of wiki articles at densities from 1 to 1/32, under SμPar, μP and the standard
parameterization, all with the learning rate of a dense model of width 64; two seeds each. Every model is exported as a
transformers checkpoint, and marked on multiple-choice items made of text that it has not seen:

- the test text is cut, at spaces, into passages of 160 characters or just above, each with the 48 or so characters
  that follow it;
- an item is a passage with its true continuation and those of three other passages, in an order drawn by the item;
- the answer is the continuation of the highest log-likelihood, whole (``acc``) or per character (``acc_norm``).

The items of the first seed are marked by lm-evaluation-harness too where it is installed (``pip install
'sparing[eval]'``), which must give the same answers, item by item; ``--no-harness`` leaves it out.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparing.jobs.finetune.evaluate import measuring
from sparing.jobs.pretrain.course import Course, begin, planned
from sparing.jobs.pretrain.evaluate import measured
from sparing.jobs.pretrain.export import ordinary, save_model
from sparing.jobs.pretrain.material import Material, cut, gather, read_text
from sparing.jobs.pretrain.models import config_for, fresh
from sparing.jobs.pretrain.settings import Pretrain, RuleName
from sparing.jobs.pretrain.step import take_step_
from sparing.report import Progress, environment
from sparing.report.atomic import write_whole
from sparing.report.record import plain
from sparing.seeds import stream

RESULT = Path(__file__).parent / "results" / "pretrain_pareto.json"
DENSITIES = ("1", "1/4", "1/8", "1/16", "1/32")
RULES: tuple[RuleName, ...] = ("supar", "mup", "sp")
SEEDS = range(2)
COMMAND = "python -m benchmarks.pretrain_pareto"
SETTINGS = Pretrain(
    data=("enwik8",),
    first=3_000_000,
    vocabulary=1024,
    width=128,
    layers=2,
    context=128,
    base_width=64,
    lr=4e-3,
    batch=8,
    steps=300,
    warmup=30,
)
PASSAGE, CONTINUATION, ITEMS = 160, 48, 250
"""Characters of a passage and of what follows it, at least; items at most."""


@dataclass(frozen=True, slots=True)
class Item:
    """A passage, four continuations, and which one is true."""

    passage: str
    choices: tuple[str, ...]
    label: int


def passages(text: str) -> list[tuple[str, str]]:
    """Cut a text into pairs of a passage and what follows it, one after another, each ending before a space."""
    pattern = re.compile(f"(.{{{PASSAGE},}}?) (.{{{CONTINUATION},}}?)(?: |$)")
    return [(found[1], found[2]) for found in pattern.finditer(" ".join(text.split()))]


def items_of(text: str) -> list[Item]:
    """Multiple-choice items made of a text; the same ones in every process."""
    pairs = passages(text)[:ITEMS]
    items = []
    for index, (passage, true) in enumerate(pairs):
        generator = stream(0, "items", index)
        others = [j for j in torch.randperm(len(pairs), generator=generator).tolist() if j != index][:3]
        choices = [true, *(pairs[j][1] for j in others)]
        order = torch.randperm(4, generator=generator).tolist()
        items.append(Item(passage, tuple(choices[j] for j in order), order.index(0)))
    return items


def log_likelihoods(model: Any, tokenizer: Any, item: Item) -> list[float]:
    """Sum of log-probabilities of each continuation (nat), its tokens those of the whole text behind the passage's."""
    given = len(tokenizer(item.passage, add_special_tokens=False)["input_ids"])
    found, room = [], model.config.max_position_embeddings + 1
    with measuring(model):
        for choice in item.choices:
            whole = tokenizer(f"{item.passage} {choice}", add_special_tokens=False)["input_ids"]
            ids = torch.tensor([whole[-room:]])
            scores = model(input_ids=ids[:, :-1], use_cache=False).logits[0].log_softmax(-1)
            count = len(whole) - given
            found.append(scores[-count:].gather(1, ids[0, -count:, None]).sum().item())
    return found


def marks_of(scores: Sequence[Sequence[float]], items: Sequence[Item]) -> dict[str, list[bool]]:
    """Which items are answered rightly by the likeliest continuation, whole and per character."""
    best: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for row, item in zip(scores, items, strict=True):
        per = [score / len(choice) for score, choice in zip(row, item.choices, strict=True)]
        best["acc"].append(row.index(max(row)) == item.label)
        best["acc_norm"].append(per.index(max(per)) == item.label)
    return best


TASK = """task: sparing_continuations
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: passage
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def harness_marks(checkpoint: Path, items: Sequence[Item], folder: Path) -> dict[str, list[bool]] | None:
    """The marks that lm-evaluation-harness gives the same items; None where it is not installed."""
    os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "datasets"))
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        return None
    tasks = folder / "tasks"
    if not tasks.exists():
        tasks.mkdir()
        lines = (json.dumps(asdict(item)) + "\n" for item in items)
        (tasks / "items.jsonl").write_text("".join(lines), encoding="utf-8")
        (tasks / "continuations.yaml").write_text(TASK.format(path=tasks / "items.jsonl"), encoding="utf-8")
    known: dict[str, Any] = {"log_samples": True, "bootstrap_iters": 0, "random_seed": 0}
    model = HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=16)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=["sparing_continuations"], task_manager=manager, **known)
    samples = sorted(found["samples"]["sparing_continuations"], key=lambda sample: sample["doc_id"])
    return {name: [bool(sample[name]) for sample in samples] for name in ("acc", "acc_norm")}


@functools.cache
def material() -> tuple[Material, list[Item]]:
    """What every run learns, and the items made of the test text."""
    text = read_text(SETTINGS.data[0], SETTINGS.first)
    return gather(SETTINGS, SETTINGS.context), items_of(cut(text, SETTINGS.held_out)[2])


def trained(settings: Pretrain) -> Course:
    """Train one model to its end."""
    data, _ = material()
    config = config_for(settings, len(data.tokenizer), data.tokenizer.eos_token_id)
    model = fresh(config, seed=settings.seed)
    course = begin(settings, model, data.train, planned(settings, model))
    with Progress(f"{settings.rule} {settings.density}, seed {settings.seed}", total=settings.steps) as bar:
        for _ in range(settings.steps):
            bar.advance(loss=take_step_(course)["loss"])
    return course


def row_of(settings: Pretrain, folder: Path, *, harness: bool) -> dict[str, Any]:
    """Train, export, measure and mark one model."""
    from transformers import AutoModelForCausalLM

    begin_, (data, items) = time.process_time(), material()
    course, checkpoint = trained(settings), folder / "checkpoint"
    save_model(ordinary(course), data.tokenizer, checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    losses = {
        name: measured(model, part, batch=16) for name, part in (("held_out", data.validation), ("test", data.test))
    }
    marks = marks_of([log_likelihoods(model, data.tokenizer, item) for item in items], items)
    row = {f"{name}_loss": found["loss"] for name, found in losses.items()}
    row |= {"bits_per_byte": losses["test"]["bits_per_byte"], "live": live(course), "items": len(items)}
    row |= {name: sum(right) / len(items) for name, right in marks.items()}
    if harness and (theirs := harness_marks(checkpoint, items, folder)) is not None:
        row |= {f"harness_{name}": sum(right) / len(items) for name, right in theirs.items()}
        row["items_that_differ"] = sum(a != b for name in marks for a, b in zip(marks[name], theirs[name], strict=True))
    return row | {"seconds": time.process_time() - begin_}


def live(course: Course) -> int:
    """Parameters that are not masked (count)."""
    masked = sum(mask.numel() - int(mask.sum()) for mask in course.masks.values())
    return sum(p.numel() for p in course.model.parameters()) - masked


def wanted() -> dict[str, Pretrain]:
    """Every run by key, whole seeds first; dense models are the same under SμPar and μP, and trained once."""
    runs = itertools.product(SEEDS, RULES, DENSITIES)
    return {
        f"{rule}/{density}/{seed}": replace(SETTINGS, rule=rule, density=density, seed=seed)
        for seed, rule, density in runs
        if (rule, density) != ("mup", "1")
    }


def identity() -> dict[str, Any]:
    """What rows must share to stand in one table."""
    known: dict[str, Any] = plain(asdict(SETTINGS))
    known.pop("out")
    return known | {"passage": PASSAGE, "continuation": CONTINUATION, "items": ITEMS}


def read() -> dict[str, Mapping[str, Any]]:
    """Rows that are done, by key."""
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}, "settings": identity()}
    return found["rows"] if found["settings"] == identity() else {}


def main() -> None:
    """Do what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-harness", action="store_true", help="mark by our own scorer only")
    parser.add_argument("--only", default="", help="keys that begin so, such as supar/1/8/0")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read()
    for key, settings in wanted().items():
        if key in rows or not key.startswith(options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = row_of(settings, Path(folder), harness=settings.seed == 0 and not options.no_harness)
        rows[key] = {"rule": settings.rule, "density": settings.density, "seed": settings.seed, **found}
        document = {"command": COMMAND, "settings": identity(), "environment": environment(), "rows": rows}
        write_whole(RESULT, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
