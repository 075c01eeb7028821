"""Directions of whole models: paired draws, masks, lengths, and a direction for every kind, sign and norm."""

from __future__ import annotations

import copy
import itertools
import math
from typing import get_args

import pytest
import torch
from torch import nn

import zoo
from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.model.fold import fold_
from sparing.scaling.plans.planning import plan
from sparing.seeds import stream
from sparing.valley.directions.config import Given, Noise, NoiseKind, Norm, Special, SpecialKind, difference
from sparing.valley.directions.elements import expected_consistency
from sparing.valley.directions.resolve import direction_of
from sparing.vectors import dot, norm
from valley import architectures as nets

NOISES, SPECIALS, NORMS = get_args(NoiseKind), get_args(SpecialKind), get_args(Norm)
SIGNS = ("raw", 0.4, "consistent")


def theta_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in named_parameters(model).items()}


def normal_like(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Independent normal tensors for every parameter."""
    return {
        n: torch.randn(p.shape, generator=stream(seed, n), dtype=torch.float64).to(p.dtype)
        for n, p in named_parameters(model).items()
    }


def every_direction(model: nn.Module, **manner):
    yield from (Noise(kind, **manner) for kind in NOISES)
    start = normal_like(model, 5)
    yield from (Special(k, initial=start if k == "initial" else None, **manner) for k in SPECIALS)
    yield Given(normal_like(model, 6), **manner)


def test_a_direction_by_hand():
    """ε = 1 on six entries of which the zero one and the negative ones turn; ‖θ‖² = 30, ‖ε‖² = 6."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
        layer.bias.copy_(torch.tensor([-4.0, 0.0]))
    found = direction_of(Noise("one", sign="consistent"), layer, seed=0, masks="buffers")
    unit = math.sqrt(30 / 6)
    torch.testing.assert_close(found.vector["weight"], unit * torch.tensor([[1.0, -1.0], [1.0, -1.0]]))
    torch.testing.assert_close(found.vector["bias"], unit * torch.tensor([-1.0, -1.0]))
    assert found.sign_consistency == 1.0
    assert found.theta_norm == pytest.approx(math.sqrt(30), rel=1e-12)
    assert found.direction_norm == pytest.approx(math.sqrt(30), rel=1e-6)  # float32
    assert found.cosine == pytest.approx(10 / math.sqrt(6 * 30), rel=1e-6)
    assert (found.zero_share, found.masked_share, found.elements) == (2 / 6, 0.0, 6)
    raw = direction_of(Noise("one", norm="raw"), layer, seed=0)
    assert all(value.eq(1).sum() == value.count_nonzero() for value in raw.vector.values())
    assert raw.sign_consistency == 2 / 4  # without the two zeros
    assert raw.weighted_consistency == pytest.approx(4 / 10, rel=1e-12)
    assert raw.masked_share == 1 / 6  # one zero of four in a matrix is above one percent


@pytest.mark.parametrize("kind", NOISES)
def test_one_draw_has_one_set_of_magnitudes(kind):
    model = nets.resnet()
    raw, *others = (
        direction_of(Noise(kind, sign=s, norm="raw"), model, seed=3, draw=2).vector for s in ("raw", 0.3, "consistent")
    )
    for other in others:
        assert all(torch.equal(raw[name].abs(), other[name].abs()) for name in raw)


@pytest.mark.parametrize("kind", NOISES)
def test_models_of_one_shape_meet_one_draw_whatever_dtype_values_and_order(kind):
    one, other = nets.mlp(), zoo.redraw_(nets.mlp(), seed=9).double()
    flipped = nn.Sequential()
    for name, child in reversed(list(other.named_children())):
        flipped.add_module(name, child)
    found = [direction_of(Noise(kind, norm="raw"), model, seed=0).vector for model in (one, other, flipped)]
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name].float())
        assert torch.equal(found[1][name], found[2][name])


def test_seed_draw_kind_and_name_each_give_other_numbers():
    model = nets.mlp()
    model.b.weight.data = model.b.weight.data.clone()
    base = direction_of(Noise("gaussian", norm="raw"), model, seed=0).vector["b.weight"]
    assert torch.equal(direction_of(Noise("gaussian", norm="raw"), model, seed=0).vector["b.weight"], base)
    others = [
        direction_of(Noise("gaussian", norm="raw"), model, seed=1).vector["b.weight"],
        direction_of(Noise("gaussian", norm="raw"), model, seed=0, draw=1).vector["b.weight"],
        direction_of(Noise("shifted-gaussian", norm="raw"), model, seed=0).vector["b.weight"] - 1,
        direction_of(Noise("gaussian", norm="raw"), nn.Sequential(nn.Linear(16, 16)), seed=0).vector["0.weight"],
    ]
    for other in others:  # correlation of 256 independent pairs: standard error 1/16
        assert abs(float((other * base).mean())) < 5 / 16


@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("sign", SIGNS)
def test_consistent_is_one_and_a_ratio_lies_where_it_should(sign, norm_name):
    model = nets.vgg()
    for way in every_direction(model, sign=sign, norm=norm_name):
        found = direction_of(way, model, seed=0)
        assert found.vector.keys() == named_parameters(model).keys()
        if sign == "consistent":
            assert found.sign_consistency == found.weighted_consistency == 1.0
        elif isinstance(way, Noise):
            share = sum(int((p > 0).sum()) for p in model.parameters()) / found.elements
            expected = expected_consistency(way, share)
            error = math.sqrt(expected * (1 - expected) / found.elements * (3 / 2 if way.kind == "ternary" else 2))
            assert abs(found.sign_consistency - expected) <= 5 * error + 1e-12  # five binomial standard errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_scaled_norm_is_that_of_the_group_in_every_dtype(dtype):
    model = nets.resnet().to(dtype)
    for group in ("all", "norm", "classifier", ("layer2",)):
        found = direction_of(Noise("gaussian", group=group), model, seed=0)
        own = {name: p.detach() for name, p in named_parameters(model).items() if name in found.vector}
        assert found.theta_norm == pytest.approx(float(norm(own)), rel=1e-12)
        assert found.direction_norm == pytest.approx(float(norm(found.vector)), rel=1e-12)
        # The noise is float32, and each element is rounded once more to the dtype of its weight.
        assert found.direction_norm == pytest.approx(found.theta_norm, rel={torch.bfloat16: 2**-8}.get(dtype, 1e-6))
        assert all(value.dtype == dtype for value in found.vector.values())


@pytest.mark.parametrize("kind", ["self", "sign", "centred-sign", "positive", "centred-positive"])
def test_special_directions_are_their_formulas(kind):
    model = nets.vgg()
    theta = {name: value.double() for name, value in theta_of(model).items()}
    found = direction_of(Special(kind, norm="raw"), model, seed=0).vector
    for name, value in theta.items():
        centre = value.sum() / value.numel() if kind.startswith("centred") else 0.0
        above = (value - centre > 0).double()
        expected = {"f": value, "n": 2 * above - 1, "e": above}[kind[-1]]
        assert torch.equal(found[name].double(), expected)


def test_self_and_initial_are_copies_and_have_the_consistency_they_must():
    model = nets.vgg()
    start = normal_like(model, 1)
    own = direction_of(Special("self", norm="raw"), model, seed=0)
    assert (own.sign_consistency, own.cosine) == (1.0, pytest.approx(1.0, abs=1e-12))
    own.vector["features.0.weight"].zero_()
    assert model.features[0].weight.abs().min() > 0
    first = direction_of(Special("initial", initial=start, norm="raw"), model, seed=0)
    assert all(torch.equal(first.vector[name], start[name]) for name in start)
    first.vector["features.0.weight"].zero_()
    assert start["features.0.weight"].count_nonzero() > 0


def test_a_state_dict_is_a_start_too_buffers_aside():
    model = nets.vgg()
    found = direction_of(Special("initial", initial=copy.deepcopy(model.state_dict()), norm="raw"), model, seed=0)
    assert found.cosine == pytest.approx(1.0, abs=1e-12)
    whole = direction_of(Given(copy.deepcopy(nets.tied().state_dict()), norm="raw"), nets.tied(), seed=0)
    assert list(whole.vector) == ["embed.weight", "mix.weight", "mix.bias"]


def test_a_given_vector_may_name_some_parameters_and_any_name_of_a_tied_one():
    model = nets.tied()
    found = direction_of(Given({"out.weight": torch.ones(20, 6)}), model, seed=0)
    assert list(found.vector) == ["embed.weight"]
    assert found.theta_norm == pytest.approx(model.embed.weight.detach().double().norm().item(), rel=1e-12)


def test_the_difference_of_two_models_leads_from_one_to_the_other():
    a, b = nets.mlp(), zoo.redraw_(nets.mlp(), seed=4)
    found = direction_of(Given(difference(theta_of(a), theta_of(b)), name="difference", norm="raw"), a, seed=0)
    for name, value in theta_of(b).items():
        torch.testing.assert_close(named_parameters(a)[name].detach() + found.vector[name], value)
    assert found.label == "difference, raw norm"


@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("masks", ["buffers", "zeros", "folded"])
def test_a_masked_weight_stays_zero_along_every_direction(masks, norm_name):
    """The law between scaling and valley; a folded model has lost its masks and kept its zeros."""
    model = nets.mlp()
    kept = apply_(model, plan(model, density=0.25), seed=0)
    live = {name: mask.clone() for name, mask in kept.items()}
    if masks == "folded":
        fold_(model)
    policy = "buffers" if masks == "buffers" else "zeros"
    masked = sum(int((~mask).sum()) for mask in live.values())
    for sign in SIGNS:
        for way in every_direction(model, sign=sign, norm=norm_name):
            found = direction_of(way, model, seed=0, masks=policy)
            for name, mask in live.items():
                assert not found.vector[name][~mask].any()
            assert any(found.vector[name][mask].any() for name, mask in live.items())
            assert found.masked_share == masked / found.elements > 0.1
            assert found.zero_share >= found.masked_share


def test_without_masks_the_zeros_of_a_pruned_model_would_move():
    """So that the law above can fail."""
    model = nets.mlp()
    apply_(model, plan(model, density=0.25), seed=0)
    fold_(model)
    off = model.b.weight == 0
    assert direction_of(Noise("gaussian"), model, seed=0, masks="buffers").vector["b.weight"][off].any()


def test_masked_weights_count_in_no_norm():
    model = nets.mlp()
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[0] = True
    model.b.register_buffer("weight_mask", mask)  # the weights off it are left alive, as torch's pruning leaves them
    found = direction_of(Noise("gaussian", group=("b.weight",)), model, seed=0)
    assert found.theta_norm == pytest.approx(model.b.weight[0].detach().double().norm().item(), rel=1e-12)
    assert found.direction_norm == pytest.approx(found.theta_norm, rel=1e-6)
    assert found.masked_share == found.zero_share == 240 / 256


def test_frozen_parameters_stay_and_tied_ones_are_there_once():
    model = nets.tied()
    model.mix.requires_grad_(False)
    for way in every_direction(model):
        assert list(direction_of(way, model, seed=0).vector) == ["embed.weight"]


def test_nothing_of_the_model_changes_and_no_graph_is_kept():
    model, twin = nets.vgg(), nets.vgg()
    rng = torch.get_rng_state()
    for way, n in itertools.product([*every_direction(model)], NORMS):
        found = direction_of(way.__class__(way.kind, norm=n) if isinstance(way, Noise) else way, model, seed=0)
        assert not any(value.requires_grad for value in found.vector.values())
    for (_, value), (_, other) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(value, other)
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("make", [zoo.gpt2, lambda: zoo.llama(tied=True), nets.vgg])
def test_filters_and_blocks_of_real_architectures(make):
    """GPT-2's weights have inputs first: there a filter is a column."""
    model = make()
    found = direction_of(Noise("gaussian", norm="filter"), model, seed=0).vector
    for name, value in theta_of(model).items():
        first = 1 if "c_" in name else 0
        if value.ndim > 1:
            sizes = [x.double().transpose(0, first).flatten(1).norm(dim=1) for x in (found[name], value)]
            torch.testing.assert_close(*sizes, rtol=1e-6, atol=0)  # float32 noise
    parts = direction_of(Noise("gaussian", norm="group"), model, seed=0)
    assert parts.direction_norm == pytest.approx(parts.theta_norm, rel=1e-6)
    block = {
        n: p for n, p in theta_of(model).items() if n.startswith(("transformer.h.1.", "model.layers.1.", "features.3."))
    }
    block |= {n: p for n, p in theta_of(model).items() if n.startswith("features.4.")}
    assert block
    assert float(norm({n: parts.vector[n] for n in block})) == pytest.approx(float(norm(block)), rel=1e-6)


def test_gaussian_noise_is_almost_orthogonal_to_the_weights_and_cosine_is_the_inner_product():
    model = nets.resnet()
    found = direction_of(Noise("gaussian"), model, seed=0)
    inner = float(dot(found.vector, theta_of(model))) / (found.direction_norm * found.theta_norm)
    assert found.cosine == pytest.approx(inner, rel=1e-12)
    assert abs(found.cosine) <= 5 / math.sqrt(found.elements)  # standard error of a random cosine: 1/√d


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (lambda m: Special("initial", initial={"a.weight": torch.ones(16, 8)}), ("Special.initial", "'a.bias'")),
        (lambda m: Special("initial", initial=normal_like(nets.mlp(12), 0)), ("'a.weight'", "(12, 8)", "(16, 8)")),
        (lambda m: Given({"d.weight": torch.ones(2)}), ("Given.vector", "'d.weight'", "named_parameters")),
        (lambda m: Given({"a.weight": torch.ones(2)}), ("'a.weight'", "(2,)", "(16, 8)")),
        (lambda m: Given({"a.weight": torch.ones(16, 8)}, group="classifier"), ("Given.vector", "1 tensors", "group")),
        (lambda m: Given({"a.weight": torch.zeros(16, 8)}), ("leads nowhere",)),
        (lambda m: Given({"a.weight": torch.full((16, 8), math.nan)}), ("direction at 'a.weight'", "inf or nan")),
        (lambda m: Noise("gaussian", norm="filter", one_d="zero", group=("a.bias",)), ("leads nowhere",)),
        (lambda m: Noise("gaussian", group="conv"), ("'conv'", "classifier (2)")),
    ],
)
def test_what_does_not_fit_the_model_is_one_line(way, words):
    with pytest.raises(UserError) as caught:
        direction_of(way(None), nets.mlp(), seed=0)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_diverged_weights_are_refused_by_name():
    model = nets.mlp()
    with torch.no_grad():
        model.b.bias[1] = math.inf
    with pytest.raises(UserError, match=r"weights at 'b\.bias'"):
        direction_of(Noise("gaussian"), model, seed=0)
