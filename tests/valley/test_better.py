"""Names of metrics as libraries and users write them."""

from __future__ import annotations

import pytest

from sparing.valley.scans.better import better_by_metric

HIGHER = (
    "Top-1", "acc@1", "top1_acc", "top_5_accuracy", "test_Top-5", "val/acc@5", "recall@10", "f1_macro", "f1-score",
    "roc-auc", "mAP", "accuracy_score", "spearman", "eval-accuracy", "exact match",
)  # fmt: skip
UNKNOWN = ("-loss", "1-accuracy", "top1_error", "neg_mean_squared_error", "accuracy drop", "map_loss", "top")


@pytest.mark.parametrize("name", HIGHER)
def test_a_score_by_any_of_its_names_rises(name):
    assert better_by_metric([name]) == {name: "higher"}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_is_turned_round_or_unclear_says_nothing(name):
    assert better_by_metric([name]) == {}


@pytest.mark.parametrize("name", ["log-loss", "val_mean_squared_error", "negative log-likelihood", "test-NLL"])
def test_a_cost_by_any_of_its_names_falls(name):
    assert better_by_metric([name]) == {name: "lower"}
