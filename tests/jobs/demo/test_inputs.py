"""What the demo trains on: rows that do not overlap; a model and digits made here where nothing can be fetched."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zoo
from sparing import UserError
from sparing.jobs.demo.inputs import first_look, split
from sparing.jobs.demo.memory import method_of
from sparing.jobs.demo.tiny import make_tiny_model
from sparing.jobs.demo.typeset import FACES, SIDE, draw_digits, glyphs, typeset_digits
from sparing.layersample import LayerSampling
from sparing.seeds import stream


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


def test_every_digit_in_every_face_has_ink_and_a_margin() -> None:
    found = glyphs()
    assert found.shape == (len(FACES), 10, SIDE, SIDE)
    assert 0 <= found.min() < found.max() <= 1
    ink = found.sum((2, 3))
    assert ink.min() > 20
    assert found[..., [0, -1], :].amax() == 0
    lit = found.amax((0, 1, 3)).nonzero().flatten()  # rows that any digit reaches
    assert abs(float(lit[0]) + float(lit[-1]) - (SIDE - 1)) <= 2  # the same margin above and below, to two pixels


def test_digits_of_a_kind_are_alike_and_others_are_not() -> None:
    found = torch.nn.functional.normalize(glyphs().flatten(2), dim=2)
    alike = torch.einsum("afp,bfp->abf", found, found).mean()
    different = torch.einsum("afp,bgp->abfg", found, found).mean()
    assert alike > different + 0.1


def test_a_draw_belongs_to_its_generator_and_keeps_labels() -> None:
    images, labels = draw_digits(60, stream(0, "x"))
    again, _ = draw_digits(60, stream(0, "x"))
    assert torch.equal(images, again)
    assert images.shape == (60, 1, SIDE, SIDE)
    assert images.dtype == torch.uint8
    assert set(labels.tolist()) == set(range(10))
    shape = glyphs().mean(0)
    likeness = torch.einsum("nij,cij->nc", images[:, 0].float(), shape / shape.flatten(1).norm(dim=1)[:, None, None])
    # turned and shifted digits match their own kind far more often than the one in ten of chance
    assert (likeness.argmax(1) == labels).float().mean() > 0.3


def test_it_serves_as_a_data_set() -> None:
    found = typeset_digits()
    assert (found.channels, found.side, len(found.classes)) == (1, 28, 10)
    assert not torch.equal(found.train[0][:100], found.test[0][:100])
