"""Tables of ``docs/results/claims.md``: each claim of the five papers, what was measured of it, and the verdict."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from benchmarks.claims import lisa, paro, supar, unrolling, valleys
from benchmarks.claims.sources import MINUS, VERDICTS, Claim, Pages
from benchmarks.marks import marked
from benchmarks.steps import STEPS

PAPERS: dict[str, tuple[Claim, ...]] = {
    "claims-fg2u": unrolling.CLAIMS,
    "claims-supar": supar.CLAIMS,
    "claims-lisa": lisa.CLAIMS,
    "claims-paro": paro.CLAIMS,
    "claims-valleys": valleys.CLAIMS,
    "claims-fedsign": valleys.FEDSIGN,
}
"""Mark -> claims."""
_HYPHEN = re.compile(r"(?<!\w)-(?=\d)")
WORDS = {"holds": "hold", "holds in part": "hold in part", "does not hold here": "do not hold here"}
"""Verdicts of more than one claim."""


def claims(of: Sequence[Claim], see: Pages) -> str:
    """One row per claim; text in every column."""
    head = ("claim, and where", "measured here", "n", "verdict", "command")
    lines = [head, ("---",) * len(head)]
    for claim in of:
        found = claim.found(see)
        said = _HYPHEN.sub(MINUS, found.text)
        more = f" More: [{claim.page}]({claim.page}.md)." if claim.page else ""
        commands = "<br>".join(f"`{name}`" for name in claim.steps) or "–"
        lines.append((f"{claim.says} *({claim.place})*", said + more, found.n, f"**{claim.verdict}**", commands))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def count() -> str:
    """How many claims have which verdict."""
    found = Counter(claim.verdict for of in PAPERS.values() for claim in of)
    parts = [f"{found[verdict]} {WORDS.get(verdict, f'are {verdict}')}" for verdict in VERDICTS if found[verdict]]
    return f"Of {sum(found.values())} claims: {', '.join(parts)}."


def unsound(see: Pages) -> list[str]:
    """Claims whose verdict the numbers no longer bear, and commands that no step has; for tests."""
    known = {step.name for step in STEPS}
    return [
        claim.says
        for of in PAPERS.values()
        for claim in of
        if not claim.found(see).stands or not known.issuperset(claim.steps)
    ]


def filled(page: str, see: Pages) -> str:
    """The page with every table made anew; the numbers are taken from the tables of the other pages."""
    parts = {"claims-count": count()} | {mark: claims(of, see) for mark, of in PAPERS.items()}
    return marked(page, parts, fold=False)
