"""The two-level problem: real tokens only, one run for both spaces, the same run as plain SGD."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparing import hypergrad as hg
from sparing.errors import UserError
from sparing.jobs.adapt.corpus import Document, Question, encode_questions
from sparing.jobs.adapt.evaluate import adapt_model
from sparing.jobs.adapt.lm import padded, positions
from sparing.jobs.adapt.problem import (
    answer_loss,
    check_counts,
    check_question_length,
    count_rows,
    divergence,
    document_loss,
    draw_window,
    log_probabilities,
    problem,
)
from sparing.jobs.adapt.settings import Adapt
from sparing.jobs.adapt.weights import init_weights, weigh
from sparing.vectors import dot, norm


@pytest.fixture
def window(lm, data):
    return draw_window(lm, data, 0, documents=3, context=20, seed=0)


@pytest.fixture
def phi(window):
    made = init_weights(window.features.shape[1], width=8, seed=0, dtype=torch.float64)
    drawn = torch.randn(made["head.1.weight"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return made | {"head.1.weight": drawn}


def test_the_bottleneck_counts_real_tokens_only(window):
    assert len(window.features) == sum(len(text) - 1 for text in window.stream.texts)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_solve_is_plain_sgd(lm, window, phi, clip):
    posed = problem(lm, window, lr=0.05, locality=0.1, clip=clip)
    theta = hg.solve(posed, phi)
    plain = adapt_model(lm, weigh(phi, window.features), window.stream.texts, lr=0.05, clip=clip)
    for name, value in theta.items():
        torch.testing.assert_close(value, plain[name], rtol=1e-12, atol=1e-14)  # same sums, perhaps in another order


def test_both_spaces_have_the_same_hypergradient_and_it_is_the_slope(lm, window, phi):
    through, inside = (problem(lm, window, lr=0.05, locality=0.1, bottleneck=flag) for flag in (True, False))
    one = hg.hypergradient(through, phi, hg.Reverse()).grad
    two = hg.hypergradient(inside, phi, hg.Checkpointed()).grad
    gap = norm({name: one[name] - two[name] for name in one}) / norm(one)
    assert gap < 1e-10  # float64 through three steps of a small transformer
    coin = torch.Generator().manual_seed(1)
    step = {name: torch.randn(v.shape, dtype=v.dtype, generator=coin) for name, v in phi.items()}
    ends = [hg.solve(through, {n: v + sign * 1e-3 * step[n] for n, v in phi.items()}) for sign in (1, -1)]
    moved = float(through.outer(ends[0], phi) - through.outer(ends[1], phi)) / 2e-3
    # Llama normalises in float32 whatever its weights, so a difference of losses carries 1e-7 / 1e-3 of noise
    assert moved == pytest.approx(float(dot(one, step)), rel=2e-3)


@pytest.mark.parametrize("bottleneck", [True, False])
def test_forward_gradient_runs_on_the_transformer_and_points_downhill(lm, window, phi, bottleneck):
    posed = problem(lm, window, lr=0.05, locality=0.1, bottleneck=bottleneck)
    exact = hg.hypergradient(posed, phi, hg.Reverse()).grad
    guess = hg.hypergradient(posed, phi, hg.ForwardGradient(directions=4), seed=3).grad
    if not bottleneck:  # in its own space the estimate's product with the truth is a mean of squares
        assert dot(guess, exact) > 0
    assert norm(guess) > 0


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


@pytest.mark.parametrize(("answer", "more"), [("Montgomery", 12), ("Rome", 8)])
def test_questions_leave_room_for_their_answers(lm, data, answer, more):
    """Beside start and question: the blank and ten letters that are scored, or seven of eight tokens that are read."""
    asked = Question("One fine day in", answer)
    few = dataclasses.replace(data, train=(Document("", (asked,)),), validation=(), test=())
    assert encode_questions(lm, [asked], context=9).ids.shape[1] <= 9 + more
    check_question_length(lm, few, 9, 9 + more)
    with pytest.raises(UserError, match=f"question_length: got 9; .* up to {more}; pass at most 8"):
        check_question_length(lm, few, 9, 8 + more)


def test_defaults_take_the_documents_that_there_are(data):
    check_counts(data, Adapt())
    taken = [row["taken"] for row in count_rows(data, Adapt())]
    assert taken == [len(data.plain), *(len(part) for part in (data.train, data.validation, data.test))]
    assert count_rows(data, Adapt(stream=1, tune=0))[-1] == {"part": "test stream", "there": len(data.test), "taken": 1}
