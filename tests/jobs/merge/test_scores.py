import math

import pytest
import torch
from torch import nn

from sparing.jobs.merge.scores import Rows, decisive, gaps, means
from sparing.report.pairs import mcnemar, paired_bootstrap


class Fixed(nn.Module):
    """Gives the logits it was made with, a row for each input number."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return self.logits[x[:, 0].long()]


def test_scores_of_images_by_hand():
    model = Fixed(torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [0.0, 2.0]]))
    rows = Rows(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([1, 0, 0]))
    found = rows.scores(model)
    expected = [math.log(2), math.log(4 / 3), math.log(1 + math.exp(2))]
    assert found[:, 0].tolist() == pytest.approx(expected, rel=1e-6)  # logits are float32
    assert found[:, 1].tolist() == [1, 0, 1]  # equal logits: the first class is taken
    assert found[:, 2].tolist() == [1, 1, 1]
    assert means(found) == {"loss": pytest.approx(sum(expected) / 3, rel=1e-6), "error": 2 / 3}


def test_scores_of_texts_are_those_of_transformers():
    import zoo

    model = zoo.gpt2(layers=1, vocab=20, dtype=torch.float32).eval()
    ids = torch.randint(20, (5, 7), generator=torch.Generator().manual_seed(0))
    found = Rows(ids).scores(model)
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids)
    assert means(found)["loss"] == pytest.approx(output.loss.item(), rel=1e-6)
    wrong = (output.logits[:, :-1].argmax(-1) != ids[:, 1:]).float().mean().item()
    assert means(found)["error"] == pytest.approx(wrong)
    assert found[:, 2].tolist() == [6] * 5
    assert torch.equal(Rows(ids[2:4]).scores(model)[:, 1:], found[2:4, 1:])


def test_the_gap_is_the_difference_of_means_and_its_interval_that_of_resampled_rows():
    generator = torch.Generator().manual_seed(1)
    one, other, merged = (
        torch.stack([torch.rand(40, generator=generator), torch.rand(40, generator=generator).round(),
                     torch.randint(1, 4, (40,), generator=generator)], 1).double() for _ in range(3)
    )  # fmt: skip
    found = gaps(merged, [one, other], seed=3)

    def gap(rows):
        values = [float(scores[rows, 0].sum() / scores[rows, 2].sum()) for scores in (merged, one, other)]
        return values[0] - (values[1] + values[2]) / 2

    assert found["loss"].value == pytest.approx(gap(torch.arange(40)), rel=1e-12)
    parts = [scores[:, 0] * 40 / scores[:, 2].sum() for scores in (merged, one, other)]
    low, high = paired_bootstrap(parts[0], (parts[1] + parts[2]) / 2, seed=3).interval
    assert (found["loss"].low, found["loss"].high) == pytest.approx((low, high), rel=1e-12)
    assert found["error"].low <= found["error"].value <= found["error"].high


def test_one_answer_a_row_against_one_model_has_mcnemars_test():
    generator = torch.Generator().manual_seed(2)
    one, other = (
        torch.stack([torch.rand(60, generator=generator), (torch.rand(60, generator=generator) < share).float(),
                     torch.ones(60)], 1).double() for share in (0.2, 0.5)
    )  # fmt: skip
    assert gaps(one, [other], seed=0)["error"].p == mcnemar(one[:, 1] == 0, other[:, 1] == 0).p < 0.05
    assert math.isnan(gaps(one, [other, other], seed=0)["error"].p)
    assert math.isnan(gaps(one, [other], seed=0)["loss"].p)


def test_few_rows_and_rows_without_a_number_have_no_interval():
    scores = torch.tensor([[1.0, 0.0, 1.0], [2.0, 1.0, 1.0]], dtype=torch.float64)
    worse = scores + torch.tensor([1.0, 0.0, 0.0])
    found = gaps(worse, [scores], seed=0)["loss"]
    assert (found.value, math.isnan(found.low), found.cautious) == (1.0, True, 1.0)
    broken = scores * torch.tensor([math.nan, 1.0, 1.0])
    assert gaps(broken, [scores], seed=0)["loss"].cautious == math.inf
    assert decisive(broken) == math.inf


def test_a_merge_that_is_its_parents_has_no_gap():
    scores = torch.rand(10, 3, generator=torch.Generator().manual_seed(0)).double() + 1
    for gap in gaps(scores, [scores, scores], seed=0).values():
        assert (gap.value, math.isnan(gap.low), math.isnan(gap.high)) == (
            0,
            True,
            True,
        )  # no row that differs: no bound
