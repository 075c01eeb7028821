"""Pictures of ``docs/``: one figure for light and for dark pages, and the Markdown that shows the one that fits."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import get_args

from sparing.report import Figure
from sparing.report.palette import Theme

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def drawn(name: str, figure: Figure) -> dict[Path, str]:
    """Text of each SVG file by its path."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for theme in get_args(Theme):
            path = figure.save_svg(Path(folder) / theme, theme=theme)
            found[FOLDER / f"{name}-{theme}.svg"] = path.read_text(encoding="utf-8")
    return found


def markdown(name: str, alt: str) -> str:
    """Markdown of a page in ``docs/results``."""
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="../pictures/{name}-dark.svg">\n'
        f'<img src="../pictures/{name}-light.svg" alt="{alt}">\n</picture>\n\n'
    )
