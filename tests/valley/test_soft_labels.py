"""Gaps under the ensemble's own labels, against sums written out, samples of labels, and truth."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import zoo
from refusals import refused
from sparing.seeds import stream
from sparing.valley.forecast.predict import predict_merge
from sparing.valley.forecast.soft_labels import gaps_of, measure_gaps, row_gaps
from sparing.valley.scans.intervals import student_t_quantile


def logits(label: str, *shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=stream(0, "test-soft", label), dtype=torch.float64)


def by_hand(a, b, m):
    """The definition in numpy, float64, a row and a class at a time."""
    p, q, r = (np.exp(x) / np.exp(x).sum() for x in (a, b, m))
    loss = error = 0.0
    for k in range(len(p)):
        share = (p[k] + q[k]) / 2
        loss += share * (-math.log(r[k]) - 0.5 * (-math.log(p[k]) - math.log(q[k])))
        wrong = [float(k != one.argmax()) for one in (p, q, r)]
        error += share * (wrong[2] - 0.5 * (wrong[0] + wrong[1]))
    return loss, error


def soft_gaps(*models, **how):
    """Without a look at labels."""
    return measure_gaps(*models, labels=False, **how).values


def test_every_row_is_the_definition():
    a, b, m = (logits(label, 7, 4) for label in "abm")
    expected = [by_hand(*rows) for rows in zip(a.numpy(), b.numpy(), m.numpy(), strict=True)]
    np.testing.assert_allclose(row_gaps(a, b, m).numpy(), expected, rtol=1e-12, atol=1e-14)


def test_positions_of_a_row_are_averaged():
    a, b, m = (logits(label, 3, 5, 4) for label in "abm")
    flat = row_gaps(*(one.flatten(0, 1) for one in (a, b, m)))
    torch.testing.assert_close(row_gaps(a, b, m), flat.view(3, 5, 2).mean(1), rtol=1e-12, atol=1e-14)


def test_it_is_the_gap_on_labels_that_the_ensemble_draws():
    """200,000 labels of each row: within five standard errors of the mean over them."""
    a, b, m = (logits(label, 3, 4) for label in "abm")
    ensemble = (a.softmax(1) + b.softmax(1)) / 2
    labels = torch.multinomial(ensemble, 200_000, replacement=True, generator=stream(0, "test-soft", "labels"))
    losses = [-one.log_softmax(1).gather(1, labels) for one in (a, b, m)]
    drawn = losses[2] - (losses[0] + losses[1]) / 2
    error = drawn.std(1) / labels.shape[1] ** 0.5
    assert ((drawn.mean(1) - row_gaps(a, b, m)[:, 0]).abs() < 5 * error).all()


def net(label: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)).double()
    return zoo.redraw_(model, seed=len(label), std=0.5).eval()


def test_the_average_runs_with_statistics_of_its_own_and_so_do_its_ends():
    """Against three nets made by hand; the models come back as they were."""
    one, other = net("a"), net("bb")
    rows, calibrate = logits("rows", 20, 6), logits("calibrate", 30, 6)
    before = [copy.deepcopy(each.state_dict()) for each in (one, other)]
    found = soft_gaps(one, other.state_dict(), [rows[:8], rows[8:]], calibrate=[calibrate])
    made = [copy.deepcopy(one), copy.deepcopy(other), copy.deepcopy(one)]
    with torch.no_grad():
        for parameter, x, y in zip(made[2].parameters(), one.parameters(), other.parameters(), strict=True):
            parameter.copy_((x + y) / 2)
        for each in made:
            hidden = each[0](calibrate)
            each[1].running_mean, each[1].running_var = hidden.mean(0), hidden.var(0)
        expected = row_gaps(*(each(rows) for each in made))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for each, state in zip((one, other), before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in each.state_dict().items())
    alone = soft_gaps(one, other, [rows])  # the rows themselves calibrate
    torch.testing.assert_close(alone, soft_gaps(one, other, [rows], calibrate=[rows]), rtol=0, atol=0)


def test_a_model_averaged_with_itself_has_no_gap():
    model = net("a")
    assert float(soft_gaps(model, copy.deepcopy(model), [logits("rows", 20, 6)]).abs().max()) < 1e-12


def test_language_models_leave_out_what_has_no_next_word():
    one, other = zoo.gpt2(1), zoo.redraw_(zoo.gpt2(1), seed=3)
    tokens = zoo.tokens(4, 6)["input_ids"]
    found = soft_gaps(one, other, [{"input_ids": tokens[:2]}, {"input_ids": tokens[2:]}])
    average = copy.deepcopy(one)
    with torch.no_grad():
        for parameter, x, y in zip(average.parameters(), one.parameters(), other.parameters(), strict=True):
            parameter.copy_((x + y) / 2)
        answers = [each.eval()(input_ids=tokens).logits[:, :-1] for each in (one, other, average)]
    torch.testing.assert_close(found, row_gaps(*answers), rtol=1e-8, atol=1e-12)


def test_the_interval_is_students_where_soft_labels_are_right(monkeypatch):
    monkeypatch.setattr("sparing.valley.forecast.soft_labels.MISSES", {"loss": 0.0, "error": 0.0})
    values = logits("values", 25, 2)
    found = gaps_of(values)["error"]
    reach = student_t_quantile(0.95, 24) * float(values[:, 1].std()) / 5
    assert found.interval == pytest.approx((found.value - reach, found.value + reach), rel=1e-12)
    monkeypatch.setattr("sparing.valley.forecast.soft_labels.MISSES", {"loss": 0.3, "error": 0.3})
    reach *= math.sqrt(1 + 25 * 0.3**2)
    assert gaps_of(values)["error"].interval == pytest.approx((found.value - reach, found.value + reach), rel=1e-12)
    assert math.isnan(gaps_of(values[:9])["loss"].interval[0])


def test_rows_that_are_all_alike_do_not_make_the_error_certain():
    """Of n rows none differs: up to a share of ln(20)/n may, with 95 % confidence on that side."""
    found = gaps_of(torch.zeros(40, 2, dtype=torch.float64), labelled=True)
    assert found["error"].interval == pytest.approx((-math.log(20) / 40, math.log(20) / 40))
    assert found["loss"].interval == (0, 0)


@pytest.mark.parametrize(("label", "said"), [("ids", "the token ids themselves"), ("mask", "a mask of 0 and 1")])
def test_a_tuple_of_a_causal_model_does_not_ask_for_the_token_it_was_given(label: str, said: str):
    models = [zoo.redraw_(zoo.gpt2(1), seed=at).eval() for at in (3, 4)]
    tokens = zoo.tokens(4, 6)["input_ids"]
    second = tokens if label == "ids" else torch.ones_like(tokens)
    refused(said, measure_gaps, *models, [(tokens, second)])


def test_predict_merge_says_what_its_answer_is_from():
    one, other = net("a"), net("bb")
    rows = [logits("rows", 40, 6)]
    first, better = predict_merge(one, other), predict_merge(one, other, rows=rows)
    assert first.rows == 0
    assert "first and cheap answer" in first.reasons[-1]
    assert better.rows == 40
    assert better.gap["loss"] == pytest.approx(float(soft_gaps(one, other, rows)[:, 0].mean()))
    assert "40 rows without labels" in better.reasons[0]
    assert "From the weights alone the answer was: will not" in better.reasons[1]
    low, high = better.interval["error"]
    assert low < better.gap["error"] < high
    moved = copy.deepcopy(one)
    with torch.no_grad():
        moved[3].bias += 1e-3
    assert predict_merge(one, moved, rows=rows, tolerance=0.5).verdict == "will merge"
    refused("rows: got none", predict_merge, one, other, rows=[])
    refused("model: got states only", predict_merge, one.state_dict(), other.state_dict(), rows=rows)


def true_gap(models, inputs, targets, shift):
    """Means of cross-entropy and errors by torch, the average less the mean of the two; (loss, error)."""
    average = copy.deepcopy(models[0])
    with torch.no_grad():
        for parameter, x, y in zip(*(each.parameters() for each in (average, *models)), strict=True):
            parameter.copy_((x + y) / 2)
    found = []
    for model in (*models, average):
        with torch.no_grad():
            answers = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        logits = getattr(answers, "logits", answers)
        logits = logits[:, :-1] if shift else logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)
        there = targets != -100
        found.append((float(loss), float((logits.argmax(-1) != targets)[there].double().mean())))
    return [found[2][at] - (found[0][at] + found[1][at]) / 2 for at in (0, 1)]


def test_labels_are_used_where_batches_have_them():
    models = [nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double() for _ in range(2)]
    models = [zoo.redraw_(model, seed=at, std=1.0).eval() for at, model in enumerate(models)]
    rows, targets = logits("rows", 30, 6), torch.arange(30) % 3
    found = measure_gaps(*models, [(rows[:9], targets[:9]), (rows[9:], targets[9:])])
    assert found.labelled
    assert found.values.mean(0).tolist() == pytest.approx(true_gap(models, rows, targets, shift=False), abs=1e-12)
    forecast = predict_merge(*models, rows=[(rows, targets)])
    assert "30 rows with labels" in forecast.reasons[0]
    reach = student_t_quantile(0.95, 29) * float(found.values[:, 0].std()) / 30**0.5  # rows alone: nothing is guessed
    assert forecast.interval["loss"][1] == pytest.approx(forecast.gap["loss"] + reach, rel=1e-9)
    soft = measure_gaps(*models, [(rows, torch.zeros(30))])  # numbers that are no classes
    assert not soft.labelled
    refused("labels: got shape", measure_gaps, *models, [(rows, targets[:7])])
    refused("batches with labels and without", measure_gaps, *models, [(rows, targets), rows])


@pytest.mark.parametrize("way", ["ids", "mapping", "mask", "labels"])
def test_next_tokens_are_the_labels_of_text(way: str):
    models = [zoo.redraw_(zoo.gpt2(1), seed=at).eval() for at in (3, 4)]
    tokens = zoo.tokens(4, 6)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1, 4:] = mask[2, 5:] = 0
    hidden = way in {"mask", "labels"}
    targets = tokens.masked_fill(mask == 0, -100) if hidden else tokens
    batch = {
        "ids": tokens, "mapping": {"input_ids": tokens}, "mask": {"input_ids": tokens, "attention_mask": mask},
        "labels": {"input_ids": tokens, "attention_mask": mask, "labels": targets},
    }[way]  # fmt: skip
    found = measure_gaps(*models, [batch])
    assert found.labelled
    inputs = {"input_ids": tokens, "attention_mask": mask} if hidden else {"input_ids": tokens}
    weights = (targets[:, 1:] != -100).sum(1, keepdim=True).double()
    mean = ((found.values * weights).sum(0) / weights.sum()).tolist()
    assert mean == pytest.approx(true_gap(models, inputs, targets[:, 1:], shift=True), abs=1e-6)  # float32 logits


def test_token_ids_are_no_labels_of_another_model():
    """A tagger answers with a class for each token: what comes next is no label of it."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

        def forward(self, ids):
            return self.head(self.embed(ids))

    models = [zoo.redraw_(Tagger(), seed=at) for at in (0, 1)]
    ids = torch.randint(0, 9, (12, 5), generator=stream(0, "test-soft", "ids"))
    assert not measure_gaps(*models, [ids]).labelled
    assert measure_gaps(*models, [(ids, ids)]).labelled  # classes given by hand
