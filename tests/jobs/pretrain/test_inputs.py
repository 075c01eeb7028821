"""Texts are cut by position, and nothing of the end is ever learnt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparing.data import bundled_text
from sparing.errors import UserError
from sparing.jobs.lm.corpus import read_text
from sparing.jobs.pretrain import Pretrain
from sparing.jobs.pretrain.inputs import crops, cut, gather, openings
from sparing.seeds import stream


def test_the_parts_are_the_text_and_end_at_lines():
    text = "".join(f"line {i:03d}\n" for i in range(500))
    parts = cut(text, 0.2)
    assert "".join(parts) == text
    assert [round(len(part) / len(text), 2) for part in parts] == [0.8, 0.1, 0.1]
    assert all(part.endswith("\n") for part in parts)


def test_what_is_learnt_is_the_beginning_of_every_text(settings: Pretrain, tmp_path: Path):
    texts = {name: letter * 90 + letter.upper() * 10 for name, letter in (("one", "a"), ("two", "b"))}
    paths = []
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        paths.append(str(tmp_path / name))
    found = gather(replace(settings, data=tuple(paths), length=8), 8)
    assert found.tokenizer.decode(found.train) == "a" * 90 + "<|endoftext|>" + "b" * 90 + "<|endoftext|>"
    assert found.unknown == found.validation.rows.ids.numel() + found.test.rows.ids.numel() - 2
    assert found.validation.size == found.test.size == 10
    assert found.validation.tokens == 12


def test_bytes_per_token_of_byte_pairs(settings: Pretrain):
    found = gather(replace(settings, tokenizer="bpe", vocabulary=300), 16)
    assert len(found.tokenizer) == 300
    text = found.tokenizer.decode(found.validation.rows.ids.flatten())
    assert found.validation.bytes_per_token == pytest.approx(len(text) / found.validation.rows.ids.numel(), rel=0.1)
    assert found.validation.bytes_per_token > 1.5


def test_crops_are_neighbours_and_a_function_of_their_stream():
    ids = torch.arange(100)
    inputs, targets = crops(ids, batch=50, context=7, generator=stream(0, "x"))
    assert inputs.shape == targets.shape == (50, 7)
    assert torch.equal(inputs[:, 0, None] + torch.arange(7), inputs)
    assert torch.equal(targets, inputs + 1)
    assert inputs.min() >= 0
    assert targets.max() <= 99
    again = crops(ids, batch=50, context=7, generator=stream(0, "x"))
    assert torch.equal(inputs, again[0])


def test_crops_reach_both_ends():
    inputs, targets = crops(torch.arange(9), batch=200, context=7, generator=stream(0, "x"))
    assert set(inputs[:, 0].tolist()) == {0, 1}
    assert targets.max() == 8


def test_openings_are_spread_over_the_text():
    text = "\n\n".join(f"Paragraph {i} has quite a few more words than are needed." for i in range(10))
    assert openings(text, 2) == ("Paragraph 0 has quite a few more words", "Paragraph 5 has quite a few more words")
    assert openings("Too short.", 2) == ()
    assert openings(text, 0) == ()


def test_bundled_text_and_its_first_bytes():
    whole = read_text("bundled")
    assert whole.startswith(bundled_text("alice")[:100])
    assert whole.endswith(bundled_text("blake")[-100:])
    assert read_text("bundled", 50) == whole.encode()[:50].decode()


def test_a_file_may_be_cut_inside_a_character(tmp_path: Path):
    path = tmp_path / "text"
    path.write_text("äöü", encoding="utf-8")
    assert read_text(str(path)) == "äöü"
    assert read_text(str(path), 3) == "ä"


def test_unknown_names_and_foreign_bytes_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"data: got alcie; it is no file and none of bundled, .*alice"):
        read_text("alcie")
    path = tmp_path / "latin"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match=r"data: got .*latin; it is not UTF-8 \(byte 0\)"):
        read_text(str(path))


def test_a_text_shorter_than_a_row_is_refused(settings: Pretrain, tmp_path: Path):
    path = tmp_path / "short"
    path.write_text("abcdefgh", encoding="utf-8")
    with pytest.raises(UserError, match="data: got 8 tokens to learn; a row has 16"):
        gather(replace(settings, data=(str(path),)), 16)
    path.write_text("abcdefgh" * 5, encoding="utf-8")
    with pytest.raises(UserError, match="data: got 3 tokens of held-out text; one row has 16"):
        gather(replace(settings, data=(str(path),)), 16)
