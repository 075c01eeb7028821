"""What a pass says of weights: what precedes and follows them, which make logits, which numbers go with width."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scaling import models
from sparing.scaling.roles.flow import Flow
from sparing.scaling.roles.follow import Unlike, flow
from sparing.scaling.roles.observe import observe
from sparing.scaling.roles.seen import Seen, look
from sparing.scaling.roles.trace import trace


def seen(model: nn.Module, base: nn.Module | None = None) -> Seen:
    return look(model, *observe(model, base))


def watched(model: nn.Module, *shape: int) -> Flow:
    return flow(trace(model, torch.empty(shape)))


class Forked(nn.Module):
    """Two stems, a shared middle, two heads, and a gate between two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.policy = nn.Linear(8, 1), nn.Linear(8, 3)
        self.left, self.right, self.gate = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.left(x) + self.right(x * 2)
        first, second = self.gate(x).softmax(-1).chunk(2, -1)
        x = self.a(x) * first + self.b(x) * second
        return self.policy(x), self.value(x)


def test_stems_heads_and_gates():
    found = look(model := Forked(), watched(model, 3, 4), torch.empty(3, 4))
    assert found.stems == {"left.weight", "right.weight"}
    assert found.ends == {"policy.weight": "policy", "value.weight": "value"}
    assert found.gates == {"gate.weight"}
    assert found.contracted == dict.fromkeys(("left.weight", "right.weight", "gate.weight", "a.weight", "b.weight",
                                              "policy.weight", "value.weight"), 1)  # fmt: skip
    assert found.called == set(found.contracted)


def test_a_tied_table_reads_out_by_its_alias():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    assert seen(Tied()).ends == {"table.weight": "head"}


@pytest.mark.parametrize("names", [("a", "b", "c"), ("key", "query", "value")])
def test_parts_of_attention_are_told_by_their_products_not_by_names(names):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.out = nn.Linear(3, 8), nn.Linear(8, 2)
            for name in names:
                setattr(self, name, nn.Linear(8, 8))

        def forward(self, x):
            x = self.stem(x)
            q, k, v = (getattr(self, name)(x).unflatten(-1, (2, 4)).transpose(1, 2) for name in names)
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    found = seen(Attention())
    assert found.parts == {f"{name}.weight": part for name, part in zip(names, ("query", "key", "value"), strict=True)}
    assert found.hooks[f"{names[0]}.weight"].place == "output"


def test_rows_of_packed_projections_are_followed_through_views():
    """GPT-2 packs thirds, GPT-NeoX one head after another, Falcon groups of queries with a key and a value."""
    from idioms.scaling.families import FAMILIES

    rows = {}
    for name in ("GPT-2", "GPT-NeoX", "Falcon"):
        found = seen(models.seeded(lambda name=name: FAMILIES[name](16, 32, 4)))
        rows[name] = next(iter(found.hooks.values())).rows
    assert rows == {
        "GPT-2": (0, 16), "GPT-NeoX": (0, 4, 12, 16, 24, 28, 36, 40), "Falcon": (0, 8, 16, 24)
    }  # fmt: skip


def test_logits_grow_with_the_size_of_heads_and_shrink_by_the_models_own_number():
    found = seen(models.llama(64, head_dim=32), models.llama(32, head_dim=16)).flow.logits
    assert len(found) == 2
    assert [(one.growth, one.own) for one in found] == [(2.0, pytest.approx(0.5**0.5, rel=1e-6))] * 2
    assert all(one.module.endswith("self_attn") for one in found)


def test_passes_that_differ_are_not_compared():
    with pytest.raises(Unlike, match=r"relu in 1 where the base has gelu"):
        flow(*(trace(one, torch.empty(2, 8)) for one in (models.mlp(8), models.gelu_mlp(4))))


def test_recurrent_layers_are_products():
    found = seen(models.recurrent(16), models.recurrent(8))
    assert {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "gru.weight_ih_l0", "head.weight"} <= set(found.contracted)
    assert found.ends == {"head.weight": "head"}
