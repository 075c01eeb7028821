"""Splits: partitions, shares in expectation, the two Dirichlet rules, redraws, files."""

from __future__ import annotations

import json

import pytest
import torch

from refusals import refused
from sparing.federated import splits
from sparing.federated.splits import Split, dirichlet, load, natural, save, shards

LABELS = torch.arange(600) % 5


def rows_of(split):
    return sorted(row for rows in split.clients for row in rows)


@pytest.mark.parametrize("rule", ["classes", "clients"])
@pytest.mark.parametrize("alpha", [0.05, 0.5, 10.0])
def test_dirichlet_is_a_partition_without_empty_clients(rule, alpha):
    split = dirichlet(LABELS, 8, alpha, rule=rule, seed=3)
    assert rows_of(split) == list(range(600))
    assert len(split) == 8
    assert all(split.clients)
    assert (split.rule, split.alpha, split.seed) == (rule, alpha, 3)
    assert split == dirichlet(LABELS, 8, alpha, rule=rule, seed=3)
    assert split != dirichlet(LABELS, 8, alpha, rule=rule, seed=4)


@pytest.mark.parametrize("rule", ["classes", "clients"])
def test_shares_of_a_class_are_one_over_k_in_expectation(rule):
    """All clients are alike before the draw. 150 draws; the standard error of a mean share is below 0.011."""
    shares = torch.zeros(4, 5)
    for seed in range(150):
        shares += dirichlet(LABELS, 4, 1.0, rule=rule, seed=seed, least=0).counts(LABELS) / 120
    # Only where a class is drawn before any client is full are the shares those of the plain distribution.
    assert (shares / 150 - 0.25).abs().max() < 0.05


def test_variance_of_shares_is_that_of_the_dirichlet_distribution():
    """One class, rule "classes": Var = (1/K)(1 - 1/K)/(K alpha + 1), Dirichlet's own; here 0.0625 and K = 4."""
    one = torch.zeros(1000, dtype=torch.long)
    shares = torch.stack([dirichlet(one, 4, 0.5, seed=seed, least=0).counts(one)[:, 0] / 1000 for seed in range(300)])
    expected = 0.25 * 0.75 / (4 * 0.5 + 1)
    # 1,200 dependent squares of relative spread ~1.5: a standard error of about 6 %.
    assert shares.var(0, correction=1).mean().item() == pytest.approx(expected, rel=0.2)


def test_rule_clients_divides_columns_and_rounds():
    """The draw itself, redone with plain numbers from the same stream."""
    labels = torch.arange(40) % 2
    source = splits.stream(7, "split", "clients", 0)
    logs = splits._log_gammas((3, 2), 2.0, source)
    matrix = logs.exp() / logs.exp().sum(1, keepdim=True)
    matrix /= matrix.sum(0)
    expected = [[], []]
    for column in (0, 1):
        ends = [0] + [round(float(x)) for x in matrix[:, column].cumsum(0) * 20]
        expected[column] = [ends[i + 1] - ends[i] for i in range(3)]
    counts = dirichlet(labels, 3, 2.0, rule="clients", seed=7).counts(labels)
    assert counts.T.tolist() == expected


def test_rule_classes_gives_full_clients_nothing_more():
    """With a tiny alpha one client takes a whole class (more than n/K rows) and stands aside for all others."""
    labels = torch.arange(60) % 3
    for seed in range(5):
        counts = dirichlet(labels, 3, 1e-3, seed=seed, least=0).counts(labels)  # the first draw, whatever it gave
        assert sorted(counts.flatten().tolist()) == [0] * 6 + [20] * 3
        assert counts.sum(1).tolist() == [20, 20, 20]


@pytest.mark.parametrize("alpha", [0.01, 0.5, 30.0])
def test_log_gammas_have_the_mean_of_the_distribution(alpha):
    draws = splits._log_gammas((40_000,), alpha, splits.stream(1, "test")).exp()
    assert draws.mean().item() == pytest.approx(alpha, rel=6 / (40_000 * alpha) ** 0.5)  # six standard errors


def test_large_alpha_is_even_and_small_alpha_is_not():
    even, uneven = (dirichlet(LABELS, 4, alpha, rule="clients").counts(LABELS) / 120 for alpha in (1e4, 0.05))
    assert (even - 0.25).abs().max() < 0.02
    assert uneven.max(0).values.mean() > 0.6


def test_redrawn_until_everyone_has_the_least():
    split = dirichlet(LABELS, 8, 0.3, rule="clients", seed=1, least=60)
    assert min(map(len, split.clients)) >= 60
    first = dirichlet(LABELS, 8, 0.3, rule="clients", seed=1, least=0)
    assert min(map(len, first.clients)) < 60  # so the first draw was refused


def test_hopeless_draws_end_in_an_error(monkeypatch):
    monkeypatch.setattr(splits, "MAX_DRAWS", 5)
    refused(r"in each of 5 draws.*raise alpha", dirichlet, torch.zeros(100, dtype=torch.long), 50, 0.01, rule="classes")


def test_shards():
    split = shards(LABELS, 10, 2, seed=5)
    assert rows_of(split) == list(range(600))
    assert [len(rows) for rows in split.clients] == [60] * 10
    assert ((split.counts(LABELS) > 0).sum(1) <= 2).all()  # 20 shards of 30 rows: none crosses a class of 120
    assert split != shards(LABELS, 10, 2, seed=6)


def test_natural():
    assert natural([3, 1, 3, 2]) == Split(((0, 2), (1,), (3,)), "natural", None, 0)


def test_files(tmp_path):
    split = dirichlet(LABELS, 8, 0.5, seed=3)
    assert load(save(split, tmp_path / "split.json"), LABELS) == split
    refused("the split was made for others", load, tmp_path / "split.json", LABELS.flip(0))
    assert load(save(natural("ab"), tmp_path / "natural.json"), LABELS).alpha is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 9}, "version 1"),
        ({"clients": [[0, 1], [1]]}, "each with one client"),
        ({"clients": [[0], []]}, "a client without rows"),
        ({"clients": [[0.5]]}, "rows must be numbers"),
        ({"clients": None}, "not a whole split"),
    ],
)
def test_damaged_files(tmp_path, change, why):
    path = save(natural("abc"), tmp_path / "split.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(why, load, path)


def test_missing_and_torn_files(tmp_path):
    refused("cannot be read", load, tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"format": ')
    refused("not a whole split", load, tmp_path / "torn.json")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: dirichlet(LABELS, 4, 0.0), "positive concentration"),
        (lambda: dirichlet(LABELS, 4, float("nan")), "positive concentration"),
        (lambda: dirichlet(LABELS, 0, 1.0), "someone must hold"),
        (lambda: dirichlet(LABELS, 4, 1.0, rule="rows"), "two Dirichlet rules"),
        (lambda: dirichlet(LABELS, 601, 1.0), "pass fewer clients"),
        (lambda: dirichlet(LABELS.double(), 4, 1.0), "one class number a row"),
        (lambda: dirichlet(LABELS - 1, 4, 1.0), "counted from 0"),
        (lambda: shards(LABELS, 301, 2), "only 600 rows"),
        (lambda: natural([]), "nothing to split"),
    ],
)
def test_bad_input(call, why):
    refused(why, call)


def test_many_clients_cost_one_pass():
    """The rules of before, by their plain loops, at numbers where a pass for each client would show."""
    labels = torch.arange(3000) % 7
    split = dirichlet(labels, clients=900, alpha=50.0, seed=3, least=0)
    assert sorted(row for rows in split.clients for row in rows) == list(range(3000))
    assert all(list(rows) == sorted(rows) for rows in split.clients)
    plain = torch.stack([torch.bincount(labels[list(rows)], minlength=7) for rows in split.clients])
    assert torch.equal(split.counts(labels), plain)
    dealt = shards(labels, clients=13, per_client=3, seed=1)
    sizes = sorted(map(len, dealt.clients))
    assert sum(sizes) == 3000
    assert sizes[-1] - sizes[0] <= 3  # each shard has one row more at the most
