"""Rows: nothing lost, nothing learnt twice, documents kept apart."""

from __future__ import annotations

import pytest
import torch

import zoo
from sparing.errors import UserError
from sparing.jobs.lm.labels import IGNORED, Tokens
from sparing.jobs.lm.losses import loss_sum
from sparing.jobs.lm.packing import Packed, pack, pack_stream


def whole(*ids: int) -> Tokens:
    return Tokens(list(ids), list(ids))


def answer(prompt: list[int], response: list[int]) -> Tokens:
    return Tokens(prompt + response, [IGNORED] * len(prompt) + response)


def test_rows_are_filled_in_order_and_positions_restart() -> None:
    data = pack([whole(1, 2, 3), whole(4, 5), whole(6, 7, 8, 9)], length=6, pad=0)
    assert data.ids.tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 0, 0]]
    skip = IGNORED
    assert data.labels.tolist() == [[skip, 2, 3, skip, 5, skip], [skip, 7, 8, 9, skip, skip]]
    assert data.positions is not None
    assert data.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    assert (data.rows, data.length, data.tokens, data.cut, data.dropped) == (2, 6, 6, 0, 0)


def test_without_packing_each_row_is_one_example() -> None:
    data = pack([whole(1, 2, 3), answer([4], [5])], length=6, pad=9, packing=False)
    assert data.ids.tolist() == [[1, 2, 3], [4, 5, 9]]
    assert data.labels.tolist() == [[IGNORED, 2, 3], [IGNORED, 5, IGNORED]]
    assert data.positions is None


def test_a_long_text_goes_on_in_another_row_and_a_long_answer_is_cut() -> None:
    text = pack([whole(*range(1, 8))], length=3, pad=0)
    assert text.ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert (text.cut, text.dropped) == (1, 1)  # the seventh token alone predicts nothing

    cut = pack([answer([1, 2], [3, 4, 5])], length=4, pad=0)
    assert cut.ids.tolist() == [[1, 2, 3, 4]]
    assert cut.cut == 1


def test_an_answer_that_does_not_fit_is_dropped_and_counted() -> None:
    data = pack([answer([1, 2, 3], [4]), whole(1, 2)], length=3, pad=0)
    assert (data.rows, data.dropped) == (1, 1)
    with pytest.raises(UserError, match="--length"):
        pack([answer([1, 2, 3], [4])], length=3, pad=0)


def test_a_stream_is_chopped() -> None:
    data = pack_stream(list(range(11)), 4)
    assert data.ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert torch.equal(data.labels, data.ids)
    assert (data.tokens, data.cut) == (6, 3)
    with pytest.raises(UserError, match="2 tokens"):
        pack_stream(torch.arange(2), 4)


@pytest.mark.parametrize("make", [zoo.llama, zoo.gpt2])
def test_packed_documents_do_not_see_each_other(make) -> None:
    """The loss of a packed row is the sum of the losses of its documents, each alone in a row."""
    model = make()
    documents = [whole(*range(3, 10)), answer([20, 21, 22], [30, 31]), whole(40, 41, 42)]
    packed = pack(documents, length=20, pad=0)
    alone = [pack([document], length=len(document.ids), pad=0) for document in documents]

    assert packed.rows == 1
    got = loss_sum(model, packed, torch.arange(1))
    want = sum(loss_sum(model, one, torch.arange(1)) for one in alone)
    # float64; only the order of summation differs: 1e-12 relative leaves a thousandfold.
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    leaky = Packed(packed.ids, packed.labels)
    assert abs(loss_sum(model, leaky, torch.arange(1)) - want) > 1e-6


def test_padding_changes_no_loss() -> None:
    model, documents = zoo.llama(), [whole(1, 2, 3, 4, 5, 6), whole(7, 8, 9)]
    padded = pack(documents, length=10, pad=0, packing=False)
    got = loss_sum(model, padded, torch.tensor([0, 1]))
    want = sum(loss_sum(model, pack([d], length=10, pad=0, packing=False), torch.tensor([0])) for d in documents)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)  # float64 summation order
