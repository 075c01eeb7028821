"""The text of a page, compared with the one that is committed beside its test.

After a deliberate change, write all of them anew and read the difference:

    PAGES=write python -m pytest -q -k snapshot tests/jobs && git diff tests/jobs
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sparing.report import Page, Section, Table


def text_of(page: Page) -> str:
    """All that a page says, figures by title, alt text and caption."""
    lines = [page.title, page.question, page.answer]
    for section in page.sections:
        lines += ["", f"# {section.title}", *_lines(section)]
    lines += ["", "# Reproduce", *(f"{name}: {value}" for name, value in page.reproduce.items())]
    lines += ["", "# Caveats", *page.caveats]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _lines(section: Section) -> Iterator[str]:
    if section.text:
        yield section.text
    for figure in section.figures:
        yield f"\nFigure: {figure.title}\n{figure.alt}\n{figure.caption}"
    for table in section.tables:
        yield from ("", f"Table{', folded' * table.folded}: {table.title}", *_rows(table))
        if table.note:
            yield table.note
    for sample in section.samples:
        yield f"\nText: {sample.title}\n{sample.prompt}"
        yield from (f"{name}: {text}" for name, text in sample.texts.items())


def _rows(table: Table) -> Iterator[str]:
    shown = table.shown
    yield " | ".join(f"{column.label} ({column.unit})" if column.unit else column.label for column in shown)
    roles, named = table.roles or {}, table.named(shown)
    for cells in zip(*(column.cells for column in shown), strict=True):
        sign = f" [{roles[cells[named]]}]" if named is not None and cells[named] in roles else ""
        yield " | ".join(cells) + sign


def check_page(page: Page, file: str, name: str = "page") -> None:
    """Compare a page with ``<name>.txt`` beside the test file."""
    path, text = Path(file).with_name(f"{name}.txt"), text_of(page)
    if os.environ.get("PAGES") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
