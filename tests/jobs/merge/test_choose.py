import itertools
import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from sparing.jobs.merge import settings as groups
from sparing.jobs.merge.choose import Candidate, by_rows, candidates, greedy, subset
from sparing.jobs.merge.settings import How, Settings
from sparing.valley.merging.breadcrumbs import Breadcrumbs
from sparing.valley.merging.dare import Dare
from sparing.valley.merging.della import Della
from sparing.valley.merging.linear import Linear, TaskArithmetic
from sparing.valley.merging.sce import Sce
from sparing.valley.merging.sign_aware import SignAware
from sparing.valley.merging.spherical import ModelStock, MultiSlerp, Slerp
from sparing.valley.merging.ties import Ties
from sparing.valley.recipes import methods as recipes


def settings(how="auto", **changes):
    return Settings(models=(Path("a"), Path("b"), Path("c")), method=how, **changes)


BASED = {"base": Path("base")}
W = {"model_weights": (1.0, 2.0, 3.0)}


@pytest.mark.parametrize(
    ("how", "changes", "method"),
    [
        ("soup", {}, Linear()),
        ("linear", W, Linear(W["model_weights"])),
        ("multislerp", W, MultiSlerp(W["model_weights"])),
        ("multislerp", BASED, MultiSlerp(of_changes=True)),
        ("karcher", {}, MultiSlerp(steps=10)),
        ("model-stock", BASED | {"model_stock": groups.ModelStock(across="rows")}, ModelStock("rows")),
        ("task", BASED, TaskArithmetic(0.4)),
        (
            "task",
            BASED | {"factor": 0.7, "model_weights": (1.0, -1.0, 2.0)},
            TaskArithmetic(0.7, weights=(1.0, -1.0, 2.0)),
        ),
        ("ties", BASED | W, Ties(0.2, weights=W["model_weights"])),
        ("ties", BASED | {"ties": groups.Ties(keep=0.5)}, Ties(0.5, scale=1.0)),
        ("dare", BASED | {"dare": groups.Dare(drop=0.3), "seed": 4}, Dare(0.3, then=TaskArithmetic(0.4), seed=4)),
        ("dare-ties", BASED | {"dare": groups.Dare(drop=0.3)}, Dare(0.3, then=Ties(1.0))),
        ("breadcrumbs", BASED, Breadcrumbs(0.9, 0.01, then=TaskArithmetic(0.4))),
        ("breadcrumbs-ties", BASED | {"breadcrumbs": groups.Breadcrumbs(keep=0.5)}, Breadcrumbs(0.5, then=Ties(1.0))),
        ("della", BASED | W, Della(0.7, 0.15, then=Ties(1.0, weights=W["model_weights"]))),
        ("della-linear", BASED | {"della": groups.Della(drop=0.5)}, Della(0.5, 0.15, then=TaskArithmetic(0.4))),
        ("sce", BASED | {"sce": groups.Sce(keep=0.3)}, Sce(0.3)),
        ("sign-aware", BASED, SignAware(0.2, scale=1.0)),
        ("auto", BASED, Linear()),
    ],
)
def test_a_name_means_one_method_where_nothing_can_choose(how, changes, method):
    (only,) = candidates(settings(how, **changes), measured=False)
    assert only.method == method


def test_two_models_meet_on_an_arc():
    def method(how, **changes):
        (only,) = candidates(Settings(models=(Path("a"), Path("b")), method=how, **changes), measured=False)
        return only.method

    assert method("slerp", slerp=groups.Slerp(t=0.2, across="rows"), **BASED) == Slerp(0.2, across="rows")
    assert method("nuslerp", model_weights=(1.0, 3.0)) == Slerp(0.75, straight_above=1.0)
    assert method("nuslerp", **BASED) == Slerp(0.5, of_changes=True, straight_above=1.0)


def test_every_method_of_recipes_has_a_name_here():
    """But passthrough, which is of one model; names of mergekit's that are other words here are given."""
    other = {"task_arithmetic": "task", "dare_linear": "dare"}
    names = {other.get(name, name.replace("_", "-")) for name in recipes.SETTINGS}
    assert names - set(get_args(How)) == {"passthrough"}


def test_validation_rows_choose_the_scale_and_auto_the_way():
    tried = candidates(settings("ties", **BASED), measured=True)
    assert [way.method.scale for way in tried] == [0.5, 0.7, 1.0, 1.5]
    (given,) = candidates(settings("ties", factor=3.0, **BASED), measured=True)
    assert given.name == "ties, λ = 3"
    assert {way.how for way in candidates(settings(**BASED), measured=True)} == {"soup", "task", "ties", "sign-aware"}
    assert [way.name for way in candidates(settings(), measured=True)] == ["soup"]


def _scores(loss):
    return torch.tensor([[loss, 0.0, 1.0]], dtype=torch.float64)


def test_greedy_adds_models_best_first_while_the_loss_does_not_rise():
    """Against the rule spelt out over a table of losses of every subset."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        table = {
            members: float(torch.rand((), generator=generator))
            for size in (1, 2, 3, 4)
            for members in itertools.combinations(range(4), size)
        }
        found = greedy([_scores(table[at,]) for at in range(4)], lambda way, table=table: _scores(table[way.members]))
        kept = []
        for at in sorted(range(4), key=lambda at, table=table: table[at,]):
            if not kept or table[tuple(sorted([*kept, at]))] <= table[tuple(sorted(kept))]:
                kept.append(at)
        assert found.members == tuple(sorted(kept))
        assert found.method.weights == tuple(float(at in kept) for at in range(4))


def test_rows_decide_for_the_best_way_unless_it_loses():
    soup, ties = Candidate("soup", Linear()), Candidate("ties", Ties(), 1.0)
    made = by_rows({"soup": 3.0, "ties, λ = 1": 2.0}, [2.5, 2.5], [soup, ties], low=-0.6)
    assert made.candidate == ties
    assert "of 2 ways tried, ties, λ = 1 is best: 2.00 nats" in made.reason
    lost = by_rows({"soup": 3.0}, [2.0, 2.0], [soup], low=0.1)
    assert lost.candidate is None
    assert "worse than its parts" in lost.reason
    alone = by_rows({"greedy of B": 1.0}, [2.0, 1.0], [subset([1], 2)], low=-0.5)
    assert alone.candidate is None
    assert "no mean is better than B alone" in alone.reason


def test_a_loss_that_is_no_number_is_never_the_best():
    soup, ties = Candidate("soup", Linear()), Candidate("ties", Ties(), 1.0)
    none = by_rows({"soup": math.inf, "ties, λ = 1": math.inf}, [2.0, 2.0], [soup, ties], low=math.inf)
    assert none.candidate is None
    assert "no way gives finite losses" in none.reason
    found = greedy([_scores(math.nan), _scores(2.0)], lambda way: _scores(math.nan))
    assert found.members == (1,)
