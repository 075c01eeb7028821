"""Trees of tensors and flat vectors."""

from __future__ import annotations

from collections import namedtuple

import torch

from sparing.hypergrad.trees import (
    add,
    bytes_of,
    detach_tree,
    inner_product,
    ravel,
    row_products,
    unravel,
)
from sparing.hypergrad.trees import size as size_of

Pair = namedtuple("Pair", "left right")
TREE = {"a": [torch.arange(6.0).view(2, 3), (torch.tensor(7.0),)], "b": Pair(torch.ones(2), torch.zeros(0))}


def test_a_tree_goes_to_a_vector_and_back() -> None:
    vector = ravel(TREE)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7, 1, 1]
    back = unravel(vector, TREE)
    assert isinstance(back["b"], Pair)
    torch.testing.assert_close(back, TREE, rtol=0, atol=0)


def test_leading_axes_are_kept() -> None:
    back = unravel(torch.arange(18.0).view(2, 9), TREE)
    assert back["a"][0].shape == (2, 2, 3)
    assert back["a"][1][0].shape == (2,)
    assert back["b"].left.tolist() == [[7, 8], [16, 17]]


def test_mixed_dtypes_meet_in_the_widest_and_return_to_their_own() -> None:
    mixed = [torch.ones(1), torch.full((1,), 1 / 3, dtype=torch.float64), torch.ones(1, dtype=torch.bfloat16)]
    vector = ravel(mixed)
    assert vector.dtype == torch.float64
    assert [leaf.dtype for leaf in unravel(vector, mixed)] == [leaf.dtype for leaf in mixed]
    assert unravel(vector, mixed)[1].item() == 1 / 3


def test_sizes_and_bytes() -> None:
    assert size_of(TREE) == 9
    assert bytes_of(TREE) == 36
    assert bytes_of(torch.zeros(3, dtype=torch.float64)) == 24
    assert ravel({}).shape == (0,)


def test_products_and_sums() -> None:
    a, b = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)], [torch.tensor([4.0, 5.0]), torch.tensor(6.0)]
    assert inner_product(a, b) == 32
    rows = [torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([3.0, 0.0])]
    assert row_products(rows, b).tolist() == [32, 5]
    assert add(a, b)[0].tolist() == [5, 7]
    assert add([torch.ones(1)], [torch.ones(1, dtype=torch.float64)])[0].dtype == torch.float32


def test_detach_tree_keeps_values_and_drops_history() -> None:
    watched = torch.ones(2, requires_grad=True) * 2
    assert not detach_tree({"x": watched})["x"].requires_grad
    assert torch.equal(detach_tree({"x": watched})["x"], watched)
