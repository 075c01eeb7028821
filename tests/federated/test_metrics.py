"""Every number of a round's row, by hand on tiny vectors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparing.federated.metrics import (
    Accuracy,
    bytes_of,
    evaluation_columns,
    flips,
    pair_agreement,
    param_kinds,
    round_row,
    update_cosine,
)
from sparing.seeds import stream
from sparing.vectors import sign_agreement

BEFORE = {"w": torch.tensor([1.0, -1.0, 2.0, 0.0]), "b": torch.tensor([1.0])}
ONE = {"w": torch.tensor([1.0, 1.0, 2.0, 3.0]), "b": torch.tensor([-1.0])}
TWO = {"w": torch.tensor([2.0, -1.0, 2.0, -1.0]), "b": torch.tensor([1.0])}
KINDS = {"w": "linear", "b": "bias"}


def test_accuracy_and_loss():
    model = nn.Linear(1, 2, bias=False)
    model.weight.data = torch.tensor([[0.0], [1.0]])
    model.train()
    found = Accuracy(torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([1, 0, 0]), batch=2)(model)
    softplus = [math.log(1 + math.exp(x)) for x in (-1, 2, -1)]
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["loss"] == pytest.approx(sum(softplus) / 3, rel=1e-6)  # logits are float32
    assert model.training


def test_kinds():
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Linear(1, 1), nn.Embedding(2, 1), nn.LayerNorm(1))
    model[2].weight.requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(1))
    assert param_kinds(model) == {
        "scale": "other",
        "0.weight": "conv",
        "0.bias": "bias",
        "1.weight": "norm",
        "1.bias": "norm",
        "2.bias": "bias",
        "3.weight": "embedding",
        "4.weight": "norm",
        "4.bias": "norm",
    }


def test_pairs_by_hand():
    """Of the five elements all vote; the first and third agree."""
    assert pair_agreement([ONE, TWO]) == 2 / 5
    assert pair_agreement([ONE, BEFORE]) == 2 / 4  # a zero votes for nobody
    assert pair_agreement([ONE, TWO, BEFORE]) == pytest.approx((2 / 5 + 2 / 4 + 4 / 4) / 3)
    assert math.isnan(pair_agreement([ONE]))


def test_pairs_equal_the_plain_function_where_clients_sent_different_names():
    source = stream(1, "pairs")
    vectors = [{"a": torch.randn(50, generator=source), "b": torch.randn(7, generator=source).round()} for _ in "123"]
    del vectors[1]["b"]
    pairs = [(0, 1), (0, 2), (1, 2)]
    plain = [
        float(sign_agreement(*({n: vectors[i][n] for n in vectors[x] if n in vectors[y]} for i in (x, y))))
        for x, y in pairs
    ]
    assert pair_agreement(vectors) == pytest.approx(sum(plain) / 3, rel=1e-14)


def test_long_tensors_are_counted_in_pieces(monkeypatch):
    monkeypatch.setattr("sparing.federated.metrics._CHUNK", 3)
    assert pair_agreement([ONE, TWO]) == 2 / 5


def test_flips_by_kind():
    assert flips(BEFORE, ONE, KINDS) == {"linear": 1 / 3, "bias": 1.0}
    assert flips(BEFORE, TWO, KINDS) == {"linear": 0.0, "bias": 0.0}
    assert flips({"b": torch.zeros(2)}, {"b": torch.ones(2)}, KINDS) == {}


def test_cosine_of_updates():
    """Updates (0, 2, 0, 3, −2) and (1, 0, 0, −1, 0)."""
    assert update_cosine(BEFORE, [ONE, TWO]) == pytest.approx(-3 / (17**0.5 * 2**0.5), rel=1e-14)
    part = {"w": ONE["w"]}  # its bias counts as an update of zero
    assert update_cosine(BEFORE, [part, TWO]) == pytest.approx(-3 / (13**0.5 * 2**0.5), rel=1e-14)
    assert math.isnan(update_cosine(BEFORE, [ONE, BEFORE]))
    assert math.isnan(update_cosine(BEFORE, [ONE]))


def test_bytes():
    assert bytes_of(ONE, {"c": ONE}, {"n": torch.tensor(3)}, {}) == 20 + 20 + 8


def test_row():
    after = {"w": torch.tensor([3.0, 0.0, 0.0, 4.0]), "b": torch.zeros(1)}
    row = round_row(BEFORE, after, [ONE, TWO], KINDS)
    assert row == {
        "ssr_global": pytest.approx((2 / 4 + 1) / 2),
        "ssr_pairs": 2 / 5,
        "flips_linear": pytest.approx(1 / 6),
        "flips_bias": 0.5,
        "norm": 5.0,
        "rms_linear": 2.5,
        "rms_bias": 0.0,
        "update_cosine": pytest.approx(-3 / 34**0.5),
        "update_norm": pytest.approx((17**0.5 + 2**0.5) / 2),
    }
    nobody = round_row(BEFORE, after, [], KINDS)
    assert nobody["norm"] == 5.0
    assert "ssr_global" not in nobody


def test_fusion_gap():
    row = evaluation_columns(
        {"accuracy": 0.9, "loss": 1.0}, [{"accuracy": 0.6, "loss": 2.0}, {"accuracy": 0.8, "loss": 3.0}]
    )
    assert row == {
        "accuracy": 0.9,
        "loss": 1.0,
        "client_accuracy": pytest.approx(0.7),
        "client_loss": 2.5,
        "fusion_gap": pytest.approx(0.2),
    }
    assert evaluation_columns({"accuracy": 0.9}, []) == {"accuracy": 0.9}
