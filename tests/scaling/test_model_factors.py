"""Numbers of a model's own code: what attention divides by, what tables are multiplied by, and what no rule knows."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn

from scaling import models
from sparing.errors import UserError
from sparing.scaling.plans.planning import plan
from sparing.scaling.roles.find import facts_in, roles_of
from sparing.scaling.roles.model_factors import logits_factor, own_factors
from sparing.scaling.roles.narrow import build_base
from sparing.scaling.roles.observe import observe
from sparing.scaling.roles.seen import look
from sparing.scaling.roles.structure import find_structure
from sparing.scaling.rules import SP, SuPar


def factor(model, base, rule=None):
    return logits_factor(look(model, *observe(model, base)), rule or SuPar())


def own(model, base):
    seen = look(model, *observe(model, base))
    shapes = build_base(model, base).shapes
    found = roles_of(facts_in(find_structure(model, shapes, seen), model, shapes))
    return own_factors(model, seen, {name: role for name, (role, _) in found.items()})


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
    """Attention of some heads that multiplies its logits by attributes, as the test gives them."""

    def __init__(self, width: int, *, heads: int = 1, **attributes: object) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.heads, self.given = heads, attributes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in (self.a, self.b, self.c))
        scores = q @ k.mT * self.given.get("times", 1.0) / self.given.get("over", 1.0)
        return (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)


def body(width: int, **attributes: object) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), Heads(width, **attributes), nn.Linear(width, 2))


@pytest.mark.parametrize(
    ("wide", "slim", "expected"),
    [
        ({}, {}, 1 / 4),  # one head, nothing divides
        ({"heads": 2}, {"heads": 2}, 1 / 4),
        ({"heads": 8}, {"heads": 2}, 1.0),
        ({"heads": 2, "times": 32**-0.5}, {"heads": 2, "times": 8**-0.5}, 1 / 2),
        ({"heads": 2, "times": 0.125}, {"heads": 2, "times": 0.125}, 1 / 4),
        ({"heads": 2, "over": 32**0.5}, {"heads": 2, "over": 8**0.5}, 1 / 2),
        ({"heads": 2, "times": torch.tensor(32.0) ** -0.5}, {"heads": 2, "times": torch.tensor(8.0) ** -0.5}, 1 / 2),
    ],
)
def test_what_the_model_divides_by_is_seen_in_its_pass(wide, slim, expected):
    """The total factor is the base's over m = 4; what the model's own number does of it is left out."""
    assert factor(body(64, **wide), body(16, **slim)) == pytest.approx(expected, rel=1e-6)


def test_layers_whose_heads_grow_differently_are_refused():
    build = lambda width, heads: nn.Sequential(  # noqa: E731
        nn.Linear(3, width), Heads(width, heads=2), Heads(width, heads=heads), nn.Linear(width, 2)
    )
    with pytest.raises(UserError, match=r"multiplied by 0\.25 in one layer and by 1 in another"):
        factor(build(64, 8), build(16, 2))


class Bilinear(nn.Module):
    """A score of two halves over a dimension that grows, which no softmax takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(3, width), nn.Linear(3, width), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.a(x) @ self.b(x).mT)


def test_products_that_are_no_attention_are_refused():
    with pytest.raises(
        UserError, match=r"a product of two activations over 4 times the base's entries.*attention=False"
    ):
        factor(Bilinear(64), Bilinear(16))
    assert factor(Bilinear(64), Bilinear(16), SuPar(attention=False)) == 1.0


class Scaled(nn.Embedding):
    """A table that multiplies by the root of its width, as Gemma's."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


class Shifted(nn.Embedding):
    """A table that looks up other rows than it is asked for, as OPT's positions."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward((ids + 2) % self.num_embeddings)


@pytest.mark.parametrize(("table", "expected"), [(Scaled, 2.0), (Shifted, None), (nn.Embedding, None)])
def test_tables_are_scaled_by_what_the_pass_shows(table, expected):
    wide, slim = (nn.Sequential(table(5, width), nn.Linear(width, 2)).double() for width in (64, 16))
    assert own(wide, slim).weights == ({} if expected is None else {"0.weight": pytest.approx(expected, rel=1e-12)})


class Rooted(nn.Module):
    """Multiplies by a root of its width: after its stem, before its head, after its head, or in its middle."""

    def __init__(self, width: int, where: str) -> None:
        super().__init__()
        self.width, self.where = width, where
        self.first, self.mid, self.last = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2, bias=False)

    def root(self, x: torch.Tensor, where: str) -> torch.Tensor:
        return x * math.sqrt(self.width) if self.where == where else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.root(self.first(x), "stem").relu()
        x = self.root(self.mid(x), "middle").tanh()
        return self.root(self.last(self.root(x, "before")), "after")


@pytest.mark.parametrize(
    ("where", "expected"), [("stem", {"first.weight": 2.0}), ("before", {"last.weight": 2.0}),
                            ("after", {"last.weight": 2.0}), ("", {})]
)  # fmt: skip
def test_numbers_on_what_a_rule_scales_are_found(where, expected):
    assert own(Rooted(64, where), Rooted(16, where)).weights == pytest.approx(expected, rel=1e-12)


def test_other_numbers_that_go_with_width_are_refused():
    with pytest.raises(UserError, match=r"model: got a number 8 where the base has 4.*goes with width"):
        own(Rooted(64, "middle"), Rooted(16, "middle"))


def test_a_mean_and_a_norm_over_the_width_are_no_numbers_of_their_own():
    class Normed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width, self.first, self.last = width, nn.Linear(3, width), nn.Linear(width, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) / self.width + 1e-5)
            return self.last(x - x.sum(-1, keepdim=True) / self.width)

    assert own(Normed(64), Normed(16)).weights == {}


class Reader(nn.Module):
    """Token model whose code divides before its head, or whose head takes a mean first; plain and tied otherwise."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.ratio = kind, width / 16
        self.table, self.mid = nn.Embedding(11, width), nn.Linear(width, width, bias=False)
        if kind != "bare":
            self.head = (Pool if kind == "pool" else nn.Linear)(width, 11, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mid(self.table(ids)).relu()
        if self.kind == "bare":
            return x @ self.table.weight.t()
        return self.head(x / self.ratio if self.kind == "divided" else x)


class Pool(nn.Linear):
    """A readout of the mean over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mean(1))


IDS = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("kind", "forward", "std", "said"),
    [("plain", 0.25, 1.0, True), ("divided", 1.0, 1.0, False), ("pool", 1.0, 0.25, False)],
)
def test_the_factor_of_an_untied_readout_acts_once(kind, forward, std, said):
    """Over four times the base's width logits are divided by four: by the hook, by the model, or in the weights."""
    found = plan(Reader(64, kind), base=Reader(16, kind), inputs=IDS, rule=SuPar())
    factors = found.entries["head.weight"].factors
    assert (factors.forward, factors.std) == pytest.approx((forward, std))
    assert found.inputs == ({} if forward == 1 else {"head": forward})
    file = io.StringIO()
    found.report(file=file)
    assert ("input of head × 0.25" in file.getvalue()) == said


@pytest.mark.parametrize("rule", [SuPar(output=2.0), SP(output=2.0)])
def test_a_table_that_reads_out_as_a_bare_tensor_takes_no_multiplier_of_logits(rule):
    model = Reader(16, "bare")
    with pytest.raises(UserError, match=r"table\.weight: got read out in the model as a bare tensor"):
        plan(model, inputs=IDS, rule=rule)
    assert plan(model, inputs=IDS, rule=SuPar()).inputs == {}
