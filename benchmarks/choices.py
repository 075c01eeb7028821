"""Multiple-choice items made of texts, and their marks: by a scorer of ours and by lm-evaluation-harness.

``python -m benchmarks.choices`` marks SmolLM2-135M by both on items of a text of the layer study (needs lm_eval).

- A text is cut, at spaces, into passages of 160 characters or just above, each with the 48 or so characters that follow
  it.
- An item is a passage with its true continuation and those of three other passages, in an order drawn by the item.
- The answer is the continuation of the highest log-likelihood, whole (``acc``) or per character (``acc_norm``).

The harness (``pip install 'sparing[eval]'``) must give the same answers, item by item.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparing.jobs.torch_state import measuring
from sparing.report import Progress, environment
from sparing.report.atomic import write_whole
from sparing.seeds import stream

PASSAGE, CONTINUATION = 160, 48
"""Characters of a passage and of what follows it, at least."""


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


def items_of(text: str, count: int) -> list[Item]:
    """At most so many multiple-choice items made of a text; the same ones in every process."""
    return choices_of(passages(text)[:count])


def choices_of(pairs: Sequence[tuple[str, str]]) -> list[Item]:
    """An item of each passage: what follows it, and what follows three others, in an order drawn by the item."""
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
    given, room = len(ids_of(tokenizer, item.passage)), model.config.max_position_embeddings + 1
    texts = [ids_of(tokenizer, f"{item.passage} {choice}") for choice in item.choices]
    counts = [len(text) - given for text in texts]
    kept = [text[-room:] for text in texts]
    longest = max(map(len, kept))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in kept])  # behind, where nobody looks
    with measuring(model):
        scores = model(input_ids=padded[:, :-1], use_cache=False).logits.log_softmax(-1)
    return [
        row[len(text) - 1 - count : len(text) - 1].gather(1, torch.tensor(text[-count:])[:, None]).sum().item()
        for row, text, count in zip(scores, kept, counts, strict=True)
    ]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text and no others."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


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


MODEL, TEXT, ITEMS = "smollm2-135m-instruct", "bryant-stories", 250
RESULT = Path(__file__).parent / "results" / "choices.json"


def compared() -> dict[str, Any]:
    """Accuracy by both scorers, and the items on which they differ."""
    from sparing.data import fetch
    from sparing.jobs.lm.corpus import read_text
    from sparing.jobs.lm.models import load_model, load_tokenizer

    checkpoint = fetch(MODEL)
    model, tokenizer = load_model(checkpoint, dtype=torch.float32), load_tokenizer(checkpoint)
    items, scores = items_of(read_text(TEXT, 1_000_000), ITEMS), []
    with Progress("choices", total=len(items), unit="item") as bar:
        for item in items:
            scores.append(log_likelihoods(model, tokenizer, item))
            bar.advance()
    ours = marks_of(scores, items)
    with tempfile.TemporaryDirectory() as folder:
        theirs = harness_marks(checkpoint, items, Path(folder))
    if theirs is None:
        raise SystemExit("lm_eval is not installed: pip install -e '.[eval]'")
    row: dict[str, Any] = {"items": len(items)} | {name: sum(right) / len(items) for name, right in ours.items()}
    row |= {f"harness_{name}": sum(right) / len(items) for name, right in theirs.items()}
    differ = (a != b for name in ours for a, b in zip(ours[name], theirs[name], strict=True))
    return row | {"items_that_differ": sum(differ)}


def main() -> None:
    """Measure, and write what was found."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    about = {
        "command": "python -m benchmarks.choices",
        "model": MODEL,
        "passage": PASSAGE,
        "continuation": CONTINUATION,
    }
    write_whole(RESULT, json.dumps(about | {"environment": environment(), "rows": compared()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
