"""Families of models at three times the width: every number of the plan is that of ``mup``, or they are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from idioms.scaling.cells import (
    BY_WIDTH,
    HEADS,
    HEADS_REFUSED,
    OWN_LAW,
    OWN_READOUT,
    RATES,
    REFUSED,
    SAVED,
    SAVED_FAMILIES,
    WIDTH,
    WITHOUT_HEADS,
)
from idioms.scaling.families import FAMILIES
from idioms.scaling.oracle import numbers
from scaling.models import seeded
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.plans.planning import plan

CONSTANT = {"*": "constant"}  # what is measured of initial weights has tests of its own; here it is factors


def built(family: str, width: int, inner: int, heads: int):
    return seeded(lambda: FAMILIES[family](width, inner, heads))


def models_of(family: str) -> list[nn.Module]:
    """Inner widths grow by another factor than widths, where a family has both; heads keep their size."""
    return [built(family, *sizes) for sizes in ((48, 192, 6), (16, 32, 2), (32, 96, 4))]


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in REFUSED], ids=lambda name: f"{RATES}-{name}"
)
def test_every_number_is_that_of_mup(family: str):
    """Ratios of small whole numbers and their roots: equal to a few roundings of double precision."""
    models = models_of(family)
    adam, sgd = (plan(models[0], base=models[1], optimizer=name, init=CONSTANT) for name in ("adam", "sgd"))
    expected = numbers(*models)
    for found, theirs in ((adam, expected.adam), (sgd, expected.sgd)):
        for name, entry in found.entries.items():
            got = (entry.factors.lr, entry.factors.weight_decay)
            assert got == pytest.approx(theirs[name], rel=1e-14), (name, entry.role)
    for name, entry in adam.entries.items():
        assert entry.factors.std == pytest.approx(expected.std[name], rel=1e-14), (name, entry.role)
    done = OWN_READOUT.get(family, lambda m: 1.0)
    theirs = {path: factor / done(3.0) for path, factor in expected.readouts.items()}
    assert adam.inputs == pytest.approx(theirs, rel=1e-12 if family in OWN_READOUT else 1e-14)
    assert adam.attention == 1.0


@pytest.mark.parametrize("family", REFUSED, ids=lambda name: f"{RATES}-{name}")
def test_a_family_that_is_not_understood_is_refused(family: str):
    model, base, _ = models_of(family)
    with pytest.raises(UserError, match=REFUSED[family]):
        plan(model, base=base, optimizer="adam", init=CONSTANT)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in WITHOUT_HEADS], ids=lambda n: f"{HEADS}-{n}"
)
def test_the_factor_on_logits_is_that_of_mup(family: str):
    """mup divides logits by d_head and multiplies by the base's √d_head: the base's over m. A model whose own code
    divides by d_head to the power p has done m^-p of that."""
    model, base = built(family, 48, 96, 2), built(family, 16, 32, 2)
    power = OWN_LAW.get(family, 0.5)
    if family in HEADS_REFUSED:
        with pytest.raises(UserError, match=HEADS_REFUSED[family]):
            plan(model, base=base, init=CONSTANT)
        return
    assert plan(model, base=base, init=CONSTANT).attention == pytest.approx(3 ** (power - 1), rel=1e-14)


@pytest.mark.parametrize("family", BY_WIDTH, ids=lambda name: f"{WIDTH}-{name}")
def test_a_base_by_its_width_is_the_one_built_by_hand(family: str):
    """Names of widths and heads are each family's own; the plan is the same, to the bit, but for what is measured."""
    model, base = built(family, 48, 96, 6), built(family, 16, 32, 2)
    got, expected = (plan(model, base=which, init=CONSTANT) for which in (16, base))
    assert {n: e.factors for n, e in got.entries.items()} == {n: e.factors for n, e in expected.entries.items()}
    assert (got.inputs, got.attention) == (expected.inputs, expected.attention)


def example(model) -> dict[str, torch.Tensor]:
    """Tokens, a picture or a spectrogram, as the model asks."""
    generator = torch.Generator().manual_seed(3)
    ids = {"input_ids": torch.randint(1, 40, (2, 6), generator=generator)}
    name = model.main_input_name
    if name == "pixel_values":
        return {name: torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)}
    if name == "input_features":
        spectra = torch.randn(2, 8, 32, generator=generator, dtype=torch.float64)
        return {name: spectra, "decoder_input_ids": ids["input_ids"]}
    return ids


@pytest.fixture
def double():
    """Models built in double precision, their own constants too: ``model.double()`` keeps those of single (Gemma)."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", SAVED_FAMILIES, ids=lambda name: f"{SAVED}-{name}")
def test_a_saved_model_is_the_same_function(family: str, tmp_path, double):
    """Factors are in the weights: logits are equal to rounding of double precision, through up to 60 products each.

    Norms of Gemma compute in single precision whatever the model's; logits are about 0.03 there.
    """
    atol = 1e-7 if family.startswith("Gemma") else 1e-12
    model, base = built(family, 32, 64, 2), built(family, 16, 32, 2)
    apply_(model, plan(model, base=base, density=0.5, init=CONSTANT), seed=0)
    model.eval()
    inputs = example(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
        torch.testing.assert_close(loaded(**inputs).logits, expected, rtol=1e-9, atol=atol)
        assert torch.equal(model(**inputs).logits, expected)  # saving has changed nothing
    assert not any(key.endswith(("_mask", "_scale", "scaling_plan")) for key in loaded.state_dict())


def test_a_state_dict_given_to_save_pretrained_is_folded_too(tmp_path, double):
    """Trainers collect a state dict first; the weights in it are those that count."""
    model, base = built("Llama", 32, 64, 2), built("Llama", 16, 32, 2)
    apply_(model, plan(model, base=base, density=0.5, init=CONSTANT), seed=0)
    other = built("Llama", 32, 64, 2)
    apply_(other, plan(other, base=base, density=0.5, init=CONSTANT), seed=1)
    other.save_pretrained(tmp_path, state_dict=model.state_dict())
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = model.eval()(**example(model)).logits
        torch.testing.assert_close(loaded(**example(model)).logits, expected, rtol=1e-9, atol=1e-12)
