"""Parameter groups: functions from groups to groups that keep every name once, and their meaning to an optimizer."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zoo
from sparing.blocks import named_parameters
from sparing.errors import UserError
from sparing.groups import Group, bind, drop, groups_of, keep, override, scale

LAW = settings(max_examples=50)
NAMES = tuple("abcdefg")
SUBSETS = st.sets(st.sampled_from(NAMES))
FACTORS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.0]))
OPTIONS = st.fixed_dictionaries({"lr": st.sampled_from([0.1, 0.2, 1.0])}, optional={"betas": st.just([0.9, 0.99])})


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Group, ...]:
    """Groups over all names, some with equal options."""
    order = draw(st.permutations(NAMES))
    cuts = sorted(draw(st.sets(st.integers(1, len(NAMES) - 1))))
    edges = [0, *cuts, len(NAMES)]
    return tuple(Group(tuple(order[i:j]), draw(OPTIONS)) for i, j in pairwise(edges))


def flat(groups: tuple[Group, ...]) -> dict[str, dict]:
    """Options by name, after checking that no name comes twice and no two groups are alike."""
    names = [name for group in groups for name in group.names]
    assert len(names) == len(set(names))
    assert all(a.options != b.options for i, a in enumerate(groups) for b in groups[:i])
    return {name: dict(group.options) for group in groups for name in group.names}


@LAW
@given(partitions(), FACTORS, FACTORS)
def test_scaling_twice_is_scaling_by_the_products(groups: tuple, one: dict, other: dict) -> None:
    twice = flat(scale(scale(groups, one), other))
    once = flat(scale(groups, {name: one.get(name, 1.0) * other.get(name, 1.0) for name in {*one, *other}}))
    assert twice.keys() == once.keys() == set(NAMES)
    # (lr · f) · g and lr · (f · g) round differently, by at most 2 ulp.
    assert all(math.isclose(twice[name]["lr"], once[name]["lr"], rel_tol=4 * 2**-52) for name in NAMES)


@LAW
@given(partitions(), SUBSETS)
def test_keep_and_drop_together_are_the_whole(groups: tuple, names: set) -> None:
    kept, dropped = flat(keep(groups, names)), flat(drop(groups, names))
    assert kept.keys() == names
    assert kept.keys() & dropped.keys() == set()
    assert kept | dropped == flat(scale(groups, {}))


@LAW
@given(partitions(), SUBSETS)
def test_override_sets_these_and_leaves_the_others(groups: tuple, names: set) -> None:
    before, after = flat(scale(groups, {})), flat(override(groups, names, lr=7.0, momentum=0.5))
    assert after == {n: {**o, "lr": 7.0, "momentum": 0.5} if n in names else o for n, o in before.items()}


@LAW
@given(partitions(), FACTORS, SUBSETS)
def test_transformations_commute_and_order_is_of_first_appearance(groups: tuple, factors: dict, names: set) -> None:
    assert flat(override(scale(groups, factors), names, eps=1.0)) == flat(
        scale(override(groups, names, eps=1.0), factors)
    )
    merged = scale(groups, {})
    order = [name for group in groups for name in group.names]
    for group in merged:
        assert list(group.names) == sorted(group.names, key=order.index)
    assert [group.names[0] for group in merged] == sorted((g.names[0] for g in merged), key=order.index)
    assert scale(merged, {}) == merged


def test_arguments_keep_their_values() -> None:
    groups = (Group(("a", "b"), {"lr": 1.0}),)
    before = copy.deepcopy(groups)
    scale(groups, {"a": 2.0})
    override(groups, ["b"], lr=0.0)
    assert groups == before


def test_vectors_do_not_decay_unless_asked_and_tied_weights_come_once() -> None:
    model = zoo.gpt2()
    matrices, vectors = groups_of(model, lr=0.1, weight_decay=0.2, betas=(0.9, 0.95))
    params = named_parameters(model)
    assert {params[name].ndim for name in matrices.names} == {2}
    assert {params[name].ndim for name in vectors.names} == {1}
    assert [matrices.options["weight_decay"], vectors.options["weight_decay"]] == [0.2, 0.0]
    assert vectors.options["betas"] == (0.9, 0.95)
    (everything,) = groups_of(model, lr=0.1, weight_decay=0.2, decay_vectors=True)
    assert everything.names == tuple(params)
    assert len(groups_of(model, lr=0.1)) == 1


def test_bound_groups_step_as_groups_made_by_hand() -> None:
    model = zoo.llama(layers=2)
    twin = copy.deepcopy(model)
    groups = groups_of(model, lr=1e-2, weight_decay=0.1)
    groups = scale(groups, {"lm_head.weight": 0.5})
    groups = override(groups, ["model.norm.weight"], lr=0.0)
    optimizer = torch.optim.AdamW(bind(groups, nn.DataParallel(model)))
    vectors = [p for name, p in twin.named_parameters() if p.ndim < 2 and name != "model.norm.weight"]
    matrices = [p for name, p in twin.named_parameters() if p.ndim > 1 and name != "lm_head.weight"]
    by_hand = torch.optim.AdamW(
        [
            {"params": matrices, "lr": 1e-2, "weight_decay": 0.1},
            {"params": vectors, "lr": 1e-2, "weight_decay": 0.0},
            {"params": [twin.lm_head.weight], "lr": 5e-3, "weight_decay": 0.1},
            {"params": [twin.model.norm.weight], "lr": 0.0, "weight_decay": 0.0},
        ]
    )
    for net, rule in ((model, optimizer), (twin, by_hand)):
        for step in range(2):
            net(**zoo.tokens(seed=step)).loss.backward()
            rule.step()
            rule.zero_grad()
    # The same operations on the same numbers, only grouped otherwise: equal to the bit.
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(dict(twin.named_parameters()))


def test_misspelt_names_and_options_are_refused() -> None:
    model = zoo.gpt2()
    groups = groups_of(model, lr=0.1)
    for call in (
        lambda: scale(groups, {"nope": 2.0}),
        lambda: keep(groups, ["nope"]),
        lambda: drop(groups, "lm_head.weight"),
        lambda: override(groups, ["nope", "nor this"], lr=1.0),
        lambda: bind((Group(("nope",), {}),), model),
    ):
        with pytest.raises(UserError, match=r"nope|nor this|lm_head\.weight"):
            call()
    with pytest.raises(UserError, match=r"use its owner 'transformer\.wte\.weight'"):
        bind((Group(("lm_head.weight",), {}),), model)
    with pytest.raises(UserError, match="twice"):
        bind((*groups, *groups), model)
    with pytest.raises(UserError, match=r"'momentum'.* has lr, weight_decay"):
        scale(groups, {"transformer.wte.weight": 2.0}, option="momentum")
    with pytest.raises(UserError, match="'params'"):
        override(groups, [], params=1)


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"lr": math.nan}, {"lr": 1.0, "weight_decay": -0.1}, {"lr": 1, "param_names": []}]
)
def test_impossible_options_are_refused(bad: dict) -> None:
    with pytest.raises(UserError):
        groups_of(nn.Linear(1, 1), **bad)
