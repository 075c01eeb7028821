"""What the samplers are told about gradients is what the gradients were."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import zoo
from lisa_loop import AdamW, copy_of, setup, train
from sparing.errors import UserError
from sparing.layersample import Adaptive, CostAware, Fixed, LayerSampling, Sampler, Uniform
from sparing.layersample.probes import BoundProbe, GradientProbe, probe_for, updated


def maps(count: int = 3) -> nn.Sequential:
    return zoo.redraw_(nn.Sequential(*(nn.Linear(5, 5) for _ in range(count))).double(), std=0.5)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradient_norms_are_means_over_steps_of_root_mean_squares() -> None:
    model = maps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = GradientProbe(optimizer, [dict(layer.named_parameters()) for layer in model])
    model[1].requires_grad_(False)
    expected = torch.zeros(3, dtype=torch.float64)
    for seed in range(4):
        for half in rows(seed):  # two backward passes make one step
            model(half).square().sum().backward()
        norms = [sum(float(p.grad.square().sum()) for p in layer.parameters() if p.grad is not None) for layer in model]
        expected += torch.tensor([math.sqrt(n / 30) for n in norms], dtype=torch.float64) / 4
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step()
    seen = probe.mean.take()
    assert seen[1].isnan()
    torch.testing.assert_close(seen[[0, 2]], expected[[0, 2]], rtol=1e-12, atol=0)  # rounding of float64 sums
    assert probe.mean.take().isnan().all()


def test_the_bound_is_that_of_its_formula_and_above_the_gradient() -> None:
    model = maps(2)
    probe = BoundProbe(list(model))
    model[0].requires_grad_(False)  # a frozen block is seen too: what enters it needs a gradient
    x = rows(0).requires_grad_()
    hidden = model[0](x)
    hidden.retain_grad()
    out = model[1](hidden)
    out.retain_grad()
    out.square().sum().backward()
    probe.end_step()
    pairs = [(x, hidden.grad), (hidden, out.grad)]
    expected = [(inputs.norm(dim=-1) * delta.norm(dim=-1)).sum() for inputs, delta in pairs]
    seen = probe.mean.take()
    torch.testing.assert_close(seen, torch.stack(expected) / 5, rtol=1e-12, atol=0)  # √25 elements each
    assert seen[1] >= model[1].weight.grad.norm() / 5


def test_the_bound_adds_up_over_the_backward_passes_of_a_step() -> None:
    model = maps(1)
    once, twice = BoundProbe(list(model)), BoundProbe(list(model))
    for _ in range(2):
        model(rows(0)).sum().backward()
    twice.end_step()
    doubled = twice.mean.take()
    once.close()
    single = BoundProbe(list(model))
    model(rows(0)).sum().backward()
    single.end_step()
    torch.testing.assert_close(doubled, 2 * single.mean.take())


def test_the_bound_holds_inside_a_real_model_for_frozen_maps_too() -> None:
    """The bound of frozen blocks against the gradients that they have when thawed."""
    model = zoo.llama(layers=2)
    model(**zoo.tokens()).loss.backward()
    maps = [[m for m in layer.modules() if isinstance(m, nn.Linear)] for layer in model.model.layers]
    squares = torch.tensor([[sum(float(m.weight.grad.square().sum()) for m in linears)] for linears in maps]).double()
    sizes = torch.tensor([[sum(m.weight.numel() for m in linears)] for linears in maps])
    model.model.layers.requires_grad_(False)
    probe = BoundProbe(list(model.model.layers))
    model(**zoo.tokens()).loss.backward()  # the embedding trains, so δ still reaches every block
    probe.end_step()
    assert (probe.mean.take() >= (squares / sizes).sqrt().flatten()).all()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_does_not_count_twice(reentrant: bool) -> None:
    seen = []
    for checkpointed in (False, True):
        model = zoo.llama().train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        probe = BoundProbe(list(model.model.layers))
        model(**zoo.tokens()).loss.backward()
        probe.end_step()
        seen.append(probe.mean.take())
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-12, atol=0)  # the order of sums may differ


def test_gpt2s_transposed_maps_are_seen() -> None:
    model = zoo.gpt2()
    probe = BoundProbe(list(model.transformer.h))
    model(**zoo.tokens()).loss.backward()
    probe.end_step()
    assert (probe.mean.take() > 0).all()


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_maps_at_rest_are_seen(form: str) -> None:
    """Of GPT-2, whose maps are no Linear."""
    settings = LayerSampling(active=1, period=1, sampler=Adaptive(signal="bound"), frozen=form)
    model, optimizer, sampler = setup(settings, make=zoo.gpt2, dtype=torch.float32)
    train(model, optimizer, sampler, steps=range(2))
    assert (sampler.scores > 0).all()


def test_closed_probes_see_nothing() -> None:
    model = maps(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = [BoundProbe(list(model)), GradientProbe(optimizer, [dict(model[0].named_parameters())])]
    for probe in probes:
        probe.close()
    model(rows(0)).sum().backward()
    optimizer.step()
    for probe in probes:
        probe.end_step()
        assert probe.mean.take().isnan().all()


def test_the_probe_is_the_one_that_the_sampler_asks_for() -> None:
    model = maps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = [dict(layer.named_parameters()) for layer in model]
    kinds = {
        Uniform(): type(None),
        Adaptive(): GradientProbe,
        Adaptive(signal="bound"): BoundProbe,
        CostAware(): GradientProbe,
    }
    for draw, kind in kinds.items():
        assert type(probe_for(draw, optimizer, params, list(model))) is kind


@pytest.mark.parametrize("signal", ["gradient", "bound"])
def test_scores_reach_the_draw(signal: str) -> None:
    """A greedy sampler, told of a block whose gradients are a thousand times those of the others, stays with it."""
    model = zoo.llama()
    with torch.no_grad():
        for p in model.model.layers[2].parameters():
            p.mul_(1e-3 if p.ndim > 1 else 1.0)
    optimizer = AdamW(model.parameters(), lr=0.0)
    settings = LayerSampling(active=1, period=1, sampler=Adaptive(temperature=0.01, floor=0.0, signal=signal))
    sampler = Sampler(model, optimizer, settings)
    train(model, optimizer, sampler, steps=range(12))
    assert sampler.scores is not None
    largest = int(sampler.scores.nan_to_num(0.0).argmax())
    assert {drawn for _, _, drawn in sampler.history[-4:]} == {(largest,)}
    assert int(sampler.scores.isnan().sum()) == 0


def test_scores_are_gradient_norms_of_the_interval() -> None:
    """One block, one step per interval, no decay: the score is the norm that the loop sees."""
    model, optimizer, sampler = setup(LayerSampling(active=4, period=1, sampler=Adaptive(decay=0.0)))
    sampler.begin_step(0)
    model(**zoo.tokens()).loss.backward()
    squares = sum(float(p.grad.square().sum()) for p in model.model.layers[1].parameters())
    size = sum(p.numel() for p in model.model.layers[1].parameters())
    optimizer.step()
    optimizer.zero_grad()
    sampler.begin_step(1)
    assert float(sampler.scores[1]) == pytest.approx(math.sqrt(squares / size), rel=1e-12)


@pytest.mark.parametrize("stop", [3, 4, 5])
@pytest.mark.parametrize("signal", ["gradient", "bound"])
def test_scores_resume_inside_an_interval(signal: str, stop: int) -> None:
    settings = LayerSampling(active=1, period=2, sampler=Adaptive(temperature=0.1, signal=signal))
    model, optimizer, sampler = setup(settings)
    train(model, optimizer, sampler, steps=range(stop))
    again, fresh, other = setup(settings)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(sampler.state_dict(optimizer=True))
    for run in ((model, optimizer, sampler), (again, fresh, other)):
        train(*run, steps=range(stop, 12))
    assert sampler.history == other.history
    assert all(torch.equal(p, copy_of(again)[name]) for name, p in copy_of(model).items())


@pytest.mark.parametrize("signal", ["gradient", "bound"])
def test_a_step_that_overflows_leaves_scores_as_they_are(signal: str) -> None:
    """As the first under a gradient scaler do; a fused optimizer is called for them too, and skips them itself."""
    model, optimizer, sampler = setup(LayerSampling(active=4, period=2, sampler=Adaptive(decay=0.0, signal=signal)))
    train(model, optimizer, sampler, steps=range(1))
    before = sampler.state_dict()["probe"]
    assert before["steps"] == [1.0] * 4
    for step in (1, 2):  # of the interval's other step, and of the whole next interval
        sampler.begin_step(step)
        (model(**zoo.tokens()).loss * 1e300).backward()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            assert sampler.state_dict()["probe"] == before
    scores = sampler.scores.tolist()
    assert scores == [total / steps for total, steps in zip(before["sums"], before["steps"], strict=True)]
    sampler.begin_step(4)
    assert sampler.scores.tolist() == scores


def test_a_sampler_without_scores_has_none() -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=1, sampler=Fixed()))
    train(model, optimizer, sampler, steps=range(3))
    assert sampler.scores is None
    assert sampler.state_dict()["scores"] is None


def test_running_scores_follow_the_closed_form() -> None:
    """With a constant observation o from s: s·β^n + o·(1 − β^n)."""
    scores = torch.tensor([3.0, 1.0], dtype=torch.float64)
    seen = torch.tensor([5.0, 1.0], dtype=torch.float64)
    for _ in range(7):
        scores = updated(scores, seen, 0.8)
    assert scores.tolist() == pytest.approx([3.0 * 0.8**7 + 5.0 * (1 - 0.8**7), 1.0])


def test_only_visited_blocks_move_and_a_first_look_counts_whole() -> None:
    after = updated(torch.tensor([1.0, 2.0, torch.nan, torch.nan]), torch.tensor([3.0, torch.nan, 4.0, torch.nan]), 0.5)
    torch.testing.assert_close(after, torch.tensor([2.0, 2.0, 4.0, torch.nan]), equal_nan=True)
    first = torch.tensor([torch.nan, 2.0])
    torch.testing.assert_close(updated(None, first, 0.9), first, equal_nan=True)


def test_a_decay_of_zero_forgets_and_a_decay_of_one_is_refused() -> None:
    assert updated(torch.tensor([1.0]), torch.tensor([2.0]), 0.0).tolist() == [2.0]
    for decay in (1.0, -0.1, math.nan):
        with pytest.raises(UserError, match="decay"):
            updated(None, torch.ones(1), decay)
