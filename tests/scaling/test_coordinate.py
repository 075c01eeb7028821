"""The coordinate check: the reference numbers and rules that must fail; families of models are in a benchmark."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparing.errors import UserError
from sparing.report import Record
from sparing.scaling.check.coordinate import Check, coordinate_check
from sparing.scaling.check.slopes import slope
from sparing.scaling.masks.laws import Bernoulli
from sparing.scaling.rules import SP, InitOnly, MuP, RateOnly, SuPar


class Net(nn.Sequential):
    """32 → width × 4 → 8 with ReLU; N(0, 2/64) at any width, readout zero where asked."""

    def __init__(self, width: int, *, zero: bool = False) -> None:
        sizes = [32, width, width, width, width, 8]
        layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=(2 / 64 if layer.in_features == width else 2 / 32) ** 0.5)
            nn.init.zeros_(layer.bias)
        if zero:
            nn.init.zeros_(layers[-1].weight)
        super().__init__(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


REFERENCE = {"lr": 2e-3, "steps": 7, "base_width": 64, "masks": Bernoulli()}
DENSITIES = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)


@cache
def reference(rule: type) -> Check:
    """The setting of the source's table: base 64, Adam at 2e-3, Bernoulli masks, third square layer."""
    return coordinate_check(Net, (256,), DENSITIES, rule=rule(), seeds=(0, 1), **REFERENCE)


def deepest(check: Check, step: int) -> float:
    """Slope of the third square layer's output over all six densities."""
    rows = [row for row in check.rows if row["module"] == "6" and row["step"] == step]
    return slope((row["density"], row["forward"]) for row in rows)


@pytest.mark.parametrize(
    ("rule", "start", "after", "margin"),
    [
        # Each of three layers loses √density where init is not corrected. The published t = 6 value of the rate-only
        # rule, 0.83, hangs on the readout's scale, which is not published: ours is 1.1, between 0 and 1.5 all the same.
        (SP, 1.5, 1.5, 0.2),  # published after six steps: 1.50, and 1.57 for μP; training moves it with the data
        (MuP, 1.5, 1.5, 0.2),
        (RateOnly, 1.5, 0.95, 0.35),
        (InitOnly, 0.0, 0.0, 0.1),
        (SuPar, 0.0, 0.0, 0.05),
    ],
)
def test_the_reference_table(rule, start, after, margin):
    check = reference(rule)
    assert deepest(check, 0) == pytest.approx(start, abs=0.1)
    assert deepest(check, 6) == pytest.approx(after, abs=margin)


def test_supar_passes_over_density_and_the_others_do_not():
    assert reference(SuPar).passed, [str(one) for one in reference(SuPar).failures]
    for rule in (SP, MuP, RateOnly):
        assert not reference(rule).passed
        assert reference(rule).worst.slope > 0.4


def test_init_only_fails_by_its_updates():
    """Outputs begin right; the change of a layer is too small by the density."""
    failed = reference(InitOnly).failures
    assert failed
    assert {one.stat for one in failed} <= {"update", "forward", "gradient"}
    hidden = [one.slope for one in failed if one.stat == "update" and one.role == "hidden"]
    assert min(hidden) > 0.5


@pytest.mark.parametrize(("rule", "ratio"), [(SP, 8.0), (SuPar, 1.0)])
def test_over_width_only_the_standard_rule_grows(rule, ratio):
    """Constant init: three layers grow by √4 each from 128 to 512 under SP. Within 25 %: two seeds of 128 neurons."""
    check = coordinate_check(Net, (128, 512), (1 / 8,), rule=rule(), seeds=(0, 1), **REFERENCE)
    sizes = {}
    for row in check.rows:
        if row["module"] == "6" and row["step"] == 6:
            sizes.setdefault(row["width"], []).append(math.log(row["forward"]))
    assert math.exp(sum(sizes[512]) / 2 - sum(sizes[128]) / 2) == pytest.approx(ratio, rel=0.25)


def test_at_the_base_every_rule_gives_the_same_rows():
    rows = [coordinate_check(Net, (32,), (1,), rule=rule(), steps=3).rows for rule in (SP, MuP, SuPar, InitOnly)]
    assert all(other == rows[0] for other in rows)


def test_the_global_generator_is_as_before_and_runs_repeat():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = coordinate_check(Net, (32,), (1, 0.5), steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert coordinate_check(Net, (32,), (1, 0.5), steps=2).rows == first.rows


def test_gradient_descent_passes_over_density():
    """At 512: its updates go with the square of activations, which scatter more in narrower nets."""
    check = coordinate_check(
        lambda width: Net(width, zero=True), (512,), (1, 1 / 2, 1 / 4), optimizer="sgd", lr=2**-9, steps=3,
        seeds=range(4), base_width=128,
    )  # fmt: skip
    assert check.passed, [str(one) for one in check.failures]


def test_it_can_be_drawn_and_recorded(tmp_path):
    check = reference(SuPar)
    figures = check.plot()
    record = check.record()
    assert [figure.title.split(":")[0] for figure in figures] == ["SuPar"] * 3
    assert "density" in figures[0].alt
    assert Record.read(record.write(tmp_path / "check.jsonl")).rows == record.rows
    assert len(record.table("coordinates")) == len(check.rows)
    assert len(record.table("slopes")) == len(check.slopes)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"widths": ()}, "widths"),
        ({"densities": (0.0,)}, "live fractions"),
        ({"steps": 0}, "step"),
        ({"optimizer": "muon"}, "adam"),
        ({"make_model": lambda width: nn.Conv2d(3, width, 3)}, "batch"),
        ({"loss": lambda model, batch: model(batch[0])}, "one number"),
    ],
)
def test_what_cannot_be_checked_is_refused(wrong, word):
    given = {"make_model": Net, "widths": (32,), "densities": (1.0,)} | wrong
    with pytest.raises(UserError, match=word):
        coordinate_check(given.pop("make_model"), given.pop("widths"), given.pop("densities"), **given)


class Attending(nn.Module):
    """One attention between a stem and a readout; heads are as wide as the net, or of eight."""

    def __init__(self, width: int, size: int | None = None) -> None:
        super().__init__()
        self.size = width if size is None else size
        self.stem, self.head = nn.Linear(16, width, bias=False), nn.Linear(width, 8, bias=False)
        self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        for layer in (self.stem, self.mix, self.out, self.head):
            nn.init.normal_(layer.weight, std=1 / 4 if layer is self.stem else 1 / 8)

    def forward(self, x):
        x = self.stem(x)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def rows_of_numbers(count: int):
    generator = torch.Generator().manual_seed(1)
    made = lambda: (torch.randn(1, 4, 16, generator=generator), torch.randint(8, (1, 4), generator=generator))  # noqa: E731
    return [made() for _ in range(count)]


def attending(rule=None, size=None, **options) -> Check:
    return coordinate_check(
        lambda width: Attending(width, size), (64, 128, 256), (1,), rule=rule, batch=rows_of_numbers(1), base_width=64,
        planned={"init": {"*": "constant"}}, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("attention", "expected"), [(True, 0.0), (False, 0.5)])
def test_logits_move_alike_at_any_width_only_under_one_over_d(attention, expected):
    """Changes of queries and keys are coherent sums over a head: over d they keep their size, over √d they grow as √d.

    Within 0.1: four seeds of 64 to 256 neurons on four tokens; standard errors are 0.07.
    """
    (found,) = [one for one in attending(SuPar(attention=attention)).slopes if one.role == "logits" and one.limit]
    assert (found.module, found.stat, found.along) == (" logits", "update", "width")
    assert found.slope == pytest.approx(expected, abs=0.1)
    assert found.passed == attention


def test_own_batches_are_taken_in_turn():
    """A list of two is stepped on as one, two, one; of one batch every step sees the same."""
    one, two = rows_of_numbers(2)
    losses = [
        {
            row["step"]: row["loss"]
            for row in coordinate_check(
                Attending, (64,), (1,), batch=given, steps=3, seeds=(0,), lr=2**-30, planned={"init": {"*": "constant"}}
            ).rows
        }
        for given in ([one, two], one, [two])
    ]
    both, first, second = losses
    assert [both[0], both[1], both[2]] == pytest.approx([first[0], second[1], first[2]], rel=1e-5)
    assert first[0] != pytest.approx(second[0], rel=1e-3)
    with pytest.raises(UserError, match="an empty list"):
        coordinate_check(Attending, (64,), (1,), batch=[])
