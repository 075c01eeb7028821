"""Colour, marker and dash by the role of a method: the same on every plot, page and terminal.

Colours are Okabe & Ito's, which colour-blind readers tell apart; a marker or dash always repeats what a colour says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

Role = Literal["ours", "extension", "reference", "rival", "second_rival", "baseline", "good", "warning"]
"""ours: the paper's method · extension: ours of it · reference: full or exact · rivals · baseline · verdicts."""

Theme = Literal["light", "dark"]

Themes = Literal["light", "dark", "both"]  # backgrounds that one drawing may stand on

Dash = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Style:
    """How a role is drawn."""

    colour: str
    """On a light background, #rrggbb."""

    dark: str
    """On a dark background, #rrggbb."""

    marker: str
    """Marker in matplotlib's letters."""

    sign: str
    """The same marker as a character, for tables."""

    dash: Dash
    """Lengths of strokes and gaps in line widths; empty for a solid line."""


_STYLES: dict[Role, Style] = {
    "ours": Style("#0072B2", "#0072B2", "o", "●", ()),
    "extension": Style("#56B4E9", "#56B4E9", "D", "◆", (5, 1.5)),
    "reference": Style("#000000", "#FFFFFF", "s", "■", ()),
    "rival": Style("#D55E00", "#D55E00", "^", "▲", (6, 1.5, 1.5, 1.5)),
    "second_rival": Style("#E69F00", "#E69F00", "v", "▼", (1.5, 1.5)),
    "baseline": Style("#8A8A8A", "#8A8A8A", "X", "✕", (3, 2)),
    "good": Style("#009E73", "#009E73", "P", "✚", ()),
    "warning": Style("#F0E442", "#F0E442", "*", "★", (2, 1)),
}


def style(role: Role) -> Style:
    """Colour, marker and dash of a role.

    Args:
        role: What a method is in the comparison.

    Returns:
        How it is drawn everywhere.

    Example:
        >>> style("ours").colour, style("reference").dark
        ('#0072B2', '#FFFFFF')
    """
    return _STYLES[role]


ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Shades:
    """Colours of a page or picture apart from the methods: at least 4.5 to 1 for all that is read."""

    paper: str
    ink: str
    quiet: str
    rule: str
    panel: str
    link: str


LIGHT = Shades(paper="#ffffff", ink="#1b1f24", quiet="#57606a", rule="#d5dae0", panel="#f5f7f9", link="#005f95")
DARK = Shades(paper="#15181c", ink="#e8eaed", quiet="#a3abb5", rule="#3a4149", panel="#1e2328", link="#7cc4f0")


def blend(colour: str, paper: str, share: float) -> str:
    """Blend a colour into the paper; opaque, because matplotlib's SVG fades a hatch together with its background.

    Example:
        >>> blend("#000000", "#ffffff", 0.2)
        '#cccccc'
    """
    pairs = [[int(one[start : start + 2], 16) for one in (colour, paper)] for start in (1, 3, 5)]
    return "#" + "".join(f"{round(share * top + (1 - share) * below):02x}" for top, below in pairs)


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one drawing; for both themes, stand-ins that `follow_theme` turns into the reader's choice."""

    theme: Themes  # background or backgrounds

    # stand-in -> colour on a light background and on a dark one
    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)

    def either(self, light: str, dark: str) -> str:
        """One of two colours, by the background."""
        if self.theme != "both" or light == dark:
            return dark if self.theme == "dark" else light
        known = {pair: name for name, pair in self.pairs.items()}
        name = known.get((light, dark), f"#01f{len(known):03x}")
        # a stand-in must be a colour, for matplotlib checks it and writes six digits; ours and viridis' never begin
        # with #01f
        self.pairs[name] = (light, dark)
        return name

    @property
    def shades(self) -> Shades:
        """Colours of text, rules and paper."""
        return Shades(**{f.name: self.either(getattr(LIGHT, f.name), getattr(DARK, f.name)) for f in fields(Shades)})

    def of(self, role: Role) -> str:
        """Colour of a role."""
        return self.either(style(role).colour, style(role).dark)

    def pale(self, colour: str, share: float, dark_share: float | None = None) -> str:
        """A colour blended into the paper."""
        light, dark = self.pairs.get(colour, (colour, colour))
        shares = (share, share if dark_share is None else dark_share)
        return self.either(blend(light, LIGHT.paper, shares[0]), blend(dark, DARK.paper, shares[1]))


def follow_theme(svg: str, pairs: Mapping[str, tuple[str, str]]) -> str:
    """Let a drawing for both themes follow its reader: stand-ins become variables for light, dark and print.

    Example:
        >>> drawing = '<svg><g fill="#01f000"/></svg>'
        >>> follow_theme(drawing, {"#01f000": ("#000000", "#ffffff")}).partition("</style>")[2]
        '<g fill="var(--c000000-ffffff)"/></svg>'
    """
    if not pairs:
        return svg
    names = {name: f"--c{light[1:]}-{dark[1:]}".lower() for name, (light, dark) in pairs.items()}
    # print keeps the light colours: only screens ask for dark
    light, dark = (
        ":root{" + "".join(f"{names[name]}:{pair[at]};" for name, pair in pairs.items()) + "}" for at in (0, 1)
    )
    both = f"<style>{light}@media screen and (prefers-color-scheme:dark){{{dark}}}</style>"
    head, rest = re.sub("|".join(names), lambda match: f"var({names[match[0]]})", svg).split(">", 1)
    return f"{head}>{both}{rest}"


def contrast(one: str, other: str) -> float:
    """Ratio of luminances of two colours, 1 to 21.

    Source: Web Content Accessibility Guidelines 2.1, "contrast ratio" and "relative luminance".

    Example:
        >>> round(contrast("#ffffff", "#000000"), 1)
        21.0
    """
    luminances = []
    for colour in (one, other):
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels)
        luminances.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)
