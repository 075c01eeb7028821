"""What every kind of layer is taken for, at two widths and at one, and that the unknown is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scaling import models
from sparing.errors import UserError
from sparing.scaling.roles.find import facts, role_of, roles_of


def roles(model, base=None, **overrides):
    return {name: role for name, (role, _) in roles_of(facts(model, base), **overrides).items()}


def test_perceptron():
    wide, slim = models.mlp(64), models.mlp(16)
    expected = {
        "0.weight": "embedding",
        "0.bias": "vector",
        "2.weight": "hidden",
        "2.bias": "vector",
        "4.weight": "hidden",
        "4.bias": "vector",
        "6.weight": "output",
        "6.bias": "fixed",
    }
    assert roles(wide, slim) == expected


@pytest.mark.parametrize(
    "build",
    [models.mlp, models.gated, models.conv, models.patches, models.recurrent, models.gpt2, models.llama, models.vit],
)
def test_roles_are_the_same_at_the_width_of_the_base(build):
    """A coordinate check compares widths, the base's own among them: what a layer is must not hang on the ratio."""
    wide, slim = build(64), build(32)
    assert roles(wide, slim) == roles(slim, slim) == roles(slim)


def test_convolutions():
    """Stem 3 → c, c → 2c with 3 × 3, depthwise, transposed 2c → c: channels make the ratio, kernels the fan."""
    known = facts(models.conv(16), models.conv(8))
    found = {name: role_of(fact)[0] for name, fact in known.items()}
    assert found["stem.weight"] == "embedding"
    assert found["conv.weight"] == found["up.weight"] == "hidden"
    assert found["depthwise.weight"] == "depthwise"
    assert found["head.weight"] == "output"
    assert {found[f"{norm}.{kind}"] for norm in ("bn", "gn") for kind in ("weight", "bias")} == {"vector"}
    numbers = {name: (f.fan_in, f.fan_out, f.m_in, f.m_out, f.transposed) for name, f in known.items() if f.matrix}
    assert numbers == {
        "stem.weight": (3 * 9, 16 * 9, 1.0, 2.0, False),
        "conv.weight": (16 * 9, 32 * 9, 2.0, 2.0, False),
        "depthwise.weight": (9, 32 * 9, 1.0, 2.0, False),
        "up.weight": (32 * 4, 16 * 4, 2.0, 2.0, True),
        "head.weight": (16, 5, 2.0, 1.0, False),
    }


def test_grouped_convolution_that_widens_by_groups_stays_hidden():
    build = lambda c: nn.Sequential(nn.Conv2d(3, c, 1), nn.Conv2d(c, c, 3, groups=c // 4), nn.Conv2d(c, 2, 1))  # noqa: E731
    known = facts(build(16), build(8))
    assert role_of(known["1.weight"])[0] == "hidden"
    assert (known["1.weight"].m_in, known["1.weight"].m_out) == (1.0, 2.0)


def test_gpt2_has_inputs_first_packed_queries_and_a_tied_head():
    known = facts(models.gpt2(64), models.gpt2(32))
    found = {name: role_of(fact)[0] for name, fact in known.items()}
    attn, mlp = known["transformer.h.0.attn.c_attn.weight"], known["transformer.h.1.mlp.c_proj.weight"]
    assert (attn.kind, attn.fan_in, attn.fan_out, attn.transposed, attn.part) == ("Conv1D", 64, 192, True, "qkv")
    assert (mlp.fan_in, mlp.fan_out, mlp.m_in, mlp.residual) == (256, 64, 2.0, True)
    assert found["transformer.wte.weight"] == found["transformer.wpe.weight"] == "embedding"
    assert known["transformer.wte.weight"].readout
    assert not known["transformer.wpe.weight"].readout
    assert "lm_head.weight" not in known
    hidden = {name for name, role in found.items() if role == "hidden"}
    assert len(hidden) == 2 * 4
    assert {name for name in known if known[name].residual} == {name for name in hidden if "c_proj" in name}


def test_llama_with_grouped_queries():
    """Keys and values multiply width by fewer heads: hidden, by their fan-in, also where their heads do not grow."""
    known = facts(models.llama(64, groups=2), models.llama(32, groups=2))
    key = known["model.layers.0.self_attn.k_proj.weight"]
    assert (key.fan_in, key.fan_out, key.m_in, key.m_out, key.part) == (64, 32, 2.0, 2.0, "key")
    assert {name.split(".")[-2] for name, f in known.items() if f.residual} == {"o_proj", "down_proj"}
    single = facts(models.llama(64, groups=4), models.llama(32, groups=2))["model.layers.0.self_attn.v_proj.weight"]
    assert (single.m_in, single.m_out) == (2.0, 1.0)
    assert role_of(single)[0] == "hidden"
    assert role_of(known["lm_head.weight"])[0] == "output"
    assert role_of(known["model.norm.weight"])[0] == "vector"


def test_gated_perceptron_has_its_own_ratio():
    """d = 64 over 32, inner 256 over 64: the way down has four times the base's inputs."""
    known = facts(models.gated(64, 256), models.gated(32, 64))
    ratios = {
        name: (known[f"blocks.0.{name}.weight"].m_in, known[f"blocks.0.{name}.weight"].m_out)
        for name in ("gate", "down")
    }
    assert ratios == {"gate": (2.0, 4.0), "down": (4.0, 2.0)}


def test_a_model_of_which_only_the_inner_width_grows_keeps_hidden_weights_hidden():
    found = roles(models.gated(32, 128), models.gated(32, 64))
    assert {found[f"blocks.{at}.{name}.weight"] for at in (0, 1) for name in ("gate", "up", "down")} == {"hidden"}
    assert found["blocks.0.norm.weight"] == "fixed"


def test_torchs_attention_and_bare_parameters():
    known = facts(models.patches(32), models.patches(16))
    found = {name: role_of(fact)[0] for name, fact in known.items()}
    packed = known["encoder.layers.0.self_attn.in_proj_weight"]
    assert (packed.fan_in, packed.fan_out, packed.part, found[packed.name]) == (32, 32, "qkv", "hidden")
    assert found["encoder.layers.0.self_attn.in_proj_bias"] == "vector"
    assert found["cls"] == found["position"] == found["patch.weight"] == "embedding"
    assert known["position"].m_out == 2.0
    ends = {"self_attn.out_proj.weight", "linear2.weight"}
    assert {name for name in known if known[name].residual} == {
        f"encoder.layers.{at}.{end}" for at in (0, 1) for end in ends
    }


def test_recurrent_layers_count_gates_once():
    known = facts(models.recurrent(32), models.recurrent(16))
    assert (known["lstm.weight_hh_l0"].fan_in, known["lstm.weight_hh_l0"].fan_out) == (32, 32)
    assert (known["gru.weight_ih_l0"].fan_in, known["gru.weight_ih_l0"].fan_out) == (32, 32)
    assert {role_of(known[f"{layer}.weight_{way}_l0"])[0] for layer in ("lstm", "gru") for way in ("ih", "hh")} == {
        "hidden"
    }
    assert role_of(known["lstm.bias_ih_l0"])[0] == "vector"
    assert known["lstm.bias_ih_l0"].m_init == 2.0


def test_rms_norm_scale_and_temperature():
    class Scaled(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first = nn.Linear(4, width)
            self.norm = nn.RMSNorm(width)
            self.gain = nn.Parameter(torch.ones(width))
            self.temperature = nn.Parameter(torch.ones(()))
            self.last = nn.Linear(width, 2)

        def forward(self, x):
            return self.last(self.gain * self.norm(self.first(x)) / self.temperature)

    found = roles(Scaled(16), Scaled(8))
    assert (found["norm.weight"], found["gain"], found["temperature"]) == ("vector", "vector", "fixed")


class Odd(nn.Module):
    """Tables that multiply one by one: neither a product nor a lookup."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.gains = nn.Parameter(torch.randn(2 * width, width))
        self.mixing = nn.Parameter(torch.randn(width, 3 * width))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(width, 7)

    def forward(self, ids):
        x = self.embed(ids) * self.gains[0] + self.mixing[0, : self.gains.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_all_unknown_parameters_are_named_at_once_with_the_cure():
    with pytest.raises(UserError) as error:
        roles(Odd(16), Odd(8))
    text = str(error.value)
    assert "2 parameters" in text
    assert "gains [32, 16]" in text
    assert "mixing [16, 48]" in text
    assert 'roles={"pattern": "hidden"}' in text


class Bare(nn.Module):
    """A router, two stacks of experts and a readout, all of them bare parameters."""

    def __init__(self, width: int, *, turned: bool) -> None:
        super().__init__()
        self.stem, self.turned = nn.Linear(4, width), turned
        self.position = nn.Parameter(torch.randn(9, width))
        self.router = nn.Parameter(torch.randn(3, width))
        self.up = nn.Parameter(torch.randn(3, *((width, 2 * width) if turned else (2 * width, width))))
        self.down = nn.Parameter(torch.randn(3, *((2 * width, width) if turned else (width, 2 * width))))
        self.bias = nn.Parameter(torch.zeros(3, width))
        self.read = nn.Parameter(torch.randn(5, width))

    def forward(self, x):
        x = self.stem(x) + self.position[: x.shape[1]]
        weight, chosen = F.linear(x, self.router).softmax(-1).max(-1)
        up, down = (one if self.turned else one.mT for one in (self.up[chosen], self.down[chosen]))
        y = (x.unsqueeze(-2) @ up).relu() @ down
        return F.linear(x + weight.unsqueeze(-1) * (y.squeeze(-2) + self.bias[chosen]), self.read)


@pytest.mark.parametrize("turned", [False, True])
def test_bare_parameters_are_told_by_what_is_done_with_them(turned):
    known = facts(Bare(16, turned=turned), Bare(8, turned=turned))
    assert {name: role_of(fact)[0] for name, fact in known.items() if "stem" not in name} == {
        "position": "embedding", "router": "output", "up": "hidden", "down": "hidden", "bias": "vector",
        "read": "output",
    }  # fmt: skip
    assert [(known[n].fan_in, known[n].fan_out, known[n].transposed) for n in ("up", "down")] == [
        (16, 32, turned),
        (32, 16, turned),
    ]


def test_overrides_by_pattern_decide_and_the_first_one_wins():
    known = facts(Odd(16), Odd(8))
    found = roles_of(known, {"gai*": "hidden", "mix*": "vector", "*": "fixed"})
    assert found["gains"] == ("hidden", "given for 'gai*'")
    assert found["mixing"][0] == "vector"
    assert found["head.weight"][0] == "fixed"
    assert (known["gains"].fan_in, known["gains"].fan_out) == (16, 32)


def test_overrides_that_fit_nothing_or_name_no_role_are_refused():
    known = facts(models.mlp(8))
    with pytest.raises(UserError, match="no parameter fits"):
        roles_of(known, {"layers.*": "hidden"})
    with pytest.raises(UserError, match="no such role"):
        roles_of(known, {"2.weight": "matrix"})
