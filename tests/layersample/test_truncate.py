"""The backward pass really ends at the lowest active block, and nothing else changes."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import zoo
from lisa_loop import AdamW, setup
from sparing.layersample import Fixed, LayerSampling, Sampler
from sparing.layersample.truncate import Prefix


def frozen_embedding(*blocks: int, **changes) -> LayerSampling:
    return LayerSampling(embed=False, active=len(blocks), period=1, sampler=Fixed(blocks=blocks), **changes)


def graph_size(loss: torch.Tensor) -> int:
    """Nodes of the autograd graph that can be reached from a loss (count)."""
    seen, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(parent for parent, _ in node.next_functions)
    return len(seen)


def outputs_with_a_graph(model: nn.Module) -> list[bool]:
    """For each layer, whether its output requires a gradient in one forward pass."""
    flags: list[bool] = []
    handles = [
        layer.register_forward_hook(lambda m, i, o: flags.append(o.requires_grad)) for layer in model.model.layers
    ]
    model(**zoo.tokens()).loss.detach()
    for handle in handles:
        handle.remove()
    return flags


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**zoo.tokens()).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("lowest", range(4))
def test_the_graph_begins_at_the_lowest_active_block(lowest: int) -> None:
    model, _, sampler = setup(frozen_embedding(lowest))
    sampler.begin_step(0)
    assert outputs_with_a_graph(model) == [index >= lowest for index in range(4)]


def test_the_graph_shrinks_by_a_block_for_every_block() -> None:
    sizes = []
    for lowest in range(4):
        model, _, sampler = setup(frozen_embedding(lowest))
        sampler.begin_step(0)
        sizes.append(graph_size(model(**zoo.tokens()).loss))
    steps = [low - high for low, high in pairwise(sizes)]
    assert steps[0] > 10
    assert len(set(steps)) == 1


def test_with_no_block_drawn_only_the_head_has_a_graph() -> None:
    model, _, sampler = setup(LayerSampling(embed=False, active=0, period=1))
    sampler.begin_step(0)
    assert outputs_with_a_graph(model) == [False] * 4


def test_a_trained_embedding_keeps_the_whole_graph() -> None:
    model, _, sampler = setup(LayerSampling(active=1, period=1, sampler=Fixed(blocks=(3,))))
    sampler.begin_step(0)
    assert outputs_with_a_graph(model) == [True] * 4


def test_gradients_are_those_of_the_full_backward_pass() -> None:
    model, _, sampler = setup(frozen_embedding(1, 3))
    sampler.begin_step(0)
    plain = zoo.llama()
    plain.load_state_dict(model.state_dict())
    full = gradients(plain)
    assert_same(gradients(model), {name: full[name] for name in sampler.trainable})


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("embed", [False, True])
def test_checkpointing_changes_no_gradient(embed: bool, reentrant: bool) -> None:
    settings = LayerSampling(embed=embed, active=2, period=1, sampler=Fixed(blocks=(1, 2)))
    plain, _, without = setup(settings)
    model, _, sampler = setup(settings)
    model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
    without.begin_step(0)
    sampler.begin_step(0)
    assert set(gradients(model)) == set(sampler.trainable)
    assert_same(gradients(model), gradients(plain.train()))


@pytest.mark.parametrize("before", [True, False])
def test_transformers_input_hook_is_off_while_the_embedding_is_frozen(before: bool) -> None:
    """Whether checkpointing was switched on before the sampler came or after."""
    model = zoo.llama().train()
    optimizer = AdamW(model.parameters())
    if before:
        model.activation_checkpointing_enable()
    sampler = Sampler(model, optimizer, frozen_embedding(2))
    if not before:
        model.activation_checkpointing_enable()
    sampler.begin_step(0)
    assert outputs_with_a_graph(model) == [False, False, True, True]
    sampler.close()
    model.model.embed_tokens.requires_grad_(False)
    assert outputs_with_a_graph(model)[0]
    assert model(**zoo.tokens()).logits.requires_grad
    assert model.get_input_embeddings()(torch.tensor([1])).requires_grad


def test_blocks_below_are_not_checkpointed_and_get_their_flag_back() -> None:
    model = zoo.llama().train()
    model.activation_checkpointing_enable()
    sampler = Sampler(model, AdamW(model.parameters()), frozen_embedding(2))
    sampler.begin_step(0)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [False, False, True, True]
    sampler.close()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_reentrant_checkpointing_warns_of_nothing() -> None:
    """Below the border torch would say that no input requires a gradient, and at the border it would be right."""
    model, _, sampler = setup(frozen_embedding(2))
    model.train().activation_checkpointing_enable({"use_reentrant": True})
    sampler.begin_step(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(gradients(model)) == set(sampler.trainable)


def test_prompts_that_are_learned_keep_their_gradient() -> None:
    """Whatever enters a block with a gradient gets it: the sampler never cuts a graph that somebody else began."""
    model, _, sampler = setup(frozen_embedding(3))
    sampler.begin_step(0)
    prompt = torch.randn(1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    model(inputs_embeds=prompt, labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    assert prompt.grad is not None
    assert prompt.grad.norm() > 0


def test_the_setting_switches_it_off() -> None:
    model, _, sampler = setup(frozen_embedding(2, no_grad_prefix=False))
    model.train().activation_checkpointing_enable()
    sampler.begin_step(0)
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)
    assert all(outputs_with_a_graph(model))


def test_forwards_are_given_back_as_found() -> None:
    model = zoo.llama()
    theirs = model.model.layers[0].forward
    model.model.layers[0].forward = theirs
    sampler = Sampler(model, AdamW(model.parameters()), frozen_embedding(3))
    sampler.begin_step(0)
    assert model.model.layers[0].forward is not theirs
    sampler.close()
    assert model.model.layers[0].__dict__["forward"] is theirs
    assert "forward" not in model.model.layers[1].__dict__


def test_a_forward_wrapped_after_us_keeps_working_when_its_block_wakes() -> None:
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    prefix = Prefix(nn.Sequential(*blocks), blocks)
    prefix.set_(1)
    ours = blocks[0].forward
    blocks[0].forward = lambda x: ours(x)
    prefix.set_(0)
    assert blocks[0](torch.ones(1, 2)).requires_grad


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    model, _, sampler = setup(frozen_embedding(3))
    sampler.begin_step(0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.zero_()
    batch = zoo.tokens()
    assert not torch.equal(twin(**batch).logits, model(**batch).logits)
