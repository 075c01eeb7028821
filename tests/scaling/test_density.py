"""Densities by number, by pattern and by law; the laws against bisection."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling import models
from sparing.errors import UserError
from sparing.scaling.masks.density import ER, ERK, densities
from sparing.scaling.plans.planning import plan
from sparing.scaling.roles.find import facts, roles_of


def of(model, density, **options):
    known = facts(model)
    return densities(known, {name: role for name, (role, _) in roles_of(known).items()}, density, **options)


def test_only_hidden_weights_are_masked():
    assert of(models.mlp(16), 0.5) == {"2.weight": 0.5, "4.weight": 0.5}
    assert set(of(models.conv(16), 0.5)) == {"conv.weight", "up.weight"}
    names = of(models.gpt2(32), 0.25)
    assert {name.split(".", 3)[3] for name in names} == {
        "attn.c_attn.weight",
        "attn.c_proj.weight",
        "mlp.c_fc.weight",
        "mlp.c_proj.weight",
    }


def test_patterns_the_first_that_fits_decides_and_the_rest_is_dense():
    model = models.gated(32)
    found = of(model, {"*.down.*": 0.25, "blocks.0.*": 0.5})
    assert found == {
        "blocks.0.gate.weight": 0.5,
        "blocks.0.up.weight": 0.5,
        "blocks.0.down.weight": 0.25,
        "blocks.1.down.weight": 0.25,
    }


def test_sparse_says_what_to_mask_instead():
    assert of(models.mlp(16), 0.5, sparse=["0.weight", "6.*eight"]) == {"0.weight": 0.5, "6.weight": 0.5}


shapes = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.one_of(
        st.tuples(st.integers(1, 300), st.integers(1, 300)),
        st.tuples(st.integers(1, 64), st.integers(1, 64), st.just(3), st.just(3)),
    ),
    min_size=1,
    max_size=6,
)


def by_bisection(shapes, total):
    """Find ε such that Σ min(1, ε · score) · size is the total: it rises with ε."""
    size = {name: math.prod(shape) for name, shape in shapes.items()}
    score = {name: sum(shape) / size[name] for name, shape in shapes.items()}
    low, high = 0.0, max(1 / s for s in score.values())
    for _ in range(200):
        middle = (low + high) / 2
        live = sum(min(1.0, middle * score[name]) * size[name] for name in shapes)
        low, high = (middle, high) if live < total * sum(size.values()) else (low, middle)
    return {name: min(1.0, high * score[name]) for name in shapes}


@given(shapes, st.floats(0.01, 1))
def test_erk_is_the_capped_law_that_meets_the_total(shapes, total):
    found, expected = ERK(total=total).of(shapes), by_bisection(shapes, total)
    for name in shapes:
        assert found[name] == pytest.approx(expected[name], rel=1e-9)  # bisection of a double: 1e-15, times the total
    live = sum(found[name] * math.prod(shape) for name, shape in shapes.items())
    assert live == pytest.approx(total * sum(math.prod(shape) for shape in shapes.values()), rel=1e-9)
    assert all(0 < value <= 1 for value in found.values())


def test_er():
    assert ER(epsilon=2).of({"a": (100, 50), "b": (2, 2)}) == {"a": 2 * 150 / 5000, "b": 1.0}


def test_a_law_for_a_model_leaves_dense_layers_out():
    known = facts(models.gated(32, 512))
    found = of(models.gated(32, 512), ERK(total=0.5))
    size = {name: math.prod(known[name].shape) for name in known if ".gate" in name or ".up" in name or ".down" in name}
    assert sum(found.get(name, 1.0) * count for name, count in size.items()) == pytest.approx(0.5 * sum(size.values()))


@pytest.mark.parametrize("words", ["erk:0.5", "erk:1/2", "erk: 0.5"])
def test_a_law_in_words_is_the_law(words):
    model = models.gated(32, 512)
    assert of(model, words) == of(model, ERK(total=0.5))
    assert of(model, "er:8") == of(model, ER(epsilon=8))


def test_a_plan_takes_the_words_and_keeps_the_total():
    """Of all masked weights together as many live as the words say, whatever each layer gets."""
    model = models.gpt2(32)
    chosen = plan(model, density="erk:1/2")
    masked = [e for e in chosen.entries.values() if e.role == "hidden"]
    size = sum(math.prod(e.shape) for e in masked)
    assert sum(e.density * math.prod(e.shape) for e in masked) == pytest.approx(size / 2)
    assert len({e.density for e in masked}) > 1  # by shape
    for e in masked:  # and each layer's factors follow from its own density
        assert e.factors.lr == pytest.approx(1 / e.density)


@pytest.mark.parametrize(
    "words", ["erk", "erk:", "erk:many", "er", "er:1/0", "uniform:0.5", "0.5", "erk=0.1", "erk:nan"]
)
def test_words_without_a_law_or_its_number(words):
    """A bare "erk" would leave out how many weights shall live: nothing is guessed."""
    with pytest.raises(UserError, match=r'a name and a number.*"erk:0\.1"'):
        of(models.mlp(64), words)


@pytest.mark.parametrize("words", ["erk:0", "erk:1.5", "er:-1"])
def test_numbers_of_words_out_of_range(words):
    with pytest.raises(UserError, match=r"ERK\.total|ER\.epsilon"):
        of(models.mlp(64), words)


@pytest.mark.parametrize("density", [0, -0.1, 1.5, math.nan, True, None])
def test_no_share(density):
    with pytest.raises(UserError, match="share"):
        of(models.mlp(64), density)


def test_too_few_live_inputs_are_refused_with_the_layers_and_the_ways_out():
    with pytest.raises(
        UserError, match=r"fewer than 4 live inputs.* 2 layers: 2\.weight \(2\), 4\.weight \(2\).*least_fan_in="
    ):
        of(models.mlp(16), 1 / 8)
    assert of(models.mlp(16), 1 / 8, least_fan_in=2) == {"2.weight": 1 / 8, "4.weight": 1 / 8}
    assert of(models.mlp(2), 1.0) == {}  # dense layers may be as narrow as they are


def test_patterns_that_fit_nothing_are_refused():
    with pytest.raises(UserError, match=r"'layers"):
        of(models.mlp(16), {"layers.*": 0.5})
    with pytest.raises(UserError, match=r"'layers"):
        of(models.mlp(16), 0.5, sparse=["layers.*"])
    with pytest.raises(UserError, match="vector cannot be sparse"):
        of(models.mlp(16), 0.5, sparse=["2.*"])


@pytest.mark.parametrize("value", [0.0, 1.01])
def test_no_share_by_pattern(value):
    with pytest.raises(UserError, match=r"2\.weight.*share"):
        of(models.mlp(64), {"2.weight": value})
