"""Text as data: Gutenberg books without their wrapping, and plain prose from wiki markup."""

from __future__ import annotations

import html
import re
from importlib import resources
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOOK = "book.txt"  # our name for an unpacked Gutenberg text

TEXT = "text.txt"  # name of the finished text in an asset's folder

START = re.compile(r"\A.*?^\*\*\* ?START OF.*?\*\*\*[^\n]*\n", re.DOTALL | re.MULTILINE)
END = re.compile(r"^(?:\*\*\* ?END OF|End of (?:the )?Project Gutenberg).*\Z", re.DOTALL | re.MULTILINE | re.IGNORECASE)
TITLE = re.compile(r"\A\s*\[[^\]\n]*\][ \t]*\n")


def strip_gutenberg(raw: bytes) -> str:
    r"""Return the words of a Project Gutenberg book.

    Taken off: the licence header up to ``*** START OF …``, everything from ``*** END OF …`` or ``End of Project
    Gutenberg`` on, a first line in square brackets that names title, author and year, carriage returns, blank lines at
    both ends. Nothing inside the book is changed.

    Example:
        >>> strip_gutenberg(b"[Emma by Jane Austen 1816]\r\n\r\nEmma Woodhouse, handsome\r\n")
        'Emma Woodhouse, handsome\n'
    """
    # Latin-1 maps every byte, so that no book can fail here
    text = raw.decode("latin-1").replace("\r\n", "\n").replace("\r", "\n")
    text = TITLE.sub("", END.sub("", START.sub("", text)))
    return text.strip("\n \t\x0c") + "\n"


def build_book(members: Path, out: Path) -> None:
    """Write an unpacked Gutenberg book as plain UTF-8."""
    (out / TEXT).write_text(strip_gutenberg((members / BOOK).read_bytes()), encoding="utf-8", newline="\n")


def bundled_text(name: Literal["alice", "blake"] = "alice") -> str:
    """Return a text that ships inside the package, for a machine without any network.

    Args:
        name: ``alice``: the first nine chapters of Lewis Carroll's Alice (prose, 1865). ``blake``: William Blake's
            Songs of Innocence and of Experience and The Book of Thel (verse, 1789). Both are in the public domain.

    Returns:
        The text.
    """
    return resources.files("sparing.data").joinpath("bundled", f"{name}.txt").read_text(encoding="utf-8")


PAGE = re.compile(r"<text xml:space=\"preserve\">(.*?)</text>", re.DOTALL)
INNERMOST = re.compile(r"\{\{[^{}]*\}\}|\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)
MEDIA = re.compile(
    r"\[\[(?:image|file|category|simple|[a-z]{2,3}(?:-[a-z-]+)?):(?:[^\[\]]|\[\[[^\[\]]*\]\]|\[[^\[\]]*\])*\]\]",
    re.IGNORECASE,
)
# in this order: what is removed whole, then links, then quotes and tags, then layout
MARKUP: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"<!--.*?-->", re.DOTALL), ""),
    (re.compile(r"<(ref|math|gallery|nowiki|timeline)\b[^>/]*>.*?</\1>", re.DOTALL | re.IGNORECASE), ""),
    (MEDIA, ""),
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[(?:https?|ftp)://[^\s\]]*\s*([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,5}"), ""),
    (re.compile(r"</?[a-zA-Z][^>\n]*>"), ""),
    (re.compile(r"^\s*=+\s*(.*?)\s*=+\s*$", re.MULTILINE), r"\1"),
    (re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE), ""),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
    (re.compile(r"\n{3,}"), "\n\n"),
)


def wiki_articles(xml: str, *, least: int = 200) -> Iterator[str]:
    """Yield the articles of a wiki dump as plain prose, one at a time, so that a few can be taken from a large dump.

    Redirects are omitted, and so is what is not prose: templates, tables, references, formulas, images,
    categories, links to other languages. Links and headings keep their words.

    Args:
        xml: A MediaWiki XML dump or a slice of one; an article cut at either end is omitted.
        least: Shortest article to keep (characters).

    Yields:
        One article's text.

    Example:
        >>> dump = '<text xml:space="preserve">A [[cat|kitten]] is {{so}}small.</text>'
        >>> list(wiki_articles(dump, least=1))
        ['A kitten is small.']
    """
    for page in PAGE.finditer(xml):
        # once for the XML, once for the wiki's own entities
        markup = html.unescape(html.unescape(page.group(1)))
        if not markup.lstrip()[:9].upper().startswith("#REDIRECT") and len(text := plain(markup)) >= least:
            yield text


def plain(markup: str) -> str:
    """Take wiki markup off one article."""
    # templates nest, but not this deep
    for _ in range(12):
        markup, found = INNERMOST.subn("", markup)
        if not found:
            break
    for pattern, replacement in MARKUP:
        markup = pattern.sub(replacement, markup)
    return markup.strip()
