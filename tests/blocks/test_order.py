"""The order of use: seen on a copy, without touching, running or copying the weights of the model."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from sparing.blocks import find_blocks
from sparing.blocks.order import example_for, observe
from sparing.errors import UserError


class Chatty(nn.Module):
    """A model that would show if it had been run: it counts, warns, draws, keeps statistics and calls hooks."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3))
        self.calls = 0
        self.seen: list[Tensor] = []
        self.scale = nn.Parameter(torch.ones(width))
        self.offset = torch.ones(width)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        x = nn.functional.dropout(x * self.scale + self.offset + torch.arange(4.0))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def roles(model: nn.Module, **options) -> list[list[str]]:
    return [[block.role, *block.params] for block in find_blocks(model, **options)]


def test_the_model_is_neither_run_nor_changed() -> None:
    model = Chatty().train()
    fired = []
    model.register_forward_hook(lambda *_: fired.append("after"))
    model.blocks[0].register_forward_pre_hook(lambda *_: fired.append("before"))
    model.head.forward = lambda x: fired.append("patched")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    objects = [id(value) for value in model.state_dict(keep_vars=True).values()]
    numbers = torch.get_rng_state()

    found = roles(model, example=torch.zeros(5, 4))

    assert found[0] == ["embed", "scale"]
    assert found[-1] == ["head", "head.weight", "head.bias"]
    assert (model.calls, model.seen, fired, model.training) == (0, [], [], True)
    assert [id(value) for value in model.state_dict(keep_vars=True).values()] == objects
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)


def test_nothing_is_allocated() -> None:
    """By torch's own account of CPU memory: less than the smallest weight of a model of 12 MB."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        order = observe(model, torch.zeros(2, 1024, device="meta"))
    assert order.complete
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.events()) < 4 * 1024


def test_blocks_that_look_alike_run_once_and_others_all() -> None:
    calls = []

    class Counted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, width)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.linear.out_features)
            return self.linear(x)[:, :4]

    model = nn.Sequential(*(Counted(width) for width in (4, 4, 8, 4, 8)))
    order = observe(model, torch.zeros(1, 4), list(model))
    assert calls == [4, 8]
    first = [order.first[id(block.linear.weight)] for block in model]
    assert first == sorted(set(first))


class Spy(TorchDispatchMode):
    """A ledger such as those that count live tensors; here it objects to whatever it sees."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"saw {func}")


@pytest.mark.parametrize(
    "around", [FakeTensorMode, Spy, lambda: torch.device("meta"), torch.inference_mode, torch.enable_grad]
)
def test_any_mode_around_is_of_no_matter(around) -> None:
    """One example in a batch: batch norm would refuse it in training mode."""
    model, example = Chatty().train(), torch.zeros(1, 4)
    expected = roles(model, example=example)
    with around():
        assert roles(model, example=example) == expected


def opt(**changes) -> nn.Module:
    """OPT registers its final norm and both projections before its layers."""
    config = tf.OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, word_embed_proj_dim=8
    )
    with torch.device("meta"):
        model = type("OPT", (tf.OPTForCausalLM,), changes)(config)
    model.tie_weights()
    return model


def test_a_forward_that_needs_data_leaves_the_rest_to_registration() -> None:
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.model.decoder.embed_tokens(input_ids)
        return hidden if hidden.sum() > 0 else -hidden

    seen, guessed = (find_blocks(model) for model in (opt(), opt(forward=forward)))
    assert sorted(seen[-1].params) == [
        "model.decoder.final_layer_norm.bias",
        "model.decoder.final_layer_norm.weight",
        "model.decoder.project_out.weight",
    ]
    assert seen[-1].role == "tail"
    assert [block.role for block in guessed] == ["embed", "body", "body"]  # the documented fallback


def test_an_example_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"example: got RuntimeError: .*leave example out"):
        find_blocks(Chatty(), example=torch.zeros(5, 3))
    with pytest.raises(UserError, match=r"example: got TypeError"):
        find_blocks(Chatty(), example={"y": torch.zeros(5, 4)})


def test_an_example_beside_the_body_tells_nothing() -> None:
    class Optional(Chatty):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    assert roles(Optional(), example=torch.zeros(5, 4)) == roles(Optional())


def test_examples_follow_the_configuration() -> None:
    text = example_for(zoo.gpt2())
    assert text is not None
    assert {name: (tuple(value.shape), value.dtype) for name, value in text.items()} == {
        "input_ids": ((1, 4), torch.int64)
    }
    with torch.device("meta"):
        vit = tf.ViTModel(
            tf.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_channels=1)
        ).half()
        sound = tf.Wav2Vec2Model(tf.Wav2Vec2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    picture = example_for(vit)
    assert picture is not None
    assert (tuple(picture["pixel_values"].shape), picture["pixel_values"].dtype) == ((1, 1, 224, 224), torch.float16)
    assert example_for(sound) is None
