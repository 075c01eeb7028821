"""Writes the page: one file, whose only script and style a content policy names by their hashes."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from sparing.jobs.plan.cards import REACHED
from sparing.jobs.plan.device import RULE
from sparing.jobs.plan.interactive.facts import facts
from sparing.jobs.plan.settings import Settings
from sparing.report.atomic import write_whole
from sparing.report.environment import version
from sparing.report.figure import FONTS
from sparing.report.palette import DARK, LIGHT, ROLES, style

SCRIPTS = ("price.js", "split.js", "page.js")


def write_page(settings: Settings, path: Path) -> Path:
    """Write the page of the planner; nothing is priced here, the page does."""
    # here, because a plan without a page need not wait for it
    from jinja2 import Environment

    folder = Path(__file__).parent
    known = json.dumps({**facts(settings), "rule": RULE}, ensure_ascii=False).replace("<", "\\u003c")
    script = "\n".join([f"const FACTS = {known};", *((folder / name).read_text("utf-8") for name in SCRIPTS)])
    css = (folder / "page.css").read_text("utf-8").replace("FONTS", FONTS)
    for word, shades in (("LIGHT", LIGHT), ("DARK", DARK)):
        for name, colour in asdict(shades).items():
            css = css.replace(f"{word}{name}", colour)
    for role in ROLES:
        css = css.replace(f"ROLE-{role};", f"{style(role).colour};")
    html = Environment(autoescape=True).from_string((folder / "page.html.j2").read_text("utf-8")).render(
        script=script, css=css, script_hash=_hash(script), style_hash=_hash(css), reached=f"{REACHED:.0%}",
        version=version(),
    )  # fmt: skip
    return write_whole(path, html)


def _hash(text: str) -> str:
    """As a content policy names what may run."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
