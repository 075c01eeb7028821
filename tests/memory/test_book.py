"""The arithmetic of the ledger against a history that is replayed from scratch."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from sparing.memory.book import Book
from sparing.memory.sizes import CATEGORIES, Bytes

moves = st.lists(
    st.tuples(st.sampled_from(["allocate", "free", "move"]), st.integers(0, 7), st.integers(0, 100), st.integers(0, 4)),
    max_size=40,
)


def _composition(allocations, categories) -> Bytes:
    totals = dict.fromkeys(CATEGORIES, 0)
    for number, size in allocations:
        totals[categories[number]] += size
    return Bytes(**totals)


@given(moves)
def test_sums_and_peak_are_those_of_the_replayed_history(events):
    book, live, born = Book(), {}, 0
    states = [[]]
    categories: dict[int, str] = {}  # allocation number -> its final category so far
    for what, key, size, index in events:
        category = CATEGORIES[index]
        if what == "allocate" and key not in live:
            born += 1
            live[key] = (born, size)
            categories[born] = category
            book.allocate(key, size, category)
        elif what == "free":
            live.pop(key, None)
            book.free(key)
        elif what == "move" and key in live:
            if categories[live[key][0]] != "params":
                categories[live[key][0]] = category
            book.move(key, category)
        states.append(list(live.values()))

    compositions = [_composition(state, categories) for state in states]
    assert book.now == compositions[-1]
    # the first of several equal peaks is the one that is kept
    assert book.peak == max(compositions, key=lambda composition: composition.total)


def test_a_late_category_also_corrects_the_peak():
    book = Book()
    book.allocate(1, 10, "params")
    book.allocate(2, 5, "transient")
    book.allocate(3, 7, "transient")  # the peak: 22
    book.free(3)
    book.move(2, "grads")
    assert book.peak == Bytes(params=10, grads=5, transient=7)
    book.allocate(4, 1, "transient")  # born after the peak, so not part of it
    book.move(4, "optimizer")
    assert book.peak == Bytes(params=10, grads=5, transient=7)
    assert book.now == Bytes(params=10, grads=5, optimizer=1)


def test_parameters_stay_parameters():
    book = Book()
    book.allocate(1, 10, "params")
    book.move(1, "optimizer")
    assert book.now == Bytes(params=10)


def test_an_unsettled_allocation_counts_only_once_what_it_replaces_is_gone():
    book = Book()
    book.allocate(1, 10, "transient")
    book.allocate(2, 10, "transient", settle=False)
    book.free(1)
    assert book.peak.total == 10
    book.allocate(3, 10, "transient", settle=False)
    book.settle()
    assert book.peak.total == 20


def test_a_new_peak_starts_from_what_is_alive():
    book = Book()
    book.allocate(1, 10, "params")
    book.allocate(2, 90, "transient")
    book.free(2)
    book.reset_peak()
    assert book.peak == Bytes(params=10)


def test_a_storage_may_change_its_size():
    book = Book()
    book.allocate(1, 10, "activations")
    book.resize(1, 30)
    book.resize(1, 5)
    assert book.now == Bytes(activations=5)
    assert book.peak == Bytes(activations=30)
