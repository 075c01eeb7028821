"""One client sends what it should not: it is named, and the model is that of a round without it, to the bit."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from idioms.federated.cells import HOSTILE
from idioms.federated.worlds import CLIENTS, METHOD, SCHEDULE, normed, require_same
from sparing.errors import RunError
from sparing.federated import simulate

ATTACKER = 2
PLAN = replace(SCHEDULE, local_epochs=1, batch_size=8)
"""A step or two a client: what arrives is judged, not how it was trained."""


def spoilt(update, part, name, change):
    """The update with one tensor of a part changed."""
    vector = dict(getattr(update, part))
    vector[name] = change(vector[name])
    return replace(update, **{part: vector})


def all_of(update, change):
    return replace(update, params={name: change(name, value) for name, value in update.params.items()})


def without(update, part, name):
    return replace(update, **{part: {key: value for key, value in getattr(update, part).items() if key != name}})


def beside(update, change):
    """The control changed."""
    return replace(update, extras={"control": change(update.extras["control"])})


def fail(update, params):
    raise ZeroDivisionError("no such row")


FIELDS = {
    "parameters NaN": (lambda u, g: spoilt(u, "params", "0.weight", lambda v: v * torch.nan), "not finite (0.weight)"),
    "parameters infinite": (
        lambda u, g: spoilt(u, "params", "3.bias", lambda v: v + torch.inf), "not finite (3.bias)"),
    "parameters × 10⁶": (lambda u, g: all_of(u, lambda n, v: g[n] + 1e6 * (v - g[n])), "times the median update)"),
    "parameters × −10⁶": (lambda u, g: all_of(u, lambda n, v: g[n] - 1e6 * (v - g[n])), "times the median update)"),
    "parameters of another shape": (
        lambda u, g: spoilt(u, "params", "0.weight", lambda v: v.T), "0.weight is (3, 5) float64, the model's (5, 3)"),
    "parameters of another dtype": (
        lambda u, g: spoilt(u, "params", "0.weight", lambda v: v.float()), "float32, the model's (5, 3) float64"),
    "a parameter missing": (lambda u, g: without(u, "params", "0.bias"), "0.bias is only on one side"),
    "a parameter too many": (
        lambda u, g: replace(u, params={**u.params, "x": torch.zeros(1)}), "x is only on one side"),
    "parameters as lists": (
        lambda u, g: spoilt(u, "params", "0.bias", lambda v: v.tolist()), "0.bias is no dense tensor"),
    "sparse parameters": (
        lambda u, g: spoilt(u, "params", "0.weight", lambda v: v.to_sparse()), "0.weight is no dense tensor"),
    "buffers NaN": (
        lambda u, g: spoilt(u, "buffers", "1.running_mean", lambda v: v * torch.nan), "not finite (1.running_mean)"),
    "running_var 10¹²": (
        lambda u, g: spoilt(u, "buffers", "1.running_var", lambda v: v + 1e12), "times the median 1.running_var)"),
    "running_var below zero": (
        lambda u, g: spoilt(u, "buffers", "1.running_var", lambda v: -v), "1.running_var is below zero"),
    "running_mean 10⁹": (
        lambda u, g: spoilt(u, "buffers", "1.running_mean", lambda v: v + 1e9), "times the median 1.running_mean)"),
    "batches counted 2⁶⁰": (
        lambda u, g: spoilt(u, "buffers", "1.num_batches_tracked", lambda v: v + 2**60), "num_batches_tracked)"),
    "batches counted below zero": (
        lambda u, g: spoilt(u, "buffers", "1.num_batches_tracked", lambda v: v - 2**60), "tracked is below zero"),
    "a buffer missing": (lambda u, g: without(u, "buffers", "1.running_var"), "1.running_var is only on one side"),
    "a buffer of another shape": (
        lambda u, g: spoilt(u, "buffers", "1.running_var", lambda v: v[:1]), "1.running_var is (1,) float64"),
    "weight 10¹²": (lambda u, g: replace(u, weight=1e12), "weight (claims 1e+12 and counts 1)"),
    "weight NaN": (lambda u, g: replace(u, weight=float("nan")), "not finite (weight nan)"),
    "weight as text": (lambda u, g: replace(u, weight="most"), "not finite (weight most)"),
    "weight below zero": (lambda u, g: replace(u, weight=-1.0), "not finite (weight -1.0)"),
    "a vector beside the model too many": (
        lambda u, g: replace(u, extras={**u.extras, "more": u.params}), "more beside the model is only on one side"),
    "another client's number": (lambda u, g: replace(u, client=4), "it is not that of the client"),
    "no update at all": (lambda u, g: None, "update: got NoneType"),
    "an exception": (fail, "crash (ZeroDivisionError: no such row)"),
    "control NaN": (
        lambda u, g: beside(u, lambda c: {name: value * torch.nan for name, value in c.items()}), "not finite ("),
    "control × 10⁶": (
        lambda u, g: beside(u, lambda c: {name: 1e6 * v for name, v in c.items()}), "times the median control)"),
    "control missing": (lambda u, g: replace(u, extras={}), "control beside the model is only on one side"),
    "control of another shape": (
        lambda u, g: beside(u, lambda c: {name: value[None] for name, value in c.items()}), "0.weight is (1, 5, 3)"),
    "control of other names": (
        lambda u, g: beside(u, lambda c: {f"{name}s": value for name, value in c.items()}), "is only on one side"),
}  # fmt: skip


def train(method, tamper):
    def touched(update, params):
        return tamper(update, params) if update.client == ATTACKER else update

    return simulate(normed, CLIENTS, METHOD[method], PLAN, engine="loop", tamper=touched)


@functools.cache
def without_the_attacker(method):
    def gone(update, params):
        raise RunError("gone")

    return train(method, gone)


@pytest.mark.parametrize("cell", HOSTILE, ids=lambda cell: cell.name)
def test_it_is_named_and_the_round_goes_on_without_it(cell):
    tamper, says = FIELDS[cell.idiom.removeprefix("one client sends ")]
    run, expected = train(cell.subject, tamper), without_the_attacker(cell.subject)
    for row in run.record:
        assert row["left_out"].startswith(f"client {ATTACKER}: ")
        assert says in row["left_out"]
    require_same(run.params, expected.params)
    require_same(run.buffers, expected.buffers)
    for name, vector in expected.state.server.items():
        require_same(run.state.server[name], vector)
