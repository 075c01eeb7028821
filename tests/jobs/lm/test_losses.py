"""The loss of held-out rows, against transformers' own and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

import zoo
from sparing.jobs.lm.labels import IGNORED
from sparing.jobs.lm.losses import held_out_loss, loss_of, perplexity
from sparing.jobs.lm.packing import Packed


def ragged() -> Packed:
    ids = zoo.tokens(5, 9)["input_ids"]
    labels = ids.clone()
    for row in range(5):
        labels[row, : 2 * row] = IGNORED
    return Packed(ids, labels)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_mean_is_over_labels_not_rows(batch: int) -> None:
    model, data = zoo.llama(dtype=torch.float32), ragged()
    with torch.no_grad():
        want = model(input_ids=data.ids, labels=data.labels).loss.item()  # transformers' own mean over labels
    got, tokens = held_out_loss(model, data, batch=batch)
    assert tokens == 8 + 7 + 5 + 3 + 1
    assert got == pytest.approx(want, rel=1e-6)  # float32 sums in another order


def test_sixteen_bit_logits_are_summed_in_thirty_two() -> None:
    model, data = zoo.llama(dtype=torch.bfloat16), ragged()
    assert loss_of(model, data.ids, data.labels).dtype == torch.float32
    assert loss_of(zoo.llama(), data.ids, data.labels).dtype == torch.float64


def test_perplexity_of_a_hopeless_model_is_infinite_not_an_error() -> None:
    assert perplexity(math.log(7)) == pytest.approx(7, rel=1e-15)
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))
