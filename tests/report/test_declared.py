"""A declared page has what its record has, and the terminal the same tables."""

from __future__ import annotations

import pytest

from sparing.report import Record, print_table
from sparing.report.declared import Chapter, Rows, RunPage, Samples, print_tables

NAMES, ROLES = {"full": "full fine-tuning", "lisa": "LISA"}, {"full": "reference", "lisa": "ours"}


@pytest.fixture
def record() -> Record:
    made = Record(question="Q?", settings={}, seed=0, units={"loss": "nat"}, environment={})
    for method, loss in (("full", 2.0), ("lisa", 1.5)):
        for step in (0, 10):
            made.add("curve", method=method, step=step, loss=loss - step / 100)
        made.add("methods", method=method, loss=loss)
    made.add("texts", prompt="Once", full="upon", other="a time")
    return made


def page_of(*chapters: Chapter) -> RunPage:
    return RunPage("T", lambda record: "A.", *chapters, caveats=["C."], facts=lambda record: {"data": "d"})


def test_what_the_record_lacks_is_not_on_the_page(record):
    nothing = Chapter("Nothing", "Fixed words.", Rows("none", "N"), lambda record: None)
    texts = Samples("texts", {"full": "by full", "lisa": "by LISA"}, "Text", "… ")
    page = page_of(nothing, Chapter("Texts", "", texts)).of(record, ["More."])
    assert [section.title for section in page.sections] == ["Texts"]
    (sample,) = page.sections[0].samples
    assert (sample.prompt, sample.texts, sample.title) == ("… Once", {"by full": "upon"}, "Text 1")
    assert (page.caveats, page.reproduce) == (["C.", "More."], {"data": "d"})


def test_words_alone_make_a_chapter_where_they_are_said_to(record):
    chapters = [Chapter(words, lambda record, words=words: words, words_alone=True) for words in ("Why", "")]
    assert [section.text for section in page_of(*chapters).of(record).sections] == ["Why"]


def test_names_and_roles_are_written_for_methods(record):
    table = Rows("methods", lambda record: "Best", ("method", "loss"), names=NAMES, roles=ROLES)(record)
    assert [row["method"] for row in table.rows] == list(NAMES.values())
    assert table.roles == {"full fine-tuning": "reference", "LISA": "ours"}
    assert (table.title, table.units) == ("Best", {"loss": "nat"})


@pytest.mark.parametrize(("folded", "shown"), [(True, True), (False, False), (1, True), (2, False)])
def test_a_table_is_folded_always_or_above_a_number_of_rows(record, folded, shown):
    assert Rows("methods", "M", folded=folded)(record).folded is shown


def test_the_terminal_prints_what_is_not_folded_or_is_asked_for(record, capsys):
    tables = [Rows("methods", "M"), Rows("curve", "C", folded=True), Rows("curve", "D", folded=True, terminal=True)]
    hidden = Rows("methods", "H", terminal=False)
    page_of(Chapter("All", "", *tables, hidden, Rows("none", "N"))).print_tables(record)
    printed = capsys.readouterr().out
    print_table(record.table("methods"), title="M", units=record.units)
    print_table(record.table("curve"), title="D", units=record.units)
    assert printed == capsys.readouterr().out
    print_tables(record, hidden)
    assert capsys.readouterr().out == ""
