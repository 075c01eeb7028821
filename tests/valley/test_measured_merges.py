"""Fisher and RegMean averages against least squares and squared gradients written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import zoo
from refusals import refused
from sparing.seeds import stream
from sparing.valley.merging import method as slices
from sparing.valley.merging.fisher import Fisher, squared_gradients
from sparing.valley.merging.merge import merge
from sparing.valley.merging.method import slices_of
from sparing.valley.merging.regmean import RegMean, input_grams, linear_weights, passes


def drawn(label: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(0, "test-measured", label), dtype=torch.float64)


def net(label: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 3)).double()
    for name, parameter in model.named_parameters():
        parameter.data = drawn(f"{label} {name}", *parameter.shape)
    return model


MODELS = [net(label) for label in "abc"]
ROWS, LABELS = drawn("rows", 40, 5), torch.arange(40) % 3


@pytest.fixture(params=[4, 1 << 15], ids=["slices of 4", "whole"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", request.param)


def loss(model: nn.Module, at: int) -> Tensor:
    return nn.functional.cross_entropy(model(ROWS[at : at + 1]), LABELS[at : at + 1])


@pytest.mark.usefixtures("cut")
def test_fisher_is_the_mean_weighted_by_squared_gradients_of_rows():
    """Per-row gradients by torch.func, all at once; and the weighted mean by hand."""

    def squares(model: nn.Module) -> dict[str, Tensor]:
        def one(parameters, row, label):
            return nn.functional.cross_entropy(functional_call(model, parameters, (row[None],)), label[None])

        state = dict(model.named_parameters())
        return {
            name: rows.square().mean(0) for name, rows in vmap(grad(one), (None, 0, 0))(state, ROWS, LABELS).items()
        }

    weights = (1.0, 2.0, 0.5)
    found = merge(MODELS, method=Fisher.of(MODELS, range(40), loss, weights))
    fishers = [squares(model) for model in MODELS]
    for name, value in found.items():
        shares = torch.stack([w * one[name] for w, one in zip(weights, fishers, strict=True)])
        states = torch.stack([model.state_dict()[name] for model in MODELS])
        torch.testing.assert_close(value, (shares * states).sum(0) / shares.sum(0), rtol=1e-10, atol=1e-12)


def test_fisher_neither_draws_masks_nor_touches_running_statistics():
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double().train()
    rows = drawn("rows", 5, 4)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    one = lambda model, at: nn.functional.cross_entropy(model(rows[at : at + 1]), LABELS[at : at + 1])  # noqa: E731
    first, again = (squared_gradients(made, range(5), one) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())
    assert made.training


def test_without_information_fisher_is_the_mean_and_frozen_weights_stay_frozen():
    """A ReLU that no row opens has none; a mapping of slices, as on disk, is read like tensors."""
    states = [{"w": drawn("a", 6)}, {"w": drawn("b", 6)}]
    some = torch.tensor([0.0, 0, 0, 1, 2, 3]).double()
    found = merge(states, method=Fisher([{"w": slices_of(some)}, {"w": some}]))["w"]
    torch.testing.assert_close(found, (states[0]["w"] + states[1]["w"]) / 2)
    model = net("a")
    model[0].weight.requires_grad_(False)
    assert squared_gradients(model, range(3), loss)["0.weight"].abs().sum() > 0
    assert [one.requires_grad for one in model.parameters()] == [False, *[True] * 5]
    assert all(one.grad is None for one in model.parameters())
    refused("squared gradients are a mean over rows", squared_gradients, model, [], loss)
    refused("information: got 1; each model has its own", merge, states, method=Fisher([{"w": some}]))
    refused("of the shape of the weights", merge, states, method=Fisher([{"w": some[:2]}] * 2))


def test_rows_that_measure_nothing_finite_are_refused():
    """A row labelled −100 alone has a mean loss of 0/0, an infinite input infinite products."""

    def unlabelled(model: nn.Module, at: int) -> Tensor:
        return nn.functional.cross_entropy(model(ROWS[at : at + 1]), torch.tensor([-100 if at == 2 else 1]))

    refused("loss of row 2: got nan", Fisher.of, MODELS, range(4), unlabelled)
    bad = [{"w": torch.tensor([1.0, float("nan")])}, {"w": torch.ones(2)}]
    refused("information at 'w': got what is not finite", merge, [{"w": torch.ones(2)}] * 2, method=Fisher(bad))
    found = RegMean.of(MODELS, [torch.full((3, 5), torch.inf).double()], lambda model, rows: model(rows))
    refused("grams at '0.weight': got what is not finite", merge, MODELS, method=found)


@pytest.mark.usefixtures("cut")
def test_regmean_is_least_squares_on_the_inputs_of_each_model():
    """torch.linalg.lstsq on the stacked inputs of all models, and the answers that each gave to its own."""
    found = merge(MODELS, method=RegMean.of(MODELS, ROWS.split(16), lambda model, rows: model(rows), shrink=1.0))
    for at in (0, 3):
        inputs = [model[:at](ROWS) for model in MODELS]
        answers = [x @ model[at].weight.T for x, model in zip(inputs, MODELS, strict=True)]
        wanted = torch.linalg.lstsq(torch.cat(inputs), torch.cat(answers)).solution.T
        torch.testing.assert_close(found[f"{at}.weight"], wanted, rtol=1e-8, atol=1e-10)
        bias = torch.stack([model[at].bias for model in MODELS]).mean(0)
        torch.testing.assert_close(found[f"{at}.bias"], bias)


@pytest.mark.parametrize("shrink", [0.9, 0.0])
def test_regmean_shrinks_what_lies_off_the_diagonal(shrink):
    """The paper's formula; and inputs that are always zero leave the mean."""
    dead = ROWS.clone()
    dead[:, 2] = 0
    method = RegMean.of(MODELS, [dead], lambda model, rows: model(rows), shrink=shrink)
    found = merge(MODELS, method=method)["0.weight"]
    live = [0, 1, 3, 4]
    gram = dead[:, live].T @ dead[:, live] / len(dead)
    gram = torch.where(torch.eye(4, dtype=torch.bool), gram, shrink * gram)
    every = torch.stack([model[0].weight.detach() for model in MODELS])
    wanted = sum(one[:, live] @ gram for one in every) @ (3 * gram).inverse()
    torch.testing.assert_close(found[:, live], wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[:, 2], every.mean(0)[:, 2])


def test_gpt2_stores_inputs_first_and_a_tied_head_is_averaged():
    models = [zoo.redraw_(zoo.gpt2(layers=1, width=8, vocab=11), seed=seed) for seed in (1, 2)]
    batch = zoo.tokens(batch=8, length=8, vocab=11)["input_ids"]
    names = linear_weights(models[0])
    assert sorted(name.split(".", 3)[-1] for name in names) == [
        "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"
    ]  # fmt: skip
    method = RegMean.of(models, [batch], lambda model, ids: model(input_ids=ids), shrink=1.0)
    assert set(method.inputs_first) == set(names)
    found = merge([model.state_dict() for model in models], method=method)
    name, stored = "transformer.h.0.mlp.c_proj.weight", []
    for model in models:
        hook = model.transformer.h[0].mlp.c_proj.register_forward_pre_hook(
            lambda module, args: stored.append(args[0].detach().flatten(0, 1))
        )
        model(input_ids=batch)
        hook.remove()
    answers = [x @ model.state_dict()[name] for x, model in zip(stored, models, strict=True)]
    wanted = torch.linalg.lstsq(torch.cat(stored), torch.cat(answers)).solution
    torch.testing.assert_close(found[name], wanted, rtol=1e-6, atol=1e-9)  # 32 inputs, condition about 1e4
    heads = [model.state_dict()["lm_head.weight"] for model in models]
    torch.testing.assert_close(found["lm_head.weight"], (heads[0] + heads[1]) / 2)


def test_matrices_are_gathered_in_as_many_passes_as_memory_needs():
    model = MODELS[0].train()
    layers = linear_weights(model)
    groups = passes(layers, 4 * 25)
    assert [list(group) for group in groups] == [["0.weight"], ["3.weight"]]
    assert [list(group) for group in passes(layers, 4 * (25 + 49))] == [["0.weight", "3.weight"]]
    at_once = input_grams(model, layers, lambda model: model(ROWS))
    apart = {name: gram for group in groups for name, gram in input_grams(model, group, lambda m: m(ROWS)).items()}
    assert all(apart[name].equal(gram) for name, gram in at_once.items())
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    refused("grams at '0.weight'", merge, MODELS[:1], method=RegMean([{"0.weight": torch.eye(4)}]))
    refused("shrink: got 1.5", RegMean, [], shrink=1.5)
