"""Losses against the model's own, and against padding."""

from __future__ import annotations

import torch

from sparing.jobs.adapt.corpus import encode_questions
from sparing.jobs.adapt.documents import Question
from sparing.jobs.adapt.lm import padded, positions
from sparing.jobs.adapt.losses import answer_loss, divergence, document_loss, log_probabilities


def test_uniform_weights_are_the_models_own_loss(lm):
    text = torch.tensor([256, *b"the old grey cat"])
    theirs = lm.scored.model(input_ids=text[None], labels=text[None]).loss
    ours = document_loss(lm, lm.theta, torch.ones(len(text) - 1), text)
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-6, atol=0)  # theirs sums in float32


def test_a_weight_scales_its_token_alone(lm):
    text = torch.tensor([256, *b"abcd"])
    parts = [document_loss(lm, lm.theta, row, text) for row in torch.eye(4, dtype=torch.float64)]
    each = lm.nll(lm.theta, text[None], torch.zeros(4, dtype=torch.int64), torch.arange(4))
    torch.testing.assert_close(torch.stack(parts) * 4, each, rtol=1e-6, atol=0)


def test_padding_does_not_move_the_answer_loss(lm):
    short, long = Question("Off to", "Rome"), Question("After a long while they came to", "Ur")
    both = answer_loss(lm, lm.theta, encode_questions(lm, [short, long], context=99))
    alone = [encode_questions(lm, [question], context=99) for question in (short, long)]
    losses = [answer_loss(lm, lm.theta, questions) * len(questions.rows) for questions in alone]
    # the mean is over answer tokens, wherever they stand; Llama normalises in float32
    torch.testing.assert_close(both, sum(losses) / sum(len(questions.rows) for questions in alone), rtol=1e-6, atol=0)


def test_padding_id_counts_where_it_is_real(lm):
    text = torch.tensor([256, 0, 0, 65])
    rows, cols = positions([text, torch.tensor([256, 65])])
    assert rows.tolist() == [0, 0, 0, 1]
    assert cols.tolist() == [0, 1, 2, 0]
    assert padded([text, torch.tensor([256, 65])]).tolist()[1] == [256, 65, 0, 0]


def test_divergence_is_zero_at_home_and_positive_away(lm):
    texts = [torch.tensor([256, *b"rain"]), torch.tensor([256, *b"hens"])]
    before = log_probabilities(lm, lm.theta, texts)
    assert abs(float(divergence(lm, lm.theta, texts, before))) < 1e-12
    moved = {name: value * 1.1 for name, value in lm.theta.items()}
    found = float(divergence(lm, moved, texts, before))
    assert found > 0
    by_hand = torch.nn.functional.kl_div(
        log_probabilities(lm, moved, texts), before, log_target=True, reduction="batchmean"
    )
    assert abs(found - float(by_hand)) < 1e-9
