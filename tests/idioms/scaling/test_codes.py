"""Attention as users write it: the factor on logits is what their code leaves to do, or they are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from idioms.scaling.cells import CODE, CODES
from idioms.scaling.families import NanoBlock
from scaling.models import seeded
from sparing.errors import UserError
from sparing.scaling.plans.planning import plan


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class Attend(nn.Module):
    """An inner module without parameters."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Packed projection; how logits are made is each class's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n_head, self.hd, self.flash = 2, width // 2, True
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("norm_fact", torch.tensor(self.hd**0.5))
        self.inner = Attend()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
        return self.c_proj(self.core(q, k, v).transpose(1, 2).flatten(2))


def sdpa(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def one_over_d(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=1 / q.size(-1))


def eight_over_d(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=8 / self.hd)


def constant(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.12)


def by_d(self, q, k, v):
    return (q @ k.mT / k.size(-1)).softmax(-1) @ v


def by_root(self, q, k, v):
    scores = torch.matmul(q, k.mT) * (1.0 / math.sqrt(k.size(-1)))
    return scores.softmax(-1) @ v


def by_local_root(self, q, k, v):
    _, _, _, width = q.shape
    scores = q @ k.mT
    scores /= width**0.5
    return scores.softmax(-1) @ v


def by_nothing(self, q, k, v):
    scores = q @ k.mT  # no sqrt(d)
    return scores.softmax(-1) @ v


def by_buffer(self, q, k, v):
    return (q @ k.mT / self.norm_fact).softmax(-1) @ v


def fourth_roots(self, q, k, v):
    return ((q * self.hd**-0.25) @ (k * self.hd**-0.25).mT).softmax(-1) @ v


def inner(self, q, k, v):
    return self.inner(q, k, v)


def function(self, q, k, v):
    return attend(q, k, v)


def flash_or_hand(self, q, k, v):
    if self.flash and k.is_cuda:
        return F.scaled_dot_product_attention(q, k, v)
    return by_root(self, q, k, v)


def local_name(self, q, k, v):
    chosen = {True: attend}[self.flash]
    return chosen(q, k, v)


def two_products(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(k, q, v)


def normalised(self, q, k, v):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1) @ v


def given(self, q, k, v, scale=None):
    return (q @ k.mT * scale).softmax(-1) @ v


def two_ways(self, q, k, v):
    scores = q @ k.mT
    if k.is_cuda:
        scores = scores / k.size(-1)
    return scores.softmax(-1) @ v


def by_log(self, q, k, v):
    return (q @ k.mT / math.log(k.size(-1))).softmax(-1) @ v


WRITTEN = dict(
    zip(
        CODES,
        (
            *(sdpa, one_over_d, eight_over_d, constant, by_d, by_root, by_local_root, by_nothing, by_buffer),
            *(fourth_roots, inner, function, flash_or_hand),
            *(local_name, two_products, normalised, given, two_ways, by_log),
        ),
        strict=True,
    )
)


class Net(nn.Module):
    """Blocks between a stem and a head."""

    def __init__(self, kind: type[nn.Module], width: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Embedding(11, width), nn.Linear(width, 5)
        self.blocks = nn.ModuleList(NanoBlock(width, 2 * width, 2) for _ in range(2))
        for block in self.blocks:
            block.attn = kind(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.stem(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def built(how: str, width: int, **more: object) -> nn.Module:
    kind = type("CausalAttention", (Attention,), {"core": WRITTEN[how], **more})
    return seeded(lambda: Net(kind, width))


WORDS = {
    "normalised queries": r"blocks\.0\.attn: got a number 2 where the base has 1.*no rule knows of it",
    "a scale that the caller gives": r"Net without a forward pass to watch.*pass inputs=",
    "two ways that differ": r"base: got another factor where tensors are on another device",
}


@pytest.mark.parametrize("how", CODES, ids=lambda how: f"{CODE}-{how}")
def test_the_factor_is_what_the_code_leaves_to_do(how: str):
    """Heads of 32 on a base of 8: logits of the rule are the base's over 4, and d^-p is done by the code."""
    model, base, power = built(how, 64), built(how, 16), CODES[how]
    if power is None:
        with pytest.raises(UserError, match=WORDS[how]):
            plan(model, base=base)
    else:
        assert plan(model, base=base).attention == pytest.approx(4 ** (power - 1), rel=1e-6)


def test_code_without_a_source_is_watched_all_the_same():
    """Nothing divides, so that the factor is the whole 1/4."""
    held: dict[str, object] = {}
    exec("def core(self, q, k, v):\n    return q @ k.mT @ v", held)
    model, base = (built("by d", width, core=held["core"]) for width in (64, 16))
    assert plan(model, base=base).attention == pytest.approx(1 / 4, rel=1e-12)
