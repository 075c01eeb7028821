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


def test_an_unsettled_allocation_counts_only_once_what_it_replaces_is_gone():
    book = Book()
    book.allocate(1, 10, "transient")
    book.allocate(2, 10, "transient", settle=False)
    book.free(1)
    assert book.peak.total == 10
    book.allocate(3, 10, "transient", settle=False)
    book.settle()
    assert book.peak.total == 20
