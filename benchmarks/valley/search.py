"""``sparing merge --search`` on three pairs: stories15m fine-tuned on three books, merged two by two.

The last fifth of each book was read by neither; it is cut in rows, of which the first half chooses and the second
judges, once. The best fixed recipe is chosen on the same rows, among the plain average and every factor that
``--method auto`` tries of task arithmetic, TIES and sign-aware merging.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.valley.store import Store
from benchmarks.valley.text import _stories, _tokens, _whole, expert
from sparing.data import fetch

PAIRS = tuple(itertools.combinations(("alice", "burgess-busterbrown", "bryant-stories"), 2))
ROWS, LENGTH, TRIALS, SEED = 16, 48, 20, 0
"""Rows of each book to choose by, and as many to judge by; tokens of a row; trials; of trials and fine-tuning."""


def search() -> None:
    """Every pair."""
    store = Store("search")
    for pair in PAIRS:
        store.once(" + ".join(pair), lambda pair=pair: _row(pair))


def _saved(book: str, place: Path, tokenizer: Any, base: Any) -> Path:
    model = _stories()
    model.load_state_dict(_whole(expert(book, SEED), base))
    model.save_pretrained(place / book)
    tokenizer.save_pretrained(place / book)
    return place / book


def _row(pair: tuple[str, str]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from sparing.jobs.merge import Settings, run

    begun = time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(fetch("stories15m"))
    with tempfile.TemporaryDirectory() as name:
        place, texts = Path(name), []
        for book in pair:
            ids = _tokens(book)
            texts.append(place / f"{book}.txt")
            texts[-1].write_text(tokenizer.decode(ids[len(ids) * 8 // 10 :]), encoding="utf-8")
        base = {key: value.clone() for key, value in _stories().state_dict().items()}
        record = run(Settings(
            models=tuple(_saved(book, place, tokenizer, base) for book in pair), base=Path(fetch("stories15m")),
            data=tuple(map(str, texts)), rows=ROWS, length=LENGTH, points=3, search=TRIALS, seed=SEED,
            out=place / "out",
        ))  # fmt: skip
    roles = {row["role"]: row for row in record.table("search")}
    parents = {row["model"]: row["loss"] for row in record.table("models", kind="parent")}
    trials = record.table("trials")
    return {
        "books": " + ".join(pair), "rows": roles["searched"]["n"], "trials": len(trials),
        "pruned": sum(trial["loss"] is None for trial in trials), "parents": list(parents.values()),
        **{
            role: {key: row.get(key) for key in ("way", "loss_validation", "loss", "searched_less",
                   "searched_less_low", "searched_less_high")}
            for role, row in roles.items()
        },
        "losses": [trial["loss"] for trial in trials], "seconds": time.process_time() - begun,
    }  # fmt: skip
