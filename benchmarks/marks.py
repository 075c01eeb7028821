"""Text between ``<!-- name -->`` and ``<!-- /name -->`` of a page, made anew."""

from __future__ import annotations

import re
from collections.abc import Mapping

LONGEST = 12
"""Rows of a table that a page shows without a fold."""

_TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)


def marked(page: str, parts: Mapping[str, str], *, fold: bool = True) -> str:
    """The page with each named part replaced; with ``fold``, tables of many rows are behind a fold."""
    for name, text in parts.items():
        before, rest = page.split(f"<!-- {name} -->\n", 1)
        _, after = rest.split(f"<!-- /{name} -->", 1)
        page = f"{before}<!-- {name} -->\n{(folded(text) if fold else text).rstrip()}\n<!-- /{name} -->{after}"
    return page


def folded(text: str) -> str:
    r"""Markdown with each table of more than ``LONGEST`` rows inside a ``<details>``.

    Example:
        >>> folded("| a | b |\n| --- | ---: |\n| 1 | 2 |") == "| a | b |\n| --- | ---: |\n| 1 | 2 |"
        True
        >>> print(folded("| a | b |\n| --- | ---: |" + 13 * "\n| 1 | 2 |").splitlines()[1])
        <summary>All 13 rows: a; b</summary>
    """
    return _TABLE.sub(lambda found: _fold(found.group()), text)


def _fold(table: str) -> str:
    head, _, *rows = table.splitlines()
    if len(rows) <= LONGEST:
        return table
    columns = "; ".join(name for cell in head.strip("|").split("|") if (name := cell.strip()))
    # The attribute is for the site, whose Markdown would otherwise not read a table inside HTML; GitHub drops it.
    opened = f'<details markdown="1">\n<summary>All {len(rows)} rows: {columns}</summary>'
    return f"{opened}\n\n{table.rstrip()}\n\n</details>\n"
