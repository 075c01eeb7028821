"""Numbers of a model's own code: what attention divides by, what tables are multiplied by, and what no rule knows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.roles.find import facts
from sparing.scaling.roles.model_factors import logits_factor, require_no_unknown_factors, table_factors
from sparing.scaling.rules import SP, SuPar


def factor(model, base, rule=None):
    return logits_factor(model, base, facts(model, base), rule or SuPar())


def test_the_factor_follows_the_size_of_heads():
    """Heads m times the base's under 1/√d: 1/√m; nothing is asked where no rule, base or growth is."""
    assert factor(models.patches(64), models.patches(16)) == pytest.approx(0.5)
    assert factor(models.gpt2(64), models.gpt2(32)) == 1.0
    assert factor(models.gpt2(64), None) == 1.0
    assert factor(models.mlp(64), models.mlp(32)) == 1.0
    assert factor(models.patches(64), models.patches(16), SuPar(attention=False)) == 1.0
    assert factor(models.patches(64), models.patches(16), SP()) == 1.0
    wide, slim = models.llama(64, head_dim=32), models.llama(64, head_dim=16, groups=4)
    assert factor(wide, slim) == pytest.approx(0.5**0.5)


class Heads(nn.Module):
    """Attention with its projections under known names; attributes as the test gives them."""

    def __init__(self, width: int, **attributes: object) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.__dict__.update(attributes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return (q @ k.mT).softmax(-1) @ v


def body(width: int, kind=Heads, **attributes: object) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), kind(width, **attributes), nn.Linear(width, 2))


@pytest.mark.parametrize(
    ("wide", "slim", "expected"),
    [
        ({"num_heads": 2}, {"num_heads": 2}, 1 / 4),  # no root in its source: nothing divides
        ({"num_heads": 8}, {"num_heads": 2}, 1.0),
        ({"head_dim": 32, "scaling": 32**-0.5}, {"head_dim": 8, "scaling": 8**-0.5}, 1 / 2),
        ({"head_dim": 32, "scaling": 0.125}, {"head_dim": 8, "scaling": 0.125}, 1 / 4),
        ({"n_head": 2, "scale_attn": 32**0.5}, {"n_head": 2, "scale_attn": 8**0.5}, 1 / 2),
    ],
)
def test_what_the_model_divides_by_is_read_from_it(wide, slim, expected):
    """The total factor is the base's over m = 4; what the model's own number does of it is left out."""
    assert factor(body(64, **wide), body(16, **slim)) == pytest.approx(expected, rel=1e-12)


def test_attention_that_is_not_understood_is_refused():
    with pytest.raises(UserError, match=r"attention 1.*how many heads.*attention=False"):
        factor(body(64), body(16))

    class OddAttention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.mix = nn.Linear(width, 2 * width)

    with pytest.raises(UserError, match=r"attention 1: got OddAttention.*project queries"):
        factor(body(64, OddAttention), body(16, OddAttention))


class Scaled(nn.Embedding):
    """A table that multiplies by the root of its width, as Gemma's."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


class Shifted(nn.Embedding):
    """A table that looks up other rows than it is asked for, as OPT's positions."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward((ids + 2) % self.num_embeddings)


@pytest.mark.parametrize(("table", "expected"), [(Scaled, 2.0), (Shifted, None), (nn.Embedding, None)])
def test_tables_are_measured_by_looking_a_row_up(table, expected):
    wide, slim = (nn.Sequential(table(5, width), nn.Linear(width, 2)).double() for width in (64, 16))
    found = table_factors(wide, slim, facts(wide, slim))
    assert found == ({} if expected is None else {"0.weight": pytest.approx(expected, rel=1e-12)})


class Rooted(nn.Module):
    """Multiplies by a root of its width: always, on a switch, or by an attribute."""

    def __init__(self, width: int, *, on: bool) -> None:
        super().__init__()
        self.width, self.on = width, on
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.on:
            x = x * math.sqrt(self.width)
        return self.last(x)


def test_other_numbers_that_go_with_width_are_refused_and_switched_off_ones_are_not():
    def check(wide, slim):
        require_no_unknown_factors(wide, slim, facts(wide, slim))

    with pytest.raises(UserError, match=r"math\.sqrt\(self\.width\): got 8 where the base has 4"):
        check(Rooted(64, on=True), Rooted(16, on=True))
    check(Rooted(64, on=False), Rooted(16, on=False))
    wide, slim = Rooted(64, on=False), Rooted(16, on=False)
    wide.gain, slim.gain = 8.0, 4.0
    with pytest.raises(UserError, match="gain: got 8 where the base has 4"):
        check(wide, slim)
    wide.gain = 4.0
    check(wide, slim)
    check(wide, None)
