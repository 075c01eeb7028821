"""Nets whose units are reordered compute what they did, and an order that was hidden is found again."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import nn

import zoo
from refusals import refused
from sparing.errors import RunError
from sparing.jobs.subjects.nets import ResNet as PaddedResNet
from sparing.seeds import stream
from sparing.valley.aligning import align as verb
from sparing.valley.aligning.align import _call, align
from sparing.valley.aligning.axes import leaves
from sparing.valley.aligning.matching import WeightFit, ascend, assignment
from sparing.valley.aligning.symmetry import symmetry_of
from sparing.valley.merging.merge import merge
from valley import architectures

IMAGES = torch.randn(3, 3, 8, 8, generator=stream(0, "test-align", "images"), dtype=torch.float64)


class Separable(nn.Module):
    """Depthwise and grouped convolutions, group norm, and a gate for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.depth, self.mix = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 1, groups=2)
        self.gate, self.head = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        x = self.mix(self.depth(self.norm(self.first(x)).relu_()).relu())
        x = x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]
        return self.head(x.flatten(2).amax(2))


class Dense(nn.Module):
    """Channels side by side, cut and joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(5, 4), nn.Linear(10, 6)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        both = torch.cat([self.a(x).relu(), self.b(x).relu()], -1)
        left, right = self.c(both).chunk(2, -1)
        return self.head(torch.nn.functional.silu(left) * right)


def grouped() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, activation="gelu")


def words(model) -> dict[str, object]:
    return {"input_ids": zoo.tokens(vocab=64)["input_ids"], "use_cache": False}


ROWS = torch.randn(6, 8, generator=stream(0, "test-align", "rows"), dtype=torch.float64)
# net, its inputs, and the sizes of its groups: counted by hand
NETS = {
    "mlp": (architectures.mlp, lambda _: ROWS, [16, 16]),
    "vgg": (architectures.vgg, lambda _: IMAGES, [4, 6, 8, 12]),
    # the stem, and of each of six blocks the inside and the stream, which every block projects anew
    "resnet": (architectures.resnet, lambda _: IMAGES, [*[4] * 5, *[6] * 4, *[8] * 4]),
    # one stream, lengthened by zeros: 8, then 8 more, then 16 more
    "padded resnet": (lambda: PaddedResNet(3), lambda _: IMAGES, [8, 8, 16, 8, 32, 16]),
    # two groups of 4 in which each order is alike; two outputs groups of 6 likewise
    "separable": (Separable, lambda _: IMAGES, [2, 4, 6]),
    "dense": (Dense, lambda _: ROWS[:, :5], [6, 4, 3]),
    # the stream, heads, channels of a head, hidden units; query, key and value are one matrix
    "encoder": (encoder, lambda _: ROWS.reshape(1, 3, 16), [4, 4, 24]),
    # the stream, then of each block: heads, channels of values (rotations keep queries' in place), hidden units
    "llama": (lambda: zoo.llama(2, tied=True), words, [16, *[2, 8, 32] * 2]),
    # queries share the heads of keys by twos: heads of keys, queries of each, channels of values
    "grouped llama": (grouped, words, [16, *[2, 2, 4, 32] * 2]),
    "gpt2": (lambda: zoo.gpt2(2), words, [16, *[2, 8, 8, 64] * 2]),
}


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, object]:
    build, inputs, _ = NETS[name]
    model = zoo.redraw_(build(), std=0.3).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # scales and shifts with which every unit answers some rows
            if parameter.ndim == 1 and isinstance(inputs(model), torch.Tensor):
                parameter.abs_().add_(0.5)
        for at, (key, value) in enumerate(model.named_buffers()):
            if key.endswith(("running_mean", "running_var")):
                value.copy_(0.5 + torch.rand(value.shape, generator=stream(at, "test-align", "statistics")))
    given = inputs(model)
    return model, given.to(dtype) if isinstance(given, torch.Tensor) else given


def shuffled(model: nn.Module, given: object, seed: int = 0):
    """Its symmetry, drawn orders of all groups, and the state that they give."""
    symmetry = symmetry_of(model, *_call(given))
    orders = {
        leaf: torch.randperm(leaf.size, generator=stream(at, "test-align", "orders", seed))
        for at, leaf in enumerate(symmetry.groups)
    }
    return symmetry, orders, symmetry.reordered(model.state_dict(), orders)


@torch.no_grad()
def answer(model, state, given):
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    args, kwargs = _call(given)
    found = other(*args, **kwargs)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("name", NETS)
def test_the_reordered_net_computes_the_same(name):
    """To 1e-10 in float64, where only the order of sums differs."""
    model, given = made(name)
    symmetry, _, state = shuffled(model, given)
    before, after = answer(model, model.state_dict(), given), answer(model, state, given)
    # the norms of a Llama compute in float32 whatever the model is in
    limit = 1e-5 if "llama" in name else 1e-10
    torch.testing.assert_close(after, before, rtol=limit, atol=limit)
    expected = NETS[name][2]
    if expected is not None:
        assert sorted(leaf.size for leaf in symmetry.groups) == sorted(expected)
    assert any(not torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["vgg", "padded resnet", "encoder"])
def test_in_float32_to_a_hundred_thousandth(name):
    model, given = made(name, torch.float32)
    _, _, state = shuffled(model, given)
    before, after = answer(model, model.state_dict(), given), answer(model, state, given)
    assert float((after - before).abs().max()) <= 1e-5 * float(before.abs().max())


@pytest.mark.parametrize("name", NETS)
def test_a_hidden_order_is_found_to_the_bit(name):
    model, given = made(name)
    _, _, state = shuffled(model, given)
    found = align(model, state, [given])
    assert all(torch.equal(found.state[key], value) for key, value in model.state_dict().items())
    assert found.after >= found.before
    assert found.difference <= (1e-5 if "llama" in name else 1e-10)


@pytest.mark.parametrize("name", ["mlp", "vgg", "padded resnet", "encoder"])
def test_answers_find_it_too(name):
    model, given = made(name)
    if isinstance(given, torch.Tensor):  # rows enough for every unit to answer some of them
        given = torch.randn(64, *given.shape[1:], generator=stream(0, "test-align", "many"), dtype=given.dtype)
    _, _, state = shuffled(model, given)
    found = align(model, state, [given], by="activations")
    assert all(torch.equal(found.state[key], value) for key, value in model.state_dict().items())


class Scaled(nn.Module):
    """A number that its forward writes out, and a buffer that no state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("shift", torch.tensor(0.1), persistent=False)

    def forward(self, x):
        return self.b((self.a(x) * torch.tensor(0.5, dtype=x.dtype) + self.shift).relu())


@pytest.mark.parametrize("build", [Scaled, lambda: zoo.llama(2, tied=True)], ids=["scaled", "llama"])
def test_answers_are_found_with_what_no_state_holds(build):
    """Constants, and buffers such as the frequencies of rotary positions."""
    model = zoo.redraw_(build(), std=0.3).double().eval()
    given = torch.randn(64, 8, generator=stream(0, "test-align", "many"), dtype=torch.float64)
    given = given if isinstance(model, Scaled) else words(model)
    _, _, state = shuffled(model, given)
    found = align(model, state, [given], by="activations")
    assert found.after > found.before
    assert all(torch.equal(found.state[key], value) for key, value in model.state_dict().items())


def test_the_order_is_the_best_of_all():
    """One hidden layer: the assignment is exact, so no order of five units fits better."""
    nets = [zoo.redraw_(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double(), seed) for seed in (1, 2)]
    first, second = (net.state_dict() for net in nets)

    def fit(order):
        i = torch.tensor(order)
        moved = {**second, "0.weight": second["0.weight"][i], "0.bias": second["0.bias"][i]}
        moved["2.weight"] = second["2.weight"][:, i]
        return sum(float((first[key] * moved[key]).sum()) for key in first)

    best = max(itertools.permutations(range(5)), key=fit)
    found = align(nets[0], nets[1], [ROWS[:, :3]])
    assert found.orders["0.weight"].tolist() == list(best)
    assert found.after == pytest.approx(fit(best), rel=1e-12)
    assert found.before == pytest.approx(fit(range(5)), rel=1e-12)


def test_the_fit_of_a_middle_layer_by_hand():
    """W¹ᵀ of the layer before, already ordered, and W² of the layer after: Ainsworth et al., Equation 5."""
    nets = [zoo.redraw_(architectures.mlp(5), seed).double() for seed in (1, 2)]
    a, b = (net.state_dict() for net in nets)
    symmetry = symmetry_of(nets[0], (ROWS,))
    before, after = symmetry.groups
    order = torch.randperm(5, generator=stream(0, "test-align", "by hand"))
    expected = a["b.weight"] @ b["b.weight"][:, order].T + torch.outer(a["b.bias"], b["b.bias"])
    expected += a["c.weight"].T @ b["c.weight"]
    torch.testing.assert_close(WeightFit(a, b, symmetry.tensors)(after, {before: order}), expected, rtol=1e-12, atol=0)


def test_correlations_are_numpys():
    import numpy as np

    from sparing.valley.aligning.activations import ActivationFit

    nets = [zoo.redraw_(architectures.mlp(5), seed, std=0.3).double() for seed in (1, 2)]
    symmetry = symmetry_of(nets[0], (ROWS,))
    fit = ActivationFit(symmetry, *(net.state_dict() for net in nets), [[ROWS], [ROWS + 1]])
    both = torch.cat([ROWS, ROWS + 1])
    x, y = (net[:2](both).detach().numpy() for net in nets)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = np.nan_to_num(np.corrcoef(x.T, y.T)[:5, 5:])
    found = fit(symmetry.groups[0], {}).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_an_average_of_a_net_and_its_reordered_self_is_that_net():
    model, given = made("vgg")
    _, _, state = shuffled(model, given)
    plain = answer(model, merge([model.state_dict(), state]), given)
    aligned = answer(model, merge([model.state_dict(), align(model, state, [given]).state]), given)
    truth = answer(model, model.state_dict(), given)
    torch.testing.assert_close(aligned, truth, rtol=1e-12, atol=1e-12)
    assert float((plain - truth).abs().max()) > 1e-3


def test_every_step_is_a_gain_and_no_group_is_left_that_could_gain():
    nets = [zoo.redraw_(architectures.resnet(), seed).double().eval() for seed in (1, 2)]
    symmetry = symmetry_of(nets[0], (IMAGES,))
    states = [{n: p.detach() for n, p in net.named_parameters()} for net in nets]
    fit, values = WeightFit(*states, symmetry.tensors), []

    def worth(orders):
        values.append(fit.worth(orders))
        return values[-1]

    orders = ascend(symmetry.groups, fit, {}, worth, seed=0)
    assert fit.worth(orders) == max(values) > values[0]
    for group in symmetry.groups:
        better = {**orders, group: assignment(fit(group, orders))}
        assert fit.worth(better) <= fit.worth(orders) + 1e-6


def test_the_model_and_what_is_aligned_are_left_as_they_are():
    model, given = made("vgg")
    _, _, state = shuffled(model, given)
    before = [{key: value.clone() for key, value in one.items()} for one in (model.state_dict(), state)]
    model.train()
    align(model, state, [given])
    assert model.training
    for one, kept in zip((model.state_dict(), state), before, strict=True):
        assert all(torch.equal(one[key], value) for key, value in kept.items())


def test_what_no_unit_reaches_is_pinned():
    """Inputs, outputs and the words of a vocabulary keep their order."""
    symmetry = symmetry_of(zoo.gpt2(), *_call(words(None)))
    assert leaves(symmetry.tensors["lm_head.weight"][0]) == []
    assert leaves(symmetry.tensors["lm_head.weight"][1]) == leaves(symmetry.tensors["transformer.wpe.weight"][1])
    assert leaves(symmetry_of(architectures.mlp(), (ROWS.float(),)).tensors["c.weight"][0]) == []


class RunningSum(nn.Module):
    def forward(self, x):
        return x.cumsum(-1)


def summing() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), RunningSum(), nn.Linear(6, 2))


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(self.a(x)) if bool(x.sum() > 0) else x[:, :2]


def test_refusals():
    model = architectures.mlp()
    refused("by: got 'magic'", align, model, model, [ROWS.float()], by="magic")
    refused("batches: got none", align, model, model, [])
    refused(r"'a\.weight': got shape", align, model, architectures.mlp(12), [ROWS.float()])
    refused("the operator cumsum in '1'; what it asks", align, summing(), summing(), [torch.zeros(3, 4)])
    refused("forward pass cannot be recorded", align, Asking(), Asking(), [ROWS.float()])
    refused("none of its units", align, nn.Linear(8, 3), nn.Linear(8, 3), [ROWS.float()])


def test_a_net_that_would_answer_differently_is_not_returned(monkeypatch):
    """A rule that is wrong is caught by the comparison of answers, whatever the matching thought of it."""
    model, given = made("mlp")
    _, _, state = shuffled(model, given)
    original = verb.symmetry_of

    def broken(*given):
        symmetry = original(*given)
        axes = {name: axes for name, axes in symmetry.tensors.items() if name != "b.bias"}
        return dataclasses.replace(symmetry, tensors=axes)

    monkeypatch.setattr(verb, "symmetry_of", broken)
    with pytest.raises(RunError, match="answers differently"):
        align(model, state, [given])
