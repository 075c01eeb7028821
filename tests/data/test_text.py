"""Unwrapping changes nothing inside a book; wiki markup leaves, words stay; the bundled texts are the recorded ones."""

from __future__ import annotations

import hashlib
from importlib import resources

import pytest

from sparing.data import bundled_text, load_text, wiki_articles
from sparing.data.text import plain, strip_gutenberg

BODY = "Chapter one.\n\nA [bracketed] word, an \xe9, * * * stars.\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("[Emma by Jane Austen 1816]\n\n", "\n\n"),
        (
            "Licence\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n",
            "*** END OF THE PROJECT GUTENBERG EBOOK X ***\nmore",
        ),
        ("***START OF X***\n[X by Y]\n", "End of Project Gutenberg's X\n"),
        ("", "End of The Project Gutenberg Etext of X\n"),
    ],
)
def test_only_the_wrapping_goes(before: str, after: str, newline: str) -> None:
    raw = (before + BODY + after).replace("\n", newline).encode("latin-1")
    assert strip_gutenberg(raw) == BODY


@pytest.mark.parametrize(
    ("markup", "words"),
    [
        ("'''Bold''' and ''slanted''", "Bold and slanted"),
        ("[[cat]] and [[dog|hound]]s", "cat and hounds"),
        ("[[Apple]] [[fr:Pomme]][[zh-min-nan:X]][[Category:Fruit]]", "Apple"),
        ("[[image:a.jpg|thumb|A [[red]] apple [http://x y].]]An apple.", "An apple."),
        ("See [http://x.org the page] or [http://x.org].", "See the page or ."),
        ("a{{x|{{y}}|{{z|{{w}}}}}}b", "ab"),
        ("a\n{|\n| x\n{|\n| inner\n|}\n|}\nb", "a\n\nb"),
        ("a<ref name='x'>note\nmore</ref>b<ref name='y'/>c<!-- no\nno -->d", "abcd"),
        ("x <math>\\frac{a}{b}</math> y<br />z", "x  yz"),
        ("== Early life ==\n* one\n** two\n#three\n: four", "Early life\none\ntwo\nthree\nfour"),
        ("if a < b and c > d", "if a < b and c > d"),
        ("one\n\n\n\n\ntwo  ", "one\n\ntwo"),
    ],
)
def test_markup_goes_and_words_stay(markup: str, words: str) -> None:
    assert plain(markup) == words


def page(text: str) -> str:
    return f'<page><text xml:space="preserve">{text}</text></page>'


def test_articles_come_in_order_without_redirects_and_stubs() -> None:
    dump = (
        page("#REDIRECT [[A]]") + page("first &amp;amp; &quot;best&quot;") + page("x") + page("second &amp;ndash; last")
    )
    assert list(wiki_articles(dump, least=5)) == ['first & "best"', "second – last"]


def test_an_article_cut_by_the_slice_is_left_out() -> None:
    dump = page("first article") + page("second article")
    assert list(wiki_articles(dump[20:-20], least=5)) == []
    assert list(wiki_articles(dump[:-20], least=5)) == ["first article"]


def test_articles_are_made_one_at_a_time() -> None:
    articles = wiki_articles(page("first article") + page("second article"), least=5)
    assert next(articles) == "first article"


@pytest.mark.timeout(300)  # milliseconds; hours if a pattern could backtrack without bound
def test_unclosed_markup_ends() -> None:
    plain("{{" * 3000 + "[[" * 3000 + "<ref" * 3000 + "{|" * 3000)


@pytest.mark.parametrize(
    ("name", "begins"), [("alice", "CHAPTER I. Down the Rabbit-Hole\n"), ("blake", "SONGS OF INNOCENCE")]
)
def test_bundled_texts_are_the_recorded_ones(name: str, begins: str) -> None:
    text = bundled_text(name)
    assert text.startswith(begins)
    provenance = resources.files("sparing.data").joinpath("bundled", "PROVENANCE.md").read_text(encoding="utf-8")
    assert f"{hashlib.sha256(text.encode()).hexdigest()}  {name}.txt" in provenance


@pytest.mark.asset
def test_the_bundled_alice_is_the_beginning_of_the_real_one(fetched) -> None:
    fetched("alice")
    assert load_text("alice").startswith(bundled_text("alice").rstrip("\n"))


@pytest.mark.asset
def test_real_wiki_text_becomes_prose(fetched) -> None:
    fetched("enwik8")
    articles = list(wiki_articles(load_text("enwik8", first=3_000_000)))
    text = "\n".join(articles)
    assert articles[0].startswith(
        "Anarchism originated as a term of abuse first used against early working class radicals"
    )
    assert len(text) > 2_000_000
    # what is left of the markup: a handful of unbalanced brackets in three million characters
    assert sum(text.count(mark) for mark in ("[[", "]]", "{{", "}}", "<ref")) < 30
