"""Roles from places and times: each rule on a tree small enough to do by hand."""

from __future__ import annotations

import math

import pytest
from torch import nn

from sparing.blocks.names import Place
from sparing.blocks.order import Order
from sparing.blocks.roles import Plan, body_order, inside, last_matrix, role_of, timeline_of, tree_of


@pytest.mark.parametrize(
    ("name", "path", "answer"),
    [
        ("a.b.weight", "a.b", True),
        ("a.bc.weight", "a.b", False),
        ("a.b", "a.b", True),
        ("a", "a.b", False),
        ("anything", "", True),
        ("anything", None, False),
    ],
)
def test_inside_goes_by_whole_parts_of_a_path(name: str, path: str | None, answer: bool) -> None:
    assert inside(name, path) is answer


def model() -> nn.ModuleDict:
    """Registered late to early: output, norm, two blocks, input."""
    return nn.ModuleDict(
        {
            "out": nn.Linear(2, 2, bias=False),
            "norm": nn.LayerNorm(2, bias=False),
            "one": nn.Linear(2, 2),
            "two": nn.Linear(2, 2),
            "start": nn.Embedding(2, 2),
        }
    )


def roles(net: nn.ModuleDict, order: Order, **plan) -> dict[str, str]:
    blocks = [Place("two", net["two"]), Place("one", net["one"])]
    plan = Plan(blocks=blocks, **plan)
    tree = tree_of(net, blocks)
    clock = timeline_of(tree, plan, order)
    of = {id(p): role_of(id(p), tree, plan, clock) for p in net.parameters()}
    return {name: of[id(part.weight)] for name, part in net.items()}


def seen(net: nn.ModuleDict, *names: str, complete: bool = True) -> Order:
    uses = [(id(p), time) for time, name in enumerate(names) for p in net[name].parameters()]
    return Order(dict(reversed(uses)), dict(uses), complete=complete)


FULL = ("start", "one", "two", "norm", "out")
RIGHT = {"out": "tail", "norm": "tail", "one": "body", "two": "body", "start": "embed"}


def test_what_was_seen_counts_more_than_registration() -> None:
    net = model()
    assert roles(net, seen(net, *FULL)) == RIGHT
    assert roles(net, Order()) == {**RIGHT, "out": "embed", "norm": "embed", "start": "tail"}


def test_what_is_used_between_blocks_is_embed() -> None:
    net = model()
    assert roles(net, seen(net, "start", "one", "norm", "two", "norm", "out"))["norm"] == "embed"


def test_a_forward_cut_short_has_seen_only_what_comes_before_the_end() -> None:
    net = model()
    assert roles(net, seen(net, "start", complete=False)) == {**RIGHT, "out": "embed", "norm": "embed"}
    assert roles(net, seen(net, "start", "one", "norm", complete=False))["start"] == "embed"


def test_known_parts_beat_times() -> None:
    net = model()
    order = seen(net, *FULL)
    assert roles(net, order, head="out")["out"] == "head"
    assert roles(net, order, embed="norm")["norm"] == "embed"
    assert roles(net, order, backbone="norm") == {**RIGHT, "out": "head"}
    assert roles(net, Order(), tower="norm", head="out") == {**RIGHT, "out": "head", "norm": "embed"}


@pytest.mark.parametrize(("owner", "role"), [("start", "embed"), ("one", "body"), ("norm", "head")])
def test_a_tied_head_belongs_to_the_first_user_but_not_to_the_tail(owner: str, role: str) -> None:
    net = model()
    net["norm"] = nn.Linear(2, 2, bias=False)
    net["out"].weight = net[owner].weight
    order = seen(net, *FULL)
    assert roles(net, order, head="out")["out"] == role


def test_the_last_matrix_is_the_head_and_a_last_norm_is_not() -> None:
    net = model()
    blocks = [Place("one", net["one"]), Place("two", net["two"])]
    tree = tree_of(net, blocks)
    for names, expected in ((FULL, {id(net["out"].weight)}), (("start", "one", "two", "out", "norm"), set())):
        clock = timeline_of(tree, Plan(blocks=blocks), seen(net, *names))
        tails = {id(net[name].weight): "tail" for name in ("out", "norm")}
        assert last_matrix(tails, tree, clock) == expected
    assert last_matrix({}, tree, clock) == set()


def test_blocks_stand_in_order_of_use_where_it_was_seen() -> None:
    net = model()
    blocks = [Place("two", net["two"]), Place("one", net["one"])]
    tree = tree_of(net, blocks)
    plan = Plan(blocks=blocks)
    assert body_order(tree, timeline_of(tree, plan, seen(net, *FULL))) == [1, 0]
    for order in (Order(), seen(net, "start", "one", complete=False)):
        assert body_order(tree, timeline_of(tree, plan, order)) == [0, 1]
    assert timeline_of(tree, plan, Order()).first[id(net["start"].weight)] == math.inf
