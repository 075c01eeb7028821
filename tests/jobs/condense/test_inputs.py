"""Real images: three parts that share nothing, drawn from by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparing.errors import UserError
from sparing.jobs.condense import inputs as module
from sparing.jobs.condense.inputs import channels_first, draw, floats, gather, split
from sparing.seeds import stream


@given(count=st.integers(2, 60), data=st.data())
def test_what_is_set_aside_is_not_learnt_from(count: int, data) -> None:
    aside = data.draw(st.integers(0, count - 1))
    images, labels = torch.arange(count)[:, None], torch.arange(count)
    train, held = split(images, labels, aside)
    assert len(held[0]) == aside
    assert sorted([*train[1].tolist(), *held[1].tolist()]) == list(range(count))
    assert torch.equal(train[0][:, 0], train[1])  # images stay with their labels
    assert torch.equal(held[0][:, 0], held[1])


def test_nothing_left_to_learn_is_refused() -> None:
    with pytest.raises(UserError, match="held_out"):
        split(torch.zeros(3, 1), torch.zeros(3), 3)


def test_grey_and_colour_images_get_their_channels_first() -> None:
    assert channels_first(torch.zeros(5, 28, 28)).shape == (5, 1, 28, 28)
    colour = torch.arange(2 * 4 * 4 * 3).reshape(2, 4, 4, 3)
    assert torch.equal(channels_first(colour)[1, 2], colour[1, :, :, 2])


def test_a_draw_belongs_to_its_generator(inputs) -> None:
    images, labels = draw(inputs.train, 12, stream(0, "x"))
    again, _ = draw(inputs.train, 12, stream(0, "x"))
    assert torch.equal(images, again)
    assert images.dtype == torch.float32
    assert 0 <= images.min() < images.max() <= 1
    bright = images[:, 0, :8].mean((1, 2)) > images[:, 0, 8:].mean((1, 2))
    assert torch.equal(bright, labels == 0)  # labels belong to their images


def test_bytes_become_numbers_from_0_to_1() -> None:
    assert floats(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [0, 1]


@pytest.mark.parametrize(("name", "first"), [("mnist", "0"), ("cifar10", "plane"), ("fashion-mnist", "t-shirt")])
def test_a_data_set_comes_in_three_parts(monkeypatch, name: str, first: str) -> None:
    shape = (30, 32, 32, 3) if name == "cifar10" else (30, 28, 28)
    monkeypatch.setattr(
        module, "load_images", lambda name, split: (torch.zeros(shape, dtype=torch.uint8), torch.arange(30) % 10)
    )
    found = gather(name, held_out=10)
    assert (len(found.train[0]), len(found.held_out[0]), len(found.test[0])) == (20, 10, 30)
    assert (found.channels, found.side) == ((3, 32) if name == "cifar10" else (1, 28))
    assert found.classes[0] == first
    assert len(found.classes) == 10
