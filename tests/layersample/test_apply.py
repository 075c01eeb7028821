"""The sampler in a plain loop: what trains, what is refused, what is given back."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import zoo
from lisa_loop import AdamW, assert_same, block_of, copy_of, moved, setup, train
from sparing.errors import UserError
from sparing.layersample import Adaptive, Bernoulli, Fixed, LayerSampling, Sampler


def stack(layers: int = 4) -> nn.Sequential:
    """Plain repeated blocks, without embedding or head."""
    return zoo.redraw_(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers))).double())


@pytest.mark.parametrize(
    ("role", "name"),
    [("embed", "model.embed_tokens.weight"), ("tail", "model.norm.weight"), ("head", "lm_head.weight")],
)
def test_a_role_switched_off_stays_frozen_and_without_state(role: str, name: str) -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=2, **{role: False}))
    before = copy_of(model)
    train(model, optimizer, sampler)
    assert name not in moved(before, model)
    assert model.get_parameter(name) not in optimizer.state


def test_between_construction_and_the_first_step_no_block_trains() -> None:
    _, _, sampler = setup()
    assert not any(p.requires_grad for block in sampler.body for p in block.params.values())
    assert sampler.interval is None


@pytest.mark.parametrize("late", ["momentum_step", "rest", "activate"])
def test_a_sampler_that_is_refused_leaves_model_and_optimizer_as_they_were(
    late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer still steps, without the checks and masters of a sampler that nobody has."""
    model, twin = zoo.llama(dtype=torch.bfloat16), zoo.llama(dtype=torch.bfloat16)
    twin.model.embed_tokens.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    runs = [(m, torch.optim.SGD(m.parameters(), lr=1e-2)) for m in (model, twin)]
    settings = LayerSampling(masters=True, warmup=2, state="offload", sampler=Adaptive())
    if late == "momentum_step":
        settings = LayerSampling(masters=True, momentum_step=True)
    else:

        def refuse(self, *given, **options):
            raise UserError("memory", got="none", why="a test takes it", do="wait")

        monkeypatch.setattr(Sampler, {"rest": "_rest_", "activate": "_activate_"}[late], refuse)
    with pytest.raises(UserError):
        Sampler(*runs[0], settings)
    for net, optimizer in runs:
        train(net, optimizer, steps=range(2))
    assert [p.requires_grad for p in model.parameters()] == flags
    assert_same(copy_of(model), copy_of(twin))
    assert not any(module._forward_hooks for module in model.modules())
    monkeypatch.undo()
    Sampler(*runs[0]).close()


def test_gradients_from_before_move_nothing() -> None:
    """A frozen parameter with a gradient would still be stepped by the optimizer, and no step has begun."""
    model = zoo.llama()
    optimizer = AdamW(model.parameters())
    model(**zoo.tokens()).loss.backward()
    before = copy_of(model)
    with Sampler(model, optimizer) as sampler:
        assert all(p.grad is None for n, p in model.named_parameters() if n not in sampler.trainable)
        with pytest.raises(UserError, match="no begin_step yet"):
            optimizer.step()
    assert moved(before, model) == set()


def test_what_the_user_froze_stays_frozen() -> None:
    model = zoo.llama()
    theirs = model.model.layers[1].mlp.requires_grad_(False)
    optimizer = AdamW(model.parameters())
    before = copy_of(model)
    with Sampler(model, optimizer, LayerSampling(active=4, period=1)) as sampler:
        train(model, optimizer, sampler)
    assert not any("layers.1.mlp" in name for name in moved(before, model))
    assert not any(p.requires_grad for p in theirs.parameters())
    assert model.model.layers[1].self_attn.q_proj.weight.requires_grad


def test_repeated_calls_within_an_interval_change_nothing() -> None:
    model, _, sampler = setup()
    sampler.begin_step(4)
    model(**zoo.tokens()).loss.backward()
    for step in (4, 4, 5):
        sampler.begin_step(step)
    assert sampler.history == [(4, 1, sampler.active)]


def test_a_switch_inside_an_accumulation_window_is_refused_and_harmless() -> None:
    model, _, sampler = setup()
    sampler.begin_step(2)
    active = sampler.active
    model(**zoo.tokens()).loss.backward()
    with pytest.raises(UserError, match="accumulation window"):
        sampler.begin_step(3)
    assert sampler.active == active
    assert sampler.interval == 0


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_a_step_is_a_count(step: object) -> None:
    _, _, sampler = setup()
    with pytest.raises(UserError, match="begin_step"):
        sampler.begin_step(step)


def test_a_draw_of_no_block_at_all_trains_the_roles_alone() -> None:
    model, optimizer, sampler = setup(LayerSampling(active=1, period=1, sampler=Bernoulli()))
    empty = next(i for i in range(50) if Bernoulli().draw(4, 1, seed=0, interval=i) == ())
    before = copy_of(model)
    train(model, optimizer, sampler, steps=[empty])
    assert {block_of(name) for name in moved(before, model)} == {None}


def test_a_stack_without_embedding_or_head_trains() -> None:
    model = stack()
    optimizer = AdamW(model.parameters())
    before = copy_of(model)
    with Sampler(model, optimizer, LayerSampling(active=1, period=1, sampler=Fixed(blocks=(1,)))) as sampler:
        sampler.begin_step(0)
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
        assert sampler.active == (1,)
    assert moved(before, model) == {"1.0.weight", "1.0.bias"}


def test_a_closed_sampler_says_so_and_closing_twice_is_nothing() -> None:
    _, _, sampler = setup()
    sampler.close()
    sampler.close()
    with pytest.raises(UserError, match="closed"):
        sampler.begin_step(0)


def test_a_second_sampler_closes_the_first_and_does_not_take_its_frozen_blocks_for_the_users() -> None:
    model, optimizer, first = setup()
    first.begin_step(0)
    second = Sampler(model, optimizer, LayerSampling(active=4, period=1))
    second.begin_step(0)
    assert first.closed
    assert set(second.trainable) == set(copy_of(model))


def test_a_lost_sampler_gives_the_flags_back() -> None:
    model, optimizer, sampler = setup(LayerSampling(warmup=1))
    sampler.begin_step(0)
    del optimizer, sampler
    gc.collect()
    assert all(p.requires_grad for p in model.parameters())


class TestRefusals:
    """Each before anything is changed."""

    def refused(self, model: nn.Module, match: str, settings: LayerSampling | None = None, optimizer=None) -> None:
        flags = [p.requires_grad for p in model.parameters()]
        optimizer = optimizer or AdamW([p for p in model.parameters() if p.is_floating_point()])
        with pytest.raises(UserError, match=match):
            Sampler(model, optimizer, settings)
        assert flags == [p.requires_grad for p in model.parameters()]

    def test_parameters_missing_from_the_optimizer(self) -> None:
        model = zoo.llama()
        self.refused(
            model, "38 parameters missing, such as model.embed_tokens", optimizer=AdamW(model.lm_head.parameters())
        )

    def test_an_optimizer_built_after_freezing(self) -> None:
        """The order of LMFlow issue 726: the optimizer sees what is trainable now, and never the rest."""
        model = zoo.llama()
        model.model.layers[2].requires_grad_(False)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
        model.requires_grad_(True)
        self.refused(model, "model.layers.2", optimizer=optimizer)

    def test_a_body_that_is_all_frozen(self) -> None:
        model = zoo.llama()
        model.model.layers.requires_grad_(False)
        self.refused(model, "all frozen")

    def test_quantised_weights(self) -> None:
        model = zoo.llama()
        weight = torch.zeros(16, 16, dtype=torch.uint8)
        model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(weight, requires_grad=False)
        self.refused(model, "quantised")

    def test_data_parallel(self) -> None:
        self.refused(nn.DataParallel(stack()), "DataParallel")

    def test_deepspeed(self) -> None:
        class DeepSpeedEngine(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = stack()

        self.refused(DeepSpeedEngine(), "DeepSpeed")

    @pytest.mark.parametrize("name", ["DeepSpeedOptimizerWrapper", "LayerWiseDummyOptimizer", "AdaLomo", "Lomo"])
    def test_optimizers_that_step_or_hold_on_their_own(self, name: str) -> None:
        model = zoo.llama()
        kind = type(name, (torch.optim.SGD,), {})
        self.refused(model, name, optimizer=kind(model.parameters(), lr=1.0))

    def test_paged_optimizers(self) -> None:
        model = zoo.llama()
        optimizer = AdamW(model.parameters())
        optimizer.is_paged = True
        self.refused(model, "never freed", optimizer=optimizer)

    def test_something_that_is_no_optimizer(self) -> None:
        self.refused(zoo.llama(), "pass a torch optimizer", optimizer=object())


def test_an_optimizer_inside_accelerates_wrapper_is_found() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = zoo.llama()
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(AdamW(model.parameters()))
    sampler = Sampler(model, wrapped, LayerSampling(active=1, period=1))
    train(model, wrapped, sampler, steps=range(5))
    assert set(wrapped.state) == set(sampler.trainable.values())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21 asks by the old name
def test_adapters_of_peft_are_sampled_by_block() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model = peft.get_peft_model(zoo.llama(), config).double()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
    before = copy_of(model)
    with Sampler(model, optimizer, LayerSampling(active=1, period=9)) as sampler:
        train(model, optimizer, sampler, steps=range(2))
        (index,) = sampler.active
    assert moved(before, model)
    assert all(f"layers.{index}." in name and "lora_" in name for name in moved(before, model))


class TestSavedState:
    """``state_dict`` is JSON and tensors; another run's is refused."""

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"settings": LayerSampling(active=1, period=3)}, "settings"),
            ({"seed": 1}, "seed"),
            ({"layers": 3}, "blocks"),
        ],
    )
    def test_other_settings_seed_or_model(self, change: dict, what: str) -> None:
        model, optimizer, sampler = setup()
        train(model, optimizer, sampler, steps=range(4))
        _, _, other = setup(**change)
        with pytest.raises(UserError, match=f"resumed {what}"):
            other.load_state_dict(sampler.state_dict())
        other.load_state_dict(sampler.state_dict(), force=True)
        other.begin_step(4)
