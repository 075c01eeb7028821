"""Text between ``<!-- name -->`` and ``<!-- /name -->`` of a page, made anew."""

from __future__ import annotations

from collections.abc import Mapping


def marked(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with each named part replaced.

    Args:
        page: Markdown with a pair of marks for every part.
        parts: Name -> Markdown.

    Returns:
        The page.
    """
    for name, text in parts.items():
        before, rest = page.split(f"<!-- {name} -->\n", 1)
        _, after = rest.split(f"<!-- /{name} -->", 1)
        page = f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->{after}"
    return page
