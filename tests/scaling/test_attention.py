"""The factor on attention logits against the logits themselves, and against a softmax that is written out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zoo
from scaling import models
from sparing.errors import UserError
from sparing.scaling.apply import apply_
from sparing.scaling.model.attention import attentions, scale_attention_, unscale_attention_
from sparing.scaling.model.fold import remove_
from sparing.scaling.plans.planning import plan
from sparing.scaling.rules import SuPar


class Attend(nn.Module):
    """One head; its projections are named as the test says."""

    def __init__(self, names: tuple[str, ...], *, norm: bool = False, width: int = 6) -> None:
        super().__init__()
        size = width if len(names) == 3 else 3 * width
        for name in names:
            setattr(self, name, nn.Linear(width, size))
        if norm:
            self.gain = nn.LayerNorm(width)
        self.names = names

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        parts = [getattr(self, name)(x) for name in self.names]
        q, k, v = parts if len(parts) == 3 else parts[0].chunk(3, -1)
        q = self.gain(q) if hasattr(self, "gain") else q
        return torch.softmax(factor * q @ k.transpose(-1, -2), -1) @ v


class Net(nn.Module):
    def __init__(self, *args, **options) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attend(*args, **options) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, factor)
        return self.head(x)


class Turned(nn.Module):
    """One head after another, each with its query, key and value, as GPT-NeoX packs them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 18), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.stem(x)).unflatten(-1, (3, 6)).transpose(-2, -3).chunk(3, -1)
        return self.head((torch.softmax(q @ k.mT, -1) @ v).transpose(-2, -3).flatten(-2))


X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NETS = {
    "three projections": lambda: Net(("q_proj", "k_proj", "v_proj")),
    "packed": lambda: Net(("qkv",)),
    "packed, named otherwise": lambda: Net(("mixer",)),
    "three projections, named otherwise": lambda: Net(("a", "b", "c")),
    "query norm": lambda: Net(("query", "key", "value"), norm=True),
    "packed with query norm": lambda: Net(("qkv",), norm=True),
}


@pytest.mark.parametrize("kind", NETS)
def test_logits_of_plain_attention_are_multiplied(kind):
    model = models.seeded(NETS[kind]).double()
    expected, before = model(X, factor=0.3), model(X)
    scale_attention_(model, plan(model).entries.values(), 0.3)
    torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(expected, before)
    unscale_attention_(model)
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("make", [models.gpt2, models.llama])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_of_hugging_face_attention_are_multiplied(make, attention):
    """Queries times the factor, written into the weights of a copy, are the oracle."""
    model = make(32, attn_implementation=attention).double().eval()
    oracle = copy.deepcopy(model)
    for one in attentions(oracle, plan(oracle).entries.values()):
        with torch.no_grad():
            rows = one.projection.weight[:, :32] if one.packed else one.projection.weight
            rows *= 0.4
            if one.projection.bias is not None:
                one.projection.bias[:32] *= 0.4
    before = model(**zoo.tokens()).logits
    scale_attention_(model, plan(model).entries.values(), 0.4)
    got = model(**zoo.tokens()).logits
    torch.testing.assert_close(got, oracle(**zoo.tokens()).logits, rtol=1e-11, atol=1e-13)
    assert not torch.allclose(got, before, rtol=1e-6)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(**zoo.tokens()).logits, got)
    unscale_attention_(model)
    assert torch.equal(model(**zoo.tokens()).logits, before)


def test_torch_attention_is_given_scaled_queries():
    model = models.patches(16).double().eval()
    image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    oracle = copy.deepcopy(model)
    with torch.no_grad():
        for layer in oracle.encoder.layers:
            layer.self_attn.in_proj_weight[:16] *= 0.5
    before = model(image)
    scale_attention_(model, plan(model, roles={"cls": "embedding", "position": "embedding"}).entries.values(), 0.5)
    torch.testing.assert_close(model(image), oracle(image), rtol=1e-11, atol=1e-13)
    assert not torch.allclose(before, oracle(image))


def test_wider_heads_get_their_factor_by_the_plan():
    """Heads of 32 on a base of 16: 1/d in place of 1/√d is a factor of 1/√2, and the base is left alone."""
    wide, base = models.llama(64, head_dim=32), models.llama(32, head_dim=16)
    own = wide.model.layers[0].self_attn.scaling
    chosen = plan(wide, base=base, rule=SuPar(), init={"*": "constant"})
    assert chosen.attention == pytest.approx(0.5**0.5)
    apply_(wide, chosen)
    assert wide.model.layers[1].self_attn.scaling == pytest.approx(own * 0.5**0.5, rel=1e-15)
    remove_(wide)
    assert wide.model.layers[1].self_attn.scaling == own
    same = models.llama(64, head_dim=16)
    assert plan(same, base=base, init={"*": "constant"}).attention == 1.0


def test_models_whose_attention_is_not_known_are_refused():
    model = models.mlp(16)
    scale_attention_(model, plan(model).entries.values(), 1.0)  # nothing to do: nothing is asked
    with pytest.raises(UserError, match="project queries"):
        scale_attention_(model, plan(model).entries.values(), 0.5)
    turned = models.seeded(Turned)
    with pytest.raises(UserError, match=r"whose queries are outputs \(0, 2, 6, 8, 12, 14\)"):
        scale_attention_(turned, plan(turned).entries.values(), 0.5)
