"""Settings of a direction: what is refused, what the label says, and the difference of two models."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sparing.errors import UserError
from sparing.valley.directions.config import Given, Noise, Special, difference

X = {"w": torch.tensor([1.0, -2.0])}


def test_settings_are_frozen_and_only_the_first_is_positional():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Noise("gaussian").kind = "one"
    with pytest.raises(TypeError):
        Noise("gaussian", "consistent")
    with pytest.raises(TypeError):
        Given(X, "mine")
    assert Noise("one") == Noise("one") != Noise("one", sign=0.5)
    assert len({Noise("one"), Noise("one")}) == 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Noise("cauchy"), ("Noise", "'cauchy'", "gaussian, uniform, ternary, shifted-gaussian")),
        (lambda: Special("gradient"), ("Special", "'gradient'", "centred-positive")),
        (lambda: Noise("one", sign=1.01), ("Noise.sign", "1.01", "[0, 1]")),
        (lambda: Noise("one", sign=-0.1), ("Noise.sign", "-0.1")),
        (lambda: Noise("one", sign=math.nan), ("Noise.sign", "nan")),
        (lambda: Noise("one", sign=True), ("Noise.sign", "True")),
        (lambda: Noise("one", sign="ratio"), ("Noise.sign", "'ratio'", "consistent")),
        (lambda: Noise("one", norm="copy"), ("Noise.norm", "'copy'", "scaled, raw, filter, group")),
        (lambda: Given(X, one_d="copy"), ("Given.one_d", "'copy'", "tensor, abs, zero")),
        (lambda: Noise("one", group="layer1"), ("Noise.group", "'layer1'", "('layer1',)")),
        (lambda: Noise("one", group=()), ("Noise.group", "()")),
        (lambda: Noise("one", group=["a"]), ("Noise.group", "['a']", "tuple")),
        (lambda: Special("initial"), ("Special.initial", "None", "initial=")),
        (lambda: Special("self", initial=X), ("Special.initial", "kind='initial'")),
        (lambda: Special("initial", initial=torch.ones(2)), ("Special.initial", "Tensor")),
        (lambda: Given({"w": 1.0}), ("Given.vector", "dict")),
    ],
)
def test_what_cannot_work_is_one_line(make, words):
    with pytest.raises(UserError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("direction", "label"),
    [
        (Noise("gaussian"), "gaussian"),
        (Noise("ternary", sign="consistent", group="norm"), "ternary, sign-consistent, norm"),
        (Noise("one", sign=0.3, norm="filter"), "one, sign-change ratio 0.3, filter norm, 1-D tensor"),
        (Special("self", norm="raw", group=("a", "b.c")), "self, raw norm, a+b.c"),
        (Given(X), "given"),
        (Given(X, name="gradient", norm="group"), "gradient, group norm"),
    ],
)
def test_the_label_says_what_differs_from_the_defaults(direction, label):
    assert direction.label == label


def test_a_difference_is_b_minus_a_by_name():
    a = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
    b = {"b": torch.tensor(5.0), "w": torch.tensor([4.0, 0.5])}
    found = difference(a, b)
    assert list(found) == ["w", "b"]
    assert found["w"].tolist() == [3.0, -1.5]
    assert found["b"].item() == 2.0


def test_half_precision_loses_nothing_and_float64_stays():
    """1 and 1 − 2⁻⁸ are bfloat16 numbers, and so is their difference, but 256 − 2⁻⁷ is not."""
    a = {"w": torch.tensor([2.0**-7], dtype=torch.bfloat16)}
    b = {"w": torch.tensor([256.0], dtype=torch.bfloat16)}
    assert difference(a, b)["w"].dtype == torch.float32
    assert difference(a, b)["w"].item() == 256 - 2.0**-7
    wide = difference({"w": torch.ones(1, dtype=torch.float64)}, {"w": torch.zeros(1, dtype=torch.float64)})
    assert wide["w"].dtype == torch.float64


def test_a_difference_of_parameters_carries_no_graph():
    a, b = (dict(torch.nn.Linear(2, 2).named_parameters()) for _ in range(2))
    assert not any(value.requires_grad for value in difference(a, b).values())


@pytest.mark.parametrize(
    ("other", "words"),
    [({"v": torch.ones(2)}, ("'w' in one of two",)), ({"w": torch.ones(3)}, ("'w'", "(2,) and (3,)"))],
)
def test_a_difference_of_two_architectures_names_the_first_that_differs(other, words):
    with pytest.raises(UserError) as caught:
        difference(X, other)
    assert all(word in str(caught.value) for word in words), str(caught.value)
