"""Every cell of hypergradients: equal to an answer that shares no code with the method, or refused in a line."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from idioms.hypergrad.cells import CELLS, LATE, ONCE
from idioms.hypergrad.methods import WAYS
from idioms.hypergrad.optimizers import ALONG, MIXED, MIXED_ERROR, OPTIMIZERS, REFUSED_OPTIMIZERS, half
from idioms.hypergrad.problems import EQUAL, EQUAL_BY_ALGORITHM, phi
from idioms.hypergrad.refused import REFUSED, REFUSED_BY_ALGORITHM, once_differentiable, own_generator_from_step_one
from idioms.hypergrad.single import SINGLE
from idioms.table import Cell
from sparing.errors import RunError, UserError

RIGHT = EQUAL | EQUAL_BY_ALGORITHM | OPTIMIZERS | ALONG
WRONG = (
    REFUSED
    | REFUSED_BY_ALGORITHM
    | REFUSED_OPTIMIZERS
    | {idiom: (make, "path: got an implicit method") for idiom, make in ALONG.items()}
)
TRIED = [cell for cell in CELLS if cell.idiom in RIGHT | WRONG]


@cache
def truth_of(truth: Callable[..., Any], make: Callable[[], Any]) -> Any:
    """Most methods of an idiom share one answer."""
    return truth(make(), phi())


def near(found: Any, truth: Any, error: float) -> None:
    assert (found - truth).norm() <= error * truth.norm() + 1e-14


@pytest.mark.filterwarnings("ignore:no run moved. φ has no effect:RuntimeWarning")  # so it is with a φ nothing uses
@pytest.mark.parametrize("cell", [cell for cell in TRIED if cell.outcome == "equal"], ids=lambda cell: cell.name)
def test_what_is_computed_equals_an_independent_answer(cell: Cell) -> None:
    make, way = RIGHT[cell.idiom], WAYS[cell.subject]
    near(way.estimate(make(), phi()), truth_of(way.truth, make), way.error)


@pytest.mark.parametrize("cell", [cell for cell in TRIED if cell.outcome == "refused"], ids=lambda cell: cell.name)
def test_what_cannot_be_computed_is_refused_in_a_line(cell: Cell) -> None:
    make, words = WRONG[cell.idiom]
    with pytest.raises(UserError, match=words) as caught:
        WAYS[cell.subject].estimate(make(), phi())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.idiom == LATE], ids=lambda cell: cell.subject)
def test_a_run_that_cannot_be_made_again_is_refused_where_it_is_made_twice(cell: Cell) -> None:
    way = WAYS[cell.subject]
    if cell.outcome == "refused":
        with pytest.raises(UserError, match=r"inner: got another loss at step [1-4]|spread: got another run on rank 1"):
            way.estimate(own_generator_from_step_one(), phi())
    else:
        near(
            way.estimate(own_generator_from_step_one(), phi()), truth_of(way.truth, own_generator_from_step_one), 1e-11
        )


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.idiom == ONCE], ids=lambda cell: cell.subject)
def test_a_second_derivative_that_torch_takes_for_zero_is_refused(cell: Cell) -> None:
    way = WAYS[cell.subject]
    if cell.outcome == "equal":
        near(way.estimate(once_differentiable(), phi()), way.truth(once_differentiable(), phi()), way.error)
        return
    with pytest.raises(UserError, match=r"autograd\.Function"):
        way.estimate(once_differentiable(), phi())


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.idiom == MIXED], ids=lambda cell: cell.subject)
def test_mixed_precision_is_near_the_answer_in_float64(cell: Cell) -> None:
    way = WAYS[cell.subject]
    found = way.estimate(half(autocast=True), phi())
    truth = way.truth(half(autocast=False), phi())
    near(found, truth, MIXED_ERROR)
    assert (found - truth).norm() > 1e-6 * truth.norm()  # it was not all in float32


@pytest.mark.parametrize("names", SINGLE, ids=" - ".join)
def test_what_stands_alone_is_refused_in_a_line(names: tuple[str, str]) -> None:
    call, words = SINGLE[names]
    with pytest.raises((UserError, RunError), match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
