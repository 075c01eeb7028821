"""The eighteen claims that layer sampling must keep, by number; details are in the test files of the parts."""

from __future__ import annotations

import math

import pytest
import torch

import lisa_ranks
import zoo
from lisa_loop import AdamW, assert_same, assert_same_state, block_of, copy_of, moved, setup, state_bytes, train
from sparing.errors import UserError
from sparing.layersample import Adaptive, Fixed, LayerSampling, Reshuffle, Sampler, Uniform
from sparing.layersample.state import read_state, write_state


def test_01_frozen_weights_are_bit_identical_over_an_interval_and_active_ones_change() -> None:
    model, optimizer, sampler = setup(LayerSampling(active=2, period=3))
    for interval in range(4):
        before = copy_of(model)
        train(model, optimizer, sampler, steps=range(3 * interval, 3 * interval + 3))
        assert moved(before, model) == set(sampler.trainable)


@pytest.mark.parametrize("state", ["reset", "keep", "offload"])
def test_02_all_blocks_active_is_full_fine_tuning(state: str) -> None:
    sampled, full = setup(LayerSampling(active=4, period=2, state=state)), zoo.llama()
    reference = AdamW(full.parameters())
    train(*sampled)
    train(full, reference)
    assert_same(copy_of(sampled[0]), copy_of(full))
    assert_same_state(sampled[1], reference)


@pytest.mark.parametrize("state", ["reset", "offload"])
def test_03_state_is_that_of_what_trains_and_its_bytes_are_constant_over_fifty_rounds(state: str) -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=1, state=state, sampler=Reshuffle()), layers=3)
    sizes = set()
    for step in range(50):
        train(model, optimizer, sampler, steps=[step])
        assert set(optimizer.state) == set(sampler.trainable.values())
        sizes.add(state_bytes(optimizer))
    assert len(sizes) == 1


def test_04_gradients_are_none_outside_the_active_set() -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=1, sampler=Reshuffle()))
    for step in range(6):
        sampler.begin_step(step)
        model(**zoo.tokens(seed=step)).loss.backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == set(sampler.trainable)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("state", ["reset", "keep", "offload", "reset_all"])
def test_05_resume_at_every_offset_of_an_interval_gives_the_same_bits(state: str, tmp_path) -> None:
    """Weights, optimizer state and schedule, through files; blocks have been away and come back meanwhile."""
    settings = LayerSampling(active=1, period=3, state=state, sampler=Reshuffle(), warmup=1)
    whole = setup(settings, layers=2)
    train(*whole, steps=range(12))
    for stop in (6, 7, 8, 9):
        first, second = setup(settings, layers=2), setup(settings, layers=2)
        train(*first, steps=range(stop))
        write_state(tmp_path / "sampler", first[2].state_dict())
        torch.save({"model": first[0].state_dict(), "optimizer": first[1].state_dict()}, tmp_path / "rest")
        rest = torch.load(tmp_path / "rest", weights_only=True)
        second[0].load_state_dict(rest["model"])
        second[1].load_state_dict(rest["optimizer"])
        second[2].load_state_dict(read_state(tmp_path / "sampler"))
        train(*second, steps=range(stop, 12))
        assert_same(copy_of(whole[0]), copy_of(second[0]))
        assert_same_state(whole[1], second[1])
        assert second[2].history == whole[2].history


@pytest.mark.parametrize("state", ["reset", "keep", "reset_all"])
def test_05_without_our_own_file_the_schedule_follows_from_seed_and_step(state: str) -> None:
    """Nothing but the optimizer's state is needed where no state is held aside and no scores are learned."""
    settings = LayerSampling(active=1, period=3, state=state, sampler=Reshuffle())
    whole = setup(settings, layers=2)
    train(*whole, steps=range(12))
    for stop in (6, 7, 8):
        first, second = setup(settings, layers=2), setup(settings, layers=2)
        train(*first, steps=range(stop))
        second[0].load_state_dict(first[0].state_dict())
        second[1].load_state_dict(first[1].state_dict())
        train(*second, steps=range(stop, 12))
        assert_same(copy_of(whole[0]), copy_of(second[0]))


def test_06_the_sets_do_not_depend_on_accumulation_batch_or_the_global_stream() -> None:
    """World sizes: ``distributed/test_layersample_ranks.py``; the Trainer's workers: ``test_callback.py``."""
    sets = []
    for accumulate, batch, noise in ((1, 2, 0), (2, 4, 100), (4, 4, 1000)):
        torch.rand(noise)
        model, optimizer, sampler = setup(LayerSampling(active=2, period=2), seed=5)
        train(model, optimizer, sampler, steps=range(12), accumulate=accumulate, batch=batch)
        sets.append(sampler.history)
    assert sets[0] == sets[1] == sets[2]
    assert len({drawn for _, _, drawn in sets[0]}) > 1


def test_07_reshuffling_trains_every_block_in_every_epoch_of_draws() -> None:
    model, optimizer, sampler = setup(LayerSampling(active=2, period=1, sampler=Reshuffle()))
    for epoch in range(3):
        before = copy_of(model)
        train(model, optimizer, sampler, steps=range(2 * epoch, 2 * epoch + 2))
        assert {block_of(name) for name in moved(before, model)} == {None, 0, 1, 2, 3}


def test_08_tied_weights_train_once_and_cannot_be_frozen_on_one_side() -> None:
    model, optimizer, _ = run = setup(tied=True)
    assert not {"lm_head.weight"} & set(run[2].trainable)
    train(*run)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    run[2].close()
    for side in ("embed", "head"):
        with pytest.raises(UserError, match="tied"):
            Sampler(model, optimizer, LayerSampling(**{side: False}))
    with Sampler(model, optimizer, LayerSampling(embed=False, head=False)) as both:
        assert "model.embed_tokens.weight" not in both.trainable


def test_09_accumulating_four_micro_batches_equals_one_batch_of_four() -> None:
    """And a switch never falls inside a window, though ``begin_step`` is called for each micro-batch."""
    runs = []
    for accumulate in (1, 4):
        model, optimizer, sampler = setup(LayerSampling(active=1, period=2, sampler=Reshuffle()))
        train(model, optimizer, sampler, steps=range(5), accumulate=accumulate, batch=4)
        runs.append(copy_of(model))
    for name, value in runs[0].items():
        # the mean of four means and one mean differ by rounding, 1e-16, which five AdamW steps may blow up a little
        torch.testing.assert_close(value, runs[1][name], rtol=0, atol=1e-9)


def test_10_weight_decay_does_not_touch_what_is_frozen() -> None:
    model = zoo.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=10.0, foreach=False)
    before = copy_of(model)
    with Sampler(model, optimizer, LayerSampling(active=1, period=9, sampler=Fixed(blocks=(1,)))) as sampler:
        train(model, optimizer, sampler, steps=range(4))
    assert {block_of(name) for name in moved(before, model)} == {None, 1}


def test_11_one_process_is_the_many_process_code_with_the_talking_left_out() -> None:
    """Two processes equal one: ``distributed/test_layersample_ranks.py``. Here: alone, reducing changes nothing."""
    expected = lisa_ranks.one_process()
    model = lisa_ranks.Net()
    optimizer = lisa_ranks.adamw(model)
    lisa_ranks.train(model, optimizer, Sampler(model, optimizer, lisa_ranks.settings(), seed=1), reduce=True)
    assert lisa_ranks.weights(model) == expected["weights"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every block's input
@pytest.mark.parametrize(("embed", "most"), [(True, 2), (False, 4)])
def test_12_compiled_blocks_have_at_most_two_graphs_whatever_the_depth_and_the_draws(embed: bool, most: int) -> None:
    """Active and frozen; with a frozen embedding each also with and without a gradient for its input."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model, optimizer, sampler = setup(LayerSampling(active=2, period=1, embed=embed), layers=6)
    model.config.use_cache = False  # a cache makes dynamo compile each layer index by itself
    for layer in model.model.layers:
        layer.compile(backend=backend)
    eager = setup(LayerSampling(active=2, period=1, embed=embed), layers=6)
    for run in ((model, optimizer, sampler), eager):
        train(*run, steps=range(8))
    assert len({drawn for _, _, drawn in sampler.history}) > 4
    assert len(graphs) <= most
    assert_same(copy_of(model), copy_of(eager[0]))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # at the border no input requires a gradient
@pytest.mark.parametrize("checkpointed", [False, True])
def test_14_no_backward_below_the_lowest_active_block_when_the_embedding_is_frozen(checkpointed: bool) -> None:
    model, _, sampler = setup(LayerSampling(active=1, period=1, embed=False, sampler=Fixed(blocks=(2,))))
    if checkpointed:
        model.train().activation_checkpointing_enable()
    sampler.begin_step(0)
    reached: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_full_backward_pre_hook(lambda m, delta, index=index: reached.append(index))
    model(**zoo.tokens()).loss.backward()
    assert reached == [3, 2]


@pytest.mark.parametrize("make", [zoo.llama, zoo.gpt2])
def test_15_what_may_train_is_the_whole_model_in_as_many_blocks_as_it_says(make) -> None:
    """The zoo of architectures: ``tests/blocks``."""
    model, _, sampler = setup(LayerSampling(active=3, period=1), make=make, layers=3)
    assert len(sampler.body) == model.config.num_hidden_layers == 3
    sampler.begin_step(0)
    assert sum(p.numel() for p in sampler.trainable.values()) == sum(p.numel() for p in model.parameters())


def test_16_flags_are_restored_on_exit_and_on_an_exception() -> None:
    model = zoo.llama()
    optimizer = AdamW(model.parameters())
    model.model.layers[3].mlp.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    with Sampler(model, optimizer) as sampler:
        sampler.begin_step(0)
        assert [p.requires_grad for p in model.parameters()] != flags
    assert [p.requires_grad for p in model.parameters()] == flags
    with pytest.raises(KeyError), Sampler(model, optimizer):
        raise KeyError
    assert [p.requires_grad for p in model.parameters()] == flags


def test_17_the_learning_rate_has_no_saw_tooth_at_switches() -> None:
    """The global schedule runs through, in the groups and in the steps taken: SGD on constant gradients shows them."""
    model = zoo.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    sampler = Sampler(model, optimizer, LayerSampling(active=1, period=3, sampler=Uniform()))
    taken = []
    for step in range(12):
        sampler.begin_step(step)
        before = model.lm_head.weight.detach().clone()
        model.lm_head.weight.grad = torch.ones_like(before)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        taken.append((before - model.lm_head.weight.detach()).mean().item())
    # rounding of w − lr with w of size 0.05 and lr of size 1: 1e-16
    assert taken == pytest.approx([(1 + math.cos(math.pi * step / 12)) / 2 for step in range(12)], abs=1e-12)


def test_18_tiny_steps_move_a_bf16_model_with_masters_only() -> None:
    """At a rate of 1e-6 each step is below half a unit in the last place of every weight above 2⁻⁹."""
    counts = {}
    for masters in (False, True):
        model = zoo.llama(dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
        before = copy_of(model)
        with Sampler(model, optimizer, LayerSampling(active=4, period=1, masters=masters)) as sampler:
            train(model, optimizer, sampler, steps=range(25))
        large = {name: value.abs() > 2**-9 for name, value in before.items()}
        counts[masters] = sum(int((p != before[n])[large[n]].sum()) for n, p in model.named_parameters())
    assert counts[False] == 0
    assert counts[True] > 0


def test_every_part_at_once_trains_and_resumes() -> None:
    """Adaptive draws, offloaded state, warm-up, masters, a frozen embedding and checkpointing, together."""
    settings = LayerSampling(
        active=2, period=2, embed=False, state="offload", sampler=Adaptive(), warmup=1, masters=True
    )
    first, second = (setup(settings, dtype=torch.bfloat16) for _ in range(2))
    for model, _, _ in (first, second):
        model.train().activation_checkpointing_enable()
    train(*first, steps=range(7))
    second[0].load_state_dict(first[0].state_dict())
    second[2].load_state_dict(first[2].state_dict(optimizer=True))
    for run in (first, second):
        train(*run, steps=range(7, 12))
    assert_same(copy_of(first[0]), copy_of(second[0]))
    assert first[2].history == second[2].history
