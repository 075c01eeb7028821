"""Rows of tokens of a text."""

from __future__ import annotations

import json

from sparing.jobs.subjects.text import token_rows

TEXT = "Down the rabbit hole she went, and never once thought how she was to get out again. " * 20


def test_rows_of_tokens_are_spread_over_the_text(tokenizer, tmp_path):
    whole = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    (tmp_path / "a.txt").write_text(TEXT)
    rows = token_rows(str(tmp_path / "a.txt"), tokenizer, rows=3, length=10)
    assert rows[0].tolist() == whole[:10]
    last = len(whole) // 10 - 1
    assert rows[-1].tolist() == whole[10 * last : 10 * last + 10]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in TEXT.strip(". ").split(". ")))
    assert token_rows(str(tmp_path / "a.jsonl"), tokenizer, rows=2, length=8).shape == (2, 8)
